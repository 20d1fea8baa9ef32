"""The bounded buffer between rollout and trainer: who may start, and what may be trained.

Words. *u* is the trainer's version (optimizer steps done), *w* <= *u* the policy's version: what generators use for new
requests. A prompt's *stamp* is w at its admission; its tokens are made by versions >= stamp, because generators only
move forward. G = ``groups_per_step``, S = ``max_staleness``. A prompt is *open* from its admission until it is trained
or dropped. D(x) counts open prompts with stamp <= x.

Claim: every group is trained at a version u <= stamp + S, so that no trained token is staler than S.

The invariant, at all times, for the stamp x of every open prompt::

    D(x) <= (x + S + 1 - u) * G                                                                          (I)

It says that the prompts stamped x or earlier fit into the batches of versions u, u + 1, ..., x + S, which are the ones
that may still train them. As D(x) >= 1, it implies u <= x + S: while a prompt is open the claim is not yet broken, so
it is not when the prompt is trained. (I) holds at the start (nothing is open), and each event keeps it:

* *Admission* adds a prompt with stamp w, and no stamp is newer than w: for x < w nothing changes, and for x >= w the
  left side is the number of open prompts. So it is allowed only while ``open < (w + S + 1 - u) * G``: the bound
  ``(S + 1) * G``, less G for every version by which generators lag behind the trainer. (``max_open_groups`` only lowers
  it.)
* *A drop* only lowers D. *The policy advances*: w is not in (I).
* *A step* trains a batch and turns u into u + 1, which lowers every right side by G. A batch may therefore leave only
  once it holds, for every x, at least ``D(x) - (x + S - u) * G`` prompts with stamp <= x. By (I) that is at most G.
  Batches take the oldest finished groups first, which satisfies this whenever any choice of G finished groups does.
  Otherwise the batch waits for a straggler: going on without it would force a later batch over the bound.

No deadlock: when all open prompts have ended, the oldest-first batch satisfies the condition (it holds min(D(x), G)
prompts with stamp <= x), and with w = u admission goes on until (S + 1) * G >= G prompts are open. So the loop waits
only for rollouts, which have time limits, and for the policy to advance, which needs no further step.

S = 0 is synchronous on-policy training: nothing is admitted after a step until the policy is on the new version.

The rule is stated on stamps; :meth:`RolloutBuffer.batches` checks the tokens' own versions as well, and drops what
should not exist (a replica that was behind) with reason ``stale``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from forge_async.buffer.config import BufferConfig
from forge_async.buffer.ledger import Ledger
from forge_async.errors import ForgeError, RunFailed
from forge_async.types import Group, Prompt

logger = logging.getLogger(__name__)


class PromptTooLong(ForgeError):
    """Raised by a source whose next prompt does not fit; the buffer records the prompt as dropped and asks for the
    next."""

    def __init__(self, prompt_id: str, message: str) -> None:
        self.prompt_id = prompt_id
        super().__init__(message)


class Source(Protocol):
    """Where prompts come from; raises StopIteration when there are no more."""

    def __next__(self) -> Prompt: ...


@dataclass
class _Open:
    """An open prompt."""

    stamp: int
    group: Group | None = None  # set once it is finished


class RolloutBuffer:
    """Admission, queue and staleness gate. All methods belong to one event loop; those that are not async return at
    once.

    Args:
        config: the bounds.
        ledger: records every prompt's fate.
        version: the trainer's version at the start, also taken as the policy's: more than 0 after a resume.
    """

    def __init__(self, config: BufferConfig, ledger: Ledger | None = None, version: int = 0) -> None:
        self.config = config
        self.ledger = Ledger() if ledger is None else ledger
        self.trainer_version = version
        self.policy_version = version
        self.max_staleness_seen = 0
        """Largest staleness of any token of a batch handed out, in optimizer steps."""
        self._open: dict[str, _Open] = {}  # in order of admission, hence of stamps
        self._batch: dict[str, None] = {}  # ids of the batch being trained; they stay open until trained()
        self._closed: set[str] = set()  # ids that close() dropped
        self._ended: str | None = None  # why admission ended
        self._failure: ForgeError | None = None
        self._drops_in_a_row = 0
        self._changed = asyncio.Event()

    # --- what a dashboard shows

    @property
    def open(self) -> int:
        """Prompts admitted whose fate is not decided."""
        return len(self._open)

    @property
    def depth(self) -> int:
        """Finished groups that wait for the trainer."""
        return sum(entry.group is not None for entry in self._open.values()) - len(self._batch)

    @property
    def in_flight(self) -> int:
        """Prompts whose rollouts run."""
        return sum(entry.group is None for entry in self._open.values())

    @property
    def ended(self) -> str | None:
        """Why admission has ended (``dataset ended: ...``, or the reason given to :meth:`close`), else None."""
        return self._ended

    # --- producers

    @property
    def room(self) -> int:
        """Prompts that may be admitted now."""
        lag = self.trainer_version - self.policy_version
        allowed = (self.config.max_staleness + 1 - lag) * self.config.groups_per_step
        return max(0, min(allowed, self.config.capacity) - len(self._open))

    async def admit(self, source: Iterator[Prompt] | Source) -> Prompt | None:
        """The source's next prompt, once there is room; None when the source or the buffer has ended.

        Backpressure: waits for :meth:`trained`, :meth:`drop`, :meth:`advance` or :meth:`close`. Whoever gets a prompt
        must call :meth:`finish` or :meth:`drop` for it. Errors of the source pass through.
        """
        while self._ended is None:
            if self._failure is not None:
                raise self._failure
            if self.room == 0:
                await self._changed.wait()
                continue
            try:
                prompt = next(source)  # type: ignore[arg-type]
            except StopIteration as end:
                self._ended = f"dataset ended: {end.value}" if end.value else "dataset ended"
                self._wake()
                break
            except PromptTooLong as error:
                self.ledger.admit(error.prompt_id)
                logger.warning("%s", error)
                self._count_drop(error.prompt_id, "prompt_too_long")
                continue
            self.ledger.admit(prompt.prompt_id)
            self._open[prompt.prompt_id] = _Open(self.policy_version)
            return prompt
        return None

    def finish(self, group: Group) -> bool:
        """Queue a finished group; False when it was dropped instead (too small, uniform, or the buffer is closed)."""
        prompt_id = group.prompt.prompt_id
        entry = self._open.get(prompt_id)
        if prompt_id in self._closed:
            return False
        if entry is None or entry.group is not None:
            fate = "finished twice" if entry is not None else "finished without being open"
            raise ForgeError(
                f"prompt {prompt_id} was {fate} (its fate: {self.ledger.fate(prompt_id) or 'never admitted'})."
            )
        if len(group.episodes) < self.config.min_group_size:
            self.drop(prompt_id, "failed" if not group.episodes else "group_too_small")
            return False
        if self.config.drop_uniform_groups and len({episode.reward for episode in group.episodes}) == 1:
            self.drop(prompt_id, "uniform_reward")
            return False
        entry.group = group
        self._wake()
        return True

    def drop(self, prompt_id: str, reason: str) -> None:
        """Give up a prompt; its slot is free at once. A no-op for prompts that :meth:`close` has dropped."""
        if prompt_id in self._closed:
            return
        self._open.pop(prompt_id, None)
        self._batch.pop(prompt_id, None)
        self._count_drop(prompt_id, reason)

    # --- the trainer

    async def batches(self, version: Callable[[], int] | None = None) -> AsyncIterator[list[Group]]:
        """Batches of ``groups_per_step`` groups, oldest first, until the dataset or the buffer has ended.

        Waits for :meth:`finish` and :meth:`drop`. Call :meth:`trained` with each batch before asking for the next one.
        ``version``, when given, is the trainer's version as the trainer sees it; a disagreement with what
        :meth:`trained` reported is an error.

        Raises:
            RunFailed: too many drops in a row, or what :meth:`fail` was given.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if version is not None and version() != self.trainer_version:
                raise ForgeError(
                    f"the trainer is at version {version()}, trained() last reported {self.trainer_version}."
                )
            batch = self.take()
            if batch:
                yield batch
            elif self._ended is not None and not self._open:
                return
            else:
                await self._changed.wait()

    def take(self) -> list[Group]:
        """The next batch when it may leave now, else an empty list. The core of :meth:`batches`, without waiting."""
        if self._batch:
            raise ForgeError("the previous batch was not reported with trained().")
        self._drop_stale()
        size = self.config.groups_per_step
        finished = [(entry.stamp, entry.group) for entry in self._open.values() if entry.group is not None]
        if len(finished) < size:
            if self._ended is None or not finished or len(finished) < len(self._open):
                return []
            if not self.config.train_partial_batch:
                for _, group in finished:
                    self.drop(group.prompt.prompt_id, "partial_batch")
                return []
        chosen = finished[:size]
        if not self._keeps_the_bound([stamp for stamp, _ in chosen]):
            return []
        batch = [group for _, group in chosen]
        self._batch = {group.prompt.prompt_id: None for group in batch}
        staleness = max(self.trainer_version - group.oldest_version for group in batch)
        self.max_staleness_seen = max(self.max_staleness_seen, staleness)
        return batch

    def _keeps_the_bound(self, chosen: Sequence[int]) -> bool:
        """The condition on a batch in this file's head, for every stamp that an open prompt has."""
        stamps = [entry.stamp for entry in self._open.values()]
        size, horizon = self.config.groups_per_step, self.config.max_staleness - self.trainer_version
        for x in set(stamps):
            needed = sum(stamp <= x for stamp in stamps) - (x + horizon) * size
            if sum(stamp <= x for stamp in chosen) < needed:
                return False
        return True

    def _drop_stale(self) -> None:
        for prompt_id, entry in list(self._open.items()):
            if (
                entry.group is not None
                and self.trainer_version - entry.group.oldest_version > self.config.max_staleness
            ):
                logger.warning(
                    "prompt %s dropped: its oldest token is of version %d, the trainer at %d, max_staleness is %d",
                    *(prompt_id, entry.group.oldest_version, self.trainer_version, self.config.max_staleness),
                )
                self.drop(prompt_id, "stale")

    def trained(self, batch: Sequence[Group], version: int) -> None:
        """Report that the step on ``batch`` is done and the trainer is now at ``version``.

        An unchanged version means that the step was skipped (no token had a loss): the groups are dropped as
        ``skipped_step``.
        """
        ids = [group.prompt.prompt_id for group in batch]
        if set(ids) != set(self._batch):
            raise ForgeError(f"trained() was given {sorted(ids)}, the batch handed out is {sorted(self._batch)}.")
        if version not in (self.trainer_version, self.trainer_version + 1):
            raise ForgeError(f"the trainer went from version {self.trainer_version} to {version} in one batch.")
        skipped = version == self.trainer_version
        self._batch = {}
        self.trainer_version = version
        for prompt_id in ids:
            del self._open[prompt_id]
            if skipped:
                self._count_drop(prompt_id, "skipped_step")
            else:
                self.ledger.train(prompt_id)
                self._drops_in_a_row = 0
        self._wake()

    # --- the loop

    def advance(self, version: int) -> None:
        """Every generator starts new requests on ``version`` or a newer one from now on."""
        if version > self.trainer_version:
            raise ForgeError(f"the policy cannot be at version {version}: the trainer is at {self.trainer_version}.")
        self.policy_version = max(self.policy_version, version)
        self._wake()

    def close(self, reason: str = "run_ended", keep_batch: bool = False) -> None:
        """End admission and drop every open prompt for ``reason``; with ``keep_batch`` the batch in training stays
        open.

        Producers may still call :meth:`finish` and :meth:`drop` for what this has dropped; both are no-ops then.
        """
        self._ended = reason
        for prompt_id in list(self._open):
            if not (keep_batch and prompt_id in self._batch):
                del self._open[prompt_id]
                self._closed.add(prompt_id)
                self.ledger.drop(prompt_id, reason)
        self._batch = {prompt_id: None for prompt_id in self._batch if prompt_id in self._open}
        self._wake()

    def fail(self, error: ForgeError) -> None:
        """Make :meth:`batches` and :meth:`admit` raise ``error``; the first one given stays."""
        self._failure = self._failure or error
        self._wake()

    def _count_drop(self, prompt_id: str, reason: str) -> None:
        self.ledger.drop(prompt_id, reason)
        self._drops_in_a_row += 1
        limit = self.config.max_consecutive_drops
        counts = ", ".join(f"{name} {count}" for name, count in self.ledger.dropped.most_common())
        if self._drops_in_a_row >= limit:
            self.fail(
                RunFailed(f"{limit} prompts in a row were dropped and none was trained between; in all: {counts}.")
            )
        elif self._drops_in_a_row == max(1, limit // 4):
            logger.warning("%d prompts in a row were dropped; in all: %s", self._drops_in_a_row, counts)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
