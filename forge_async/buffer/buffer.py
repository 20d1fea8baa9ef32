"""The bounded buffer between rollout and trainer: who may start, and what may be trained.

Words. *u* is the trainer's version (optimizer steps done), *w* <= *u* the policy's version: what generators use for new
requests. A prompt's *stamp* is w at its admission; its tokens are made by versions >= stamp, because generators only
move forward. G = ``groups_per_step``, S = ``max_staleness``, H = S + ``window``. A prompt is *open* from its admission
until it is trained, dropped, or given back to be generated anew. D(x) counts open prompts with stamp <= x.

Claim 1: every group is trained at a version u <= stamp + H, so that no trained token is staler than H.
Claim 2: a group that no younger one has overtaken is trained at u <= stamp + S. Only groups that are not finished are
overtaken.

The invariant, at all times, for the stamp x of every open prompt::

    D(x) <= (x + H + 1 - u) * G                                                                          (I)

It says that the prompts stamped x or earlier fit into the batches of versions u, u + 1, ..., x + H, which are the ones
that may still train them. As D(x) >= 1, it implies u <= x + H: while a prompt is open claim 1 is not yet broken, so
it is not when the prompt is trained. (I) holds at the start (nothing is open), and each event keeps it:

* *Admission* adds a prompt with stamp w, and no stamp is newer than w: for x < w nothing changes, and for x >= w the
  left side is the number of open prompts. It is allowed only while ``open < (w + S + 1 - u) * G``: the bound
  ``(S + 1) * G``, less G for every version by which generators lag behind the trainer. (``max_open_groups`` only lowers
  it.)
* *A drop* only lowers D, and so does giving a prompt back, which is admitted again like any other. *The policy
  advances*: w is not in (I).
* *A step* trains a batch and turns u into u + 1, which lowers every right side by G. A batch may therefore leave only
  once it holds, for every x, at least ``D(x) - (x + H - u) * G`` prompts with stamp <= x. By (I) that is at most G.
  Batches take the oldest finished groups first, which satisfies this whenever any choice of G finished groups does.
  Otherwise the batch waits for a straggler: going on without it would force a later batch over the bound.

Claim 2: at a prompt's admission at trainer version v there are fewer than (w + S + 1 - v) * G older open ones. While no
younger one is trained, each step trains G of these or the prompt itself; so its step is taken at a version of at most
v + (w + S - v) = stamp + S.

What the window does. With 0, H = S: training waits for a straggler as soon as passing it over would make it staler than
S. With more, finished groups go on past it for up to that many further steps, and by claim 2 they pay nothing for it.
The straggler pays: its tokens may be staler than S, and the gate (``gate.py``) drops the episode, masks these tokens,
or lets them pass, as ``stale`` and ``staleness_of`` say. It keeps its slot meanwhile, so that S * G stragglers can be
passed over at once, and training waits for the next one. The gate checks the tokens' own versions in every case; so
tokens older than their group's stamp are not trained beyond the bound either: those of episodes that ``stale: resume``
has kept of an earlier attempt, and what should not exist (tokens of a replica that was behind).

No deadlock: when all open prompts have ended, the oldest-first batch satisfies the condition (it holds min(D(x), G)
prompts with stamp <= x), and with w = u admission goes on until (S + 1) * G >= G prompts are open. So the loop waits
only for rollouts, which have time limits, and for the policy to advance, which needs no further step.

S = 0 is synchronous on-policy training: nothing is admitted after a step until the policy is on the new version, and a
window changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from forge_async.buffer.config import BufferConfig
from forge_async.buffer.gate import Gated, Versions, gate
from forge_async.buffer.ledger import Ledger
from forge_async.buffer.peek import COLUMNS, OpenPrompt
from forge_async.buffer.selection import completion_stratum, prompt_strata, strata_of
from forge_async.buffer.starvation import DropWatch
from forge_async.errors import ForgeError
from forge_async.observability.tables import Listing
from forge_async.types import Episode, Group, Prompt

logger = logging.getLogger(__name__)

EQUAL_REWARDS = 1e-6
"""Rewards of a group that differ by no more count as equal."""


class PromptTooLong(ForgeError):
    """Raised by a source whose next prompt does not fit; the buffer records the prompt as dropped and asks for the
    next."""

    def __init__(self, prompt_id: str, message: str, task: str = "", tokens: int = 0) -> None:
        self.prompt_id, self.task, self.tokens = prompt_id, task, tokens
        super().__init__(message)


class Source(Protocol):
    """Where prompts come from; raises StopIteration when there are no more."""

    def __next__(self) -> Prompt: ...


@dataclass
class _Open:
    """An open prompt."""

    prompt: Prompt
    stamp: int
    attempt: int  # 1 for the first
    kept: tuple[Episode, ...] = ()  # of the attempt before
    group: Group | None = None  # set once it is finished
    versions: tuple[Versions, ...] = ()  # of the group's episodes


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
        self.retried = 0
        """Prompts that were given back to be generated anew, over all attempts."""
        self.paused = False
        """Nothing is admitted: see :meth:`pause`."""
        self.stale_episodes: Counter[str] = Counter()
        """Episodes that the gate found too old, by what became of them: ``drop``, ``mask`` or ``resume``."""
        self.on_drop: Callable[[str, str], None] = lambda prompt_id, reason: None
        """Told of each prompt that is given up while the run goes on, with the reason."""
        self._open: dict[str, _Open] = {}  # in order of admission, hence of stamps
        self._batch: dict[str, None] = {}  # ids of the batch being trained; they stay open until trained()
        self._closed: set[str] = set()  # ids that close() dropped
        # Given back, each with its attempts so far and the episodes that it keeps.
        self._again: deque[tuple[Prompt, int, tuple[Episode, ...]]] = deque()
        self._ended: str | None = None  # why no new prompt is admitted
        self._is_closed = False
        self._failure: ForgeError | None = None
        self._drops = DropWatch(config.drop_limit)
        self._changed = asyncio.Event()

    # --- what a dashboard shows

    def __repr__(self) -> str:
        return f"<buffer: {self.depth} groups ready, {self.in_flight} prompts in flight; peek() shows them>"

    @property
    def open(self) -> int:
        """Prompts admitted and neither trained nor dropped nor given back."""
        return len(self._open)

    @property
    def depth(self) -> int:
        """Finished groups that wait for the trainer."""
        return sum(entry.group is not None for entry in self._open.values()) - len(self._batch)

    @property
    def oldest_wait(self) -> int:
        """Versions since the admission of the prompt that is open for longest: what a straggler's tokens may be stale
        by."""
        return self.trainer_version - next(iter(self._open.values())).stamp if self._open else 0

    @property
    def in_flight(self) -> int:
        """Prompts whose rollouts run."""
        return sum(entry.group is None for entry in self._open.values())

    def peek(self) -> Listing[OpenPrompt]:
        """Every open prompt, in order of admission."""
        shown = (
            OpenPrompt.of(name, entry.stamp, self.trainer_version, entry.attempt, entry.group, name in self._batch)
            for name, entry in self._open.items()
        )
        return Listing(shown, "open prompts", COLUMNS)

    @property
    def ages(self) -> dict[int, tuple[int, int]]:
        """Open prompts by versions since their admission: (finished, still generated or scored)."""
        ages: dict[int, tuple[int, int]] = {}
        for entry in self._open.values():
            age = self.trainer_version - entry.stamp
            done, running = ages.get(age, (0, 0))
            ages[age] = (done + (entry.group is not None), running + (entry.group is None))
        return ages

    @property
    def ended(self) -> str | None:
        """Why admission has ended (``dataset ended: ...``, or the reason given to :meth:`close`), else None."""
        return self._ended

    # --- producers

    @property
    def room(self) -> int:
        """Prompts that may be admitted now."""
        if self.paused:
            return 0
        lag = self.trainer_version - self.policy_version
        allowed = (self.config.max_staleness + 1 - lag) * self.config.groups_per_step
        return max(0, min(allowed, self.config.capacity) - len(self._open))

    async def admit(self, source: Iterator[Prompt] | Source) -> Prompt | None:
        """The next prompt, once there is room: one whose work was lost, else the source's next. None when the buffer is
        closed, or the source has ended and no open prompt can come back.

        Backpressure: waits for :meth:`trained`, :meth:`finish`, :meth:`drop`, :meth:`advance` or :meth:`close`. Whoever
        gets a prompt must call :meth:`finish` or :meth:`drop` for it. Errors of the source pass through.
        """
        while not self._is_closed:
            if self._failure is not None:
                raise self._failure
            if self._ended is not None and not self._again and not (self._open and self.config.retries):
                break
            if self.room == 0 or (self._ended is not None and not self._again):
                await self._changed.wait()
            elif self._again:
                return self._enter(*self._again.popleft())
            else:
                try:
                    prompt = next(source)  # type: ignore[arg-type]
                except StopIteration as end:
                    self._ended = f"dataset ended: {end.value}" if end.value else "dataset ended"
                    self._wake()
                except PromptTooLong as error:
                    self.ledger.admit(error.prompt_id, prompt_strata(error.task, error.tokens))
                    logger.warning("%s", error)
                    self._count_drop(error.prompt_id, "prompt_too_long")
                else:
                    self.ledger.admit(prompt.prompt_id, strata_of(prompt))
                    return self._enter(prompt, 0)
        return None

    def _enter(self, prompt: Prompt, attempts: int, kept: tuple[Episode, ...] = ()) -> Prompt:
        self._open[prompt.prompt_id] = _Open(prompt, self.policy_version, attempts + 1, kept)
        return prompt

    def kept(self, prompt_id: str) -> tuple[Episode, ...]:
        """The episodes that a prompt has from its earlier attempts; the others of its group are to be generated."""
        return self._open[prompt_id].kept

    def finish(self, group: Group) -> bool:
        """Queue a finished group; False when it was not (too small, uniform, or the buffer is closed)."""
        prompt_id = group.prompt.prompt_id
        entry = self._open.get(prompt_id)
        if prompt_id in self._closed:
            return False
        if entry is None or entry.group is not None:
            fate = "finished twice" if entry is not None else "finished without being open"
            raise ForgeError(
                f"prompt {prompt_id} was {fate} (its fate: {self.ledger.fate(prompt_id) or 'never admitted'})."
            )
        self.ledger.finish(prompt_id, completion_stratum(group))
        if len(group.episodes) < self.config.min_group_size:
            self._lose(prompt_id, "failed" if not group.episodes else "group_too_small")
            return False
        if self._uniform(group):
            self.drop(prompt_id, "uniform_reward")
            return False
        entry.group, entry.versions = group, tuple(map(Versions.of, group.episodes))
        self._wake()
        return True

    def _uniform(self, group: Group) -> bool:
        """Whether it is to be dropped because its rewards are equal."""
        rewards = [episode.reward for episode in group.episodes]
        return self.config.drop_uniform_groups and max(rewards) - min(rewards) <= EQUAL_REWARDS

    def _lose(self, prompt_id: str, reason: str, kept: tuple[Episode, ...] = ()) -> None:
        """The prompt's work, all but ``kept``, is lost: give it back to be generated anew, or drop it when that was
        tried often enough."""
        entry = self._open[prompt_id]
        if not self._may_retry(entry):
            self.drop(prompt_id, reason)
            return
        logger.info("prompt %s is generated anew (%s), attempt %d", prompt_id, reason, entry.attempt + 1)
        del self._open[prompt_id]
        self._again.append((entry.prompt, entry.attempt, kept))
        self.retried += 1
        self._wake()

    def _may_retry(self, entry: _Open) -> bool:
        return entry.attempt <= self.config.retries

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
            if self._failure is not None:
                raise self._failure  # what it dropped was one too many
            if batch:
                yield batch
            elif self._ended is not None and not self._open and not self._again:
                return
            else:
                await self._changed.wait()

    def take(self) -> list[Group]:
        """The next batch when it may leave now, else an empty list. The core of :meth:`batches`, without waiting."""
        if self._batch:
            raise ForgeError("the previous batch was not reported with trained().")
        size = self.config.groups_per_step
        finished = self._pass_gate()
        if len(finished) < size:
            if self._ended is None or not finished or len(finished) < len(self._open) or self._again:
                return []
            if not self.config.train_partial_batch:
                for entry, _ in finished:
                    self.drop(entry.prompt.prompt_id, "partial_batch")
                return []
        chosen = finished[:size]
        if not self._keeps_the_bound([entry.stamp for entry, _ in chosen]):
            return []
        self._batch = {entry.prompt.prompt_id: None for entry, _ in chosen}
        batch = []
        for _, gated in chosen:
            self._count_stale(gated)
            assert gated.group is not None
            batch.append(gated.group)
        return batch

    def _pass_gate(self) -> list[tuple[_Open, Gated]]:
        """The finished groups as they may be trained now, in order of admission; what may not be any more is lost."""
        passed = []
        for prompt_id, entry in list(self._open.items()):
            if entry.group is None:
                continue
            gated = gate(entry.group, entry.versions, self.trainer_version, self.config)
            if gated.dropped_episodes and self.config.stale == "resume" and self._may_retry(entry):
                self.stale_episodes["resume"] += gated.dropped_episodes
                self._lose(prompt_id, "stale", gated.fresh)
            elif gated.group is None:
                self._count_stale(gated)
                self._lose(prompt_id, "stale")
            elif gated.dropped_episodes and self._uniform(gated.group):
                self._count_stale(gated)
                self.drop(prompt_id, "uniform_reward")
            else:
                passed.append((entry, gated))
        return passed

    def _count_stale(self, gated: Gated) -> None:
        self.stale_episodes.update(drop=gated.dropped_episodes, mask=gated.masked_episodes)

    def _keeps_the_bound(self, chosen: Sequence[int]) -> bool:
        """The condition on a batch in this file's head, for every stamp that an open prompt has."""
        stamps = [entry.stamp for entry in self._open.values()]
        size, horizon = self.config.groups_per_step, self.config.horizon - self.trainer_version
        for x in set(stamps):
            needed = sum(stamp <= x for stamp in stamps) - (x + horizon) * size
            if sum(stamp <= x for stamp in chosen) < needed:
                return False
        return True

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
                self._drops.trained()
        self._wake()

    # --- the loop

    def advance(self, version: int) -> None:
        """Every generator starts new requests on ``version`` or a newer one from now on."""
        if version > self.trainer_version:
            raise ForgeError(f"the policy cannot be at version {version}: the trainer is at {self.trainer_version}.")
        self.policy_version = max(self.policy_version, version)
        self._wake()

    def pause(self) -> None:
        """Admit nothing until :meth:`resume`; what is open goes on, and batches of it may be taken."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self._wake()

    def close(self, reason: str = "run_ended", keep_batch: bool = False) -> None:
        """End admission and drop every open prompt for ``reason``; with ``keep_batch`` the batch in training stays
        open.

        Producers may still call :meth:`finish` and :meth:`drop` for what this has dropped; both are no-ops then.
        """
        self._ended, self._is_closed = reason, True
        kept = {prompt_id: self._open[prompt_id] for prompt_id in self._batch if keep_batch}
        for prompt_id in [*self._open, *(prompt.prompt_id for prompt, _, _ in self._again)]:
            if prompt_id not in kept:
                self._closed.add(prompt_id)
                self.ledger.drop(prompt_id, reason)
        self._open = kept
        self._again.clear()
        self._batch = {prompt_id: None for prompt_id in self._batch if prompt_id in self._open}
        self._wake()

    def fail(self, error: ForgeError) -> None:
        """Make :meth:`batches` and :meth:`admit` raise ``error``; the first one given stays."""
        self._failure = self._failure or error
        self._wake()

    def _count_drop(self, prompt_id: str, reason: str) -> None:
        self.ledger.drop(prompt_id, reason)
        self.on_drop(prompt_id, reason)
        error = self._drops.dropped(reason)
        if error is not None:
            self.fail(error)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
