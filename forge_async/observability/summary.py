"""What a run comes to: ``summary.json`` and a few lines for a person."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console as RichConsole
from rich.text import Text

from forge_async.observability.advice import Advice
from forge_async.observability.console import percent
from forge_async.observability.jsonl import to_plain
from forge_async.observability.run_folder import write_whole
from forge_async.observability.tables import Shown


@dataclass(frozen=True, repr=False)
class Summary(Shown):
    """The figures of a whole run, as they stand in ``summary.json``. Prints itself; in a notebook it is a table."""

    steps: int
    """Optimizer steps taken."""
    wall_s: float
    """Seconds from the first admission to the last step's end."""
    rewards: Sequence[float]
    """Mean reward of each step's batch; the file holds the means of the first 5 and the last 10."""
    swaps: int = 0
    """Versions that became live in a generator, over all generators."""
    swaps_in_flight: int = 0
    """Those with requests running at that moment."""
    aborted_by_swap: int = 0
    """Requests that were lost by a swap: ended as aborted although nobody had asked for it."""
    trained_tokens: int = 0
    tokens_without_version: int = 0
    discarded_tokens: int = 0
    """Generated tokens that a swap threw away."""
    recomputed_tokens: int = 0
    """Tokens whose keys and values a swap threw away."""
    staleness_bound: int = 0
    staleness_max: int = 0
    """Largest staleness of any trained token, versions."""
    kv_staleness_max: int = 0
    """The same of the oldest keys and values any trained token attended to."""
    staleness_histogram: Sequence[int] = ()
    """Trained tokens of staleness 0, 1, 2, ..."""
    digest_mismatches: int = 0
    admitted: int = 0
    """Prompts taken from the dataset into the run."""
    trained: int = 0
    """Prompts whose group was trained on."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Prompts by the reason why they were not."""
    in_flight: int = 0
    """Prompts without a fate yet; none once a run has ended."""
    requeued_requests: int = 0
    """Requests sent again because their replica died."""
    retried: int = 0
    """Prompts generated anew because their work was lost."""
    selection_bias: Mapping[str, Any] = field(default_factory=dict)
    """Trained against submitted prompts by attribute: ``buffer.selection.Selection.to_dict``."""
    idle_trainer: float = 0.0
    """Share of ``wall_s`` in which the trainer did nothing."""
    idle_generators: Sequence[float | None] = ()
    """The same per generator; None: it was never asked."""
    generated_tokens_per_s: float = 0.0
    trained_tokens_per_s: float = 0.0
    phase_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of all steps by phase of the trainer's step; see ``StepStats.phase_s``."""
    advice: Advice | None = None
    """None where too little was measured."""

    @property
    def balanced(self) -> bool:
        """Every admitted prompt has exactly one fate, or is in flight."""
        return self.admitted == self.trained + sum(self.dropped.values()) + self.in_flight

    @property
    def reward_first5(self) -> float | None:
        return mean(self.rewards[:5])

    @property
    def reward_last10(self) -> float | None:
        return mean(self.rewards[-10:])

    def to_dict(self) -> dict[str, Any]:
        """The content of ``summary.json``."""
        content = {
            "steps": self.steps,
            "wall_s": round(self.wall_s, 3),
            "reward": {"first5": self.reward_first5, "last10": self.reward_last10},
            "swaps": self.swaps,
            "swaps_in_flight": self.swaps_in_flight,
            "aborted_by_swap": self.aborted_by_swap,
            "tokens": {
                "trained": self.trained_tokens,
                "without_version": self.tokens_without_version,
                "discarded": self.discarded_tokens,
                "recomputed": self.recomputed_tokens,
            },
            "staleness": {
                "bound": self.staleness_bound,
                "max_seen": self.staleness_max,
                "kv_max_seen": self.kv_staleness_max,
                "histogram": list(self.staleness_histogram),
            },
            "digest_mismatches": self.digest_mismatches,
            "ledger": {"admitted": self.admitted, "trained": self.trained, "dropped": dict(self.dropped)},
            "requeued": {"requests": self.requeued_requests, "prompts": self.retried},
            "selection_bias": dict(self.selection_bias),
            "idle_share": {"trainer": self.idle_trainer, "generators": list(self.idle_generators)},
            "tokens_per_s": {"generated": self.generated_tokens_per_s, "trained": self.trained_tokens_per_s},
            "trainer_s": dict(self.phase_s),
            "advice": None if self.advice is None else self.advice.to_dict(),
        }
        return to_plain(content)

    def write(self, path: Path) -> None:
        """Write ``summary.json``, whole or not at all."""
        write_whole(path, json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")

    def print(self, path: Path, plot: Path | None = None, file: IO[str] | None = None) -> None:
        """Print the summary for a person; the last line is the path of ``summary.json`` and nothing else."""
        file = file or sys.stdout
        console = RichConsole(file=file, highlight=False, soft_wrap=True)
        for label, text in self.lines(plot):
            console.print(Text.assemble((f"{label:<11}", "bold"), text))
        file.write(f"{path}\n")  # not through rich: a long path must not be wrapped
        file.flush()

    def title(self) -> str:
        return "summary"

    def rows(self) -> Iterable[Sequence[Any]]:
        return self.lines()

    def lines(self, plot: Path | None = None) -> list[tuple[str, str]]:
        """Label and text of every line of the printed summary."""
        dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items())) or "none"
        generators = " ".join(map(percent, self.idle_generators)) or "-"
        rows = [
            ("steps", f"{self.steps} in {self.wall_s:.0f} s"),
            ("reward", self._rewards()),
            (
                "swaps",
                f"{self.swaps}, {self.swaps_in_flight} with requests in flight"
                + (f", {self.aborted_by_swap} REQUESTS LOST" if self.aborted_by_swap else "")
                + (f", {self.digest_mismatches} DIGEST MISMATCHES" if self.digest_mismatches else ""),
            ),
            ("staleness", f"at most {self.staleness_max}, bound {self.staleness_bound}"),
            (
                "prompts",
                f"{self.admitted} admitted, {self.trained} trained, dropped: {dropped}"
                + (f", in flight: {self.in_flight}" if self.in_flight else "")
                + ("" if self.balanced else "  (THE LEDGER DOES NOT BALANCE)"),
            ),
            ("tokens/s", f"generated {self.generated_tokens_per_s:.0f}, trained {self.trained_tokens_per_s:.0f}"),
            ("idle", f"trainer {self.idle_trainer:.0%}, generators {generators}"),
        ]
        if spent := sum(self.phase_s.values()):
            parts = sorted(self.phase_s.items(), key=lambda item: -item[1])
            rows.append(("trainer", ", ".join(f"{name} {s / spent:.0%}" for name, s in parts if s >= 0.005 * spent)))
        if self.advice is not None:
            rows.append(("balance", str(self.advice)))
        if self.tokens_without_version:
            rows.append(("tokens", f"{self.tokens_without_version} of {self.trained_tokens} without a policy version"))
        if self.discarded_tokens or self.recomputed_tokens:
            wasted = f"{self.discarded_tokens} thrown away by swaps, {self.recomputed_tokens} computed anew"
            rows.append(("wasted", wasted))
        if plot is not None:
            rows.append(("plot", str(plot)))
        return rows

    def _rewards(self) -> str:
        """Of the first steps and of the last, which must be others; of a short run the mean alone."""
        steps = len(self.rewards)
        if steps < 10:
            return f"{_number(mean(self.rewards))}" + (f" (mean of {steps} steps)" if steps > 1 else "")
        last = min(10, steps - 5)
        return f"{_number(self.reward_first5)} (first 5 steps) → {_number(mean(self.rewards[-last:]))} (last {last})"


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean, None without values."""
    return sum(values) / len(values) if len(values) else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
