"""The ledger: every admitted prompt is trained, or dropped with a reason, exactly once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from forge_async.buffer.selection import UNFINISHED, FateCounts, Selection, Strata
from forge_async.errors import ForgeError


class LedgerError(ForgeError):
    """A prompt was given a second fate, or a fate without having been admitted: a defect in the loop, never the
    user's."""


class Ledger:
    """Counts fates and refuses the second one.

    ``admitted == trained + sum(dropped.values()) + in_flight`` holds after every call (:attr:`balanced` checks it
    against independent counts).
    """

    def __init__(self) -> None:
        self.admitted = 0
        """Prompts that entered the buffer."""
        self.trained = 0
        """Prompts whose group was part of an optimizer step."""
        self.dropped: Counter[str] = Counter()
        """Prompts given up, by reason."""
        self._in_flight: dict[str, dict[str, str]] = {}  # strata by id, in order of admission
        self._fates: dict[str, str] = {}
        self._counts = FateCounts()

    @property
    def in_flight(self) -> int:
        """Prompts whose fate is open."""
        return len(self._in_flight)

    @property
    def balanced(self) -> bool:
        return self.admitted == self.trained + sum(self.dropped.values()) + len(self._in_flight)

    def admit(self, prompt_id: str, strata: Strata | None = None) -> None:
        """Open an account for ``prompt_id``, which is unique per occurrence of a dataset row."""
        if prompt_id in self._in_flight:
            raise LedgerError(f"prompt {prompt_id} was admitted twice: its fate is still open.")
        if prompt_id in self._fates:
            raise LedgerError(f"prompt {prompt_id} was admitted again after it was {self._fates[prompt_id]}.")
        self._in_flight[prompt_id] = dict(strata or {})
        self.admitted += 1

    def finish(self, prompt_id: str, completion_tokens: str) -> None:
        """Note the stratum of the completions' length; of several times (the prompt was generated anew) the last one
        counts."""
        self._in_flight[prompt_id]["completion_tokens"] = completion_tokens

    def train(self, prompt_id: str) -> None:
        self._close(prompt_id, "trained")
        self.trained += 1

    def drop(self, prompt_id: str, reason: str) -> None:
        """Give the prompt up; ``reason`` is a short word, such as ``failed`` or ``stale``, by which drops are
        counted."""
        self._close(prompt_id, f"dropped ({reason})")
        self.dropped[reason] += 1

    def fate(self, prompt_id: str) -> str | None:
        """``"trained"``, ``"dropped (reason)"``, ``"in flight"``, or None when it is unknown (or older than a
        resume)."""
        return "in flight" if prompt_id in self._in_flight else self._fates.get(prompt_id)

    def _close(self, prompt_id: str, fate: str) -> None:
        if prompt_id not in self._in_flight:
            earlier = self._fates.get(prompt_id)
            history = f"it is already {earlier}" if earlier else "it was never admitted"
            raise LedgerError(f"prompt {prompt_id} cannot be {fate}: {history}.")
        strata = self._in_flight.pop(prompt_id)
        self._fates[prompt_id] = fate
        if strata:
            self._counts.add({"completion_tokens": UNFINISHED, **strata}, trained=fate == "trained")

    def selection(self) -> dict[str, Selection]:
        """Submitted against trained by ``task``, ``prompt_tokens`` and ``completion_tokens``. Prompts in flight count
        as submitted; in the last one only once their completions are there."""
        return self._counts.selection(self._in_flight.values())

    def summary(self) -> dict[str, Any]:
        """``{"admitted": n, "trained": n, "dropped": {reason: n}}``, as in a run's ``summary.json``."""
        return {"admitted": self.admitted, "trained": self.trained, "dropped": dict(sorted(self.dropped.items()))}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps (plain JSON data): counts, and the ids whose fate is open, in order of admission."""
        return {**self.summary(), "in_flight": list(self._in_flight), "strata": self._counts.state()}

    def restore(self, state: dict[str, Any]) -> list[str]:
        """Take over a checkpoint's counts; returns the ids whose fate was open.

        Those are not counted as admitted any more: hand them to the prompt source, which issues them first, and they
        are admitted anew. Fates decided before the checkpoint are kept as counts only; the source never issues those
        again.
        """
        if self.admitted:
            raise LedgerError("restore() needs a fresh ledger.")
        open_ids = [str(prompt_id) for prompt_id in state["in_flight"]]
        self.trained = int(state["trained"])
        self.dropped = Counter({str(reason): int(count) for reason, count in state["dropped"].items()})
        self.admitted = int(state["admitted"]) - len(open_ids)
        if not self.balanced:
            raise LedgerError(f"the checkpoint's ledger does not balance: {state}.")
        self._counts = FateCounts.restored(state["strata"])
        return open_ids
