"""Selection bias: whether what is trained is distributed as what was submitted.

Prompts are sorted into *strata*: by task, by the length of the prompt, by the mean length of its completions. A
stratum whose share among the trained prompts is smaller than among the submitted ones is under-represented: it is
slower than others (and overtaken, timed out, too old), or dropped more often.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forge_async.types import Group, Prompt

Strata = Mapping[str, str]
"""The stratum of one prompt by attribute, such as ``{"task": "chain_sum", "prompt_tokens": "33-64"}``."""

UNFINISHED = "none"
"""Stratum of completion lengths for prompts that were given up before any completion was scored."""


def length_stratum(tokens: float) -> str:
    """``1-16``, ``17-32``, ``33-64``, ...: lengths that differ by less than a factor of two are alike."""
    upper = 16
    while tokens > upper:
        upper *= 2
    return f"{1 if upper == 16 else upper // 2 + 1}-{upper}"


def prompt_strata(task: str, tokens: int) -> dict[str, str]:
    """What is known of a prompt when it is submitted."""
    return {"task": task or "all", "prompt_tokens": length_stratum(tokens)}


def strata_of(prompt: Prompt) -> dict[str, str]:
    return prompt_strata(prompt.task, len(prompt.token_ids))


def completion_stratum(group: Group) -> str:
    """By the mean number of sampled tokens of the scored episodes."""
    lengths = [len(turn.completion.token_ids) for episode in group.episodes for turn in episode.turns]
    return length_stratum(sum(lengths) / len(group.episodes)) if group.episodes else UNFINISHED


@dataclass(frozen=True)
class Selection:
    """One attribute's strata: prompts submitted, and of these the trained ones."""

    submitted: Mapping[str, int]
    trained: Mapping[str, int]

    @property
    def ratios(self) -> dict[str, float]:
        """Share among the trained over share among the submitted, by stratum; 1 is unbiased. Empty before anything was
        trained."""
        submitted, trained = sum(self.submitted.values()), sum(self.trained.values())
        if not trained:
            return {}
        return {name: (self.trained.get(name, 0) / trained) / (n / submitted) for name, n in self.submitted.items()}

    @property
    def distance(self) -> float:
        """Total-variation distance of the two distributions: the share of prompts that would have to be others, 0 to 1.
        0 before anything was trained."""
        submitted, trained = sum(self.submitted.values()), sum(self.trained.values())
        if not trained:
            return 0.0
        shares = ((self.trained.get(name, 0) / trained, n / submitted) for name, n in self.submitted.items())
        return sum(abs(a - b) for a, b in shares) / 2

    def to_dict(self) -> dict[str, Any]:
        """As in ``summary.json``: the distance, and per stratum the counts and their ratio."""
        ratios = self.ratios
        strata = {
            name: {"submitted": n, "trained": self.trained.get(name, 0), "ratio": ratios.get(name)}
            for name, n in self.submitted.items()
        }
        return {"distance": self.distance, "strata": strata}


@dataclass
class FateCounts:
    """Prompts whose fate is decided, by attribute and stratum."""

    ended: dict[str, Counter[str]] = field(default_factory=dict)
    """Trained or dropped."""
    trained: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, strata: Strata, trained: bool) -> None:
        for counts in (self.ended, self.trained) if trained else (self.ended,):
            for attribute, stratum in strata.items():
                counts.setdefault(attribute, Counter())[stratum] += 1

    def selection(self, open_strata: Iterable[Strata]) -> dict[str, Selection]:
        """By attribute; ``open_strata`` are those of prompts that are submitted and undecided."""
        submitted = {attribute: Counter(counts) for attribute, counts in self.ended.items()}
        for strata in open_strata:
            for attribute, stratum in strata.items():
                submitted.setdefault(attribute, Counter())[stratum] += 1
        return {
            attribute: Selection(dict(sorted(counts.items(), key=_order)), self.trained.get(attribute, {}))
            for attribute, counts in sorted(submitted.items())
        }

    def state(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            name: {attribute: dict(counts) for attribute, counts in tables.items()}
            for name, tables in (("ended", self.ended), ("trained", self.trained))
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> FateCounts:
        return cls(*({key: Counter(value) for key, value in state[name].items()} for name in ("ended", "trained")))


def _order(item: tuple[str, int]) -> tuple[int, str]:
    """Lengths by size, names by alphabet."""
    first = item[0].partition("-")[0]
    return (int(first) if first.isdigit() else 0, item[0])
