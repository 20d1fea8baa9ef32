"""Arbitrary schedules of what can happen to a buffer, its ledger and its source, run beside a simple model.

The model knows, for each prompt, when it was admitted, what was generated and what became of it. It keeps the books of
what is promised and is no second implementation: where the code decides *how*, the model only checks that what came out
was allowed.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from forge_async.buffer import BufferConfig, Ledger, PromptTooLong, RolloutBuffer
from forge_async.rollout.config import DatasetConfig
from forge_async.rollout.datasets import PromptSource, Row
from forge_async.types import Completion, Episode, Group, Prompt, Turn

EVENTS = ("admit", "finish", "fail", "drop", "update", "advance", "skip", "checkpoint", "kill", "close")
GROUP_SIZE = 3


RUNNER = asyncio.Runner()
"""Nothing ever waits in it; primitives of asyncio want a running loop all the same."""


class Words:
    """A tokenizer of one id per character."""

    chat_template = "plain"

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
        return messages[-1]["content"]

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        return {"input_ids": [1] * len(text)}


WAITS = object()


def at_once(coroutine: Any) -> Any:
    """The result of a coroutine that has nothing to wait for, else ``WAITS``. Only inside a running event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    return WAITS


def group_of(prompt: Prompt, versions: list[list[int]], rewards: list[float]) -> Group:
    """One episode per list of token versions."""
    episodes = []
    for index, tokens in enumerate(versions):
        made = np.array(tokens, np.int32)
        completion = Completion(prompt.token_ids, made + 7, np.zeros(len(made), np.float32), made, made, "stop")
        name = f"{prompt.prompt_id}.{index}"
        episodes.append(Episode(name, prompt.prompt_id, (Turn(completion),), rewards[index]))
    return Group(prompt, tuple(episodes), failed=GROUP_SIZE - len(episodes))


@dataclass
class Account:
    """What the model knows of a prompt whose fate is open."""

    prompt: Prompt
    number: int
    """Order of admission, over all attempts of all prompts."""
    stamp: int
    attempt: int
    kept: dict[str, Episode] = field(default_factory=dict)
    """What it has from its earlier attempts."""
    group: Group | None = None
    overtaken: int = 0
    """Younger groups that were trained while this one was open."""


@dataclass
class Model:
    """Everything that a checkpoint must bring back."""

    version: int = 0
    issued: int = 0
    """Occurrences of the reference order that were issued."""
    undecided: list[str] = field(default_factory=list)
    """In order of their first admission."""
    fates: dict[str, str] = field(default_factory=dict)
    lengths: dict[str, str] = field(default_factory=dict)
    """Stratum of completion lengths of prompts that were finished once."""

    def copy(self) -> Model:
        return Model(self.version, self.issued, list(self.undecided), dict(self.fates), dict(self.lengths))


@dataclass(frozen=True)
class Setting:
    """What one schedule is run with."""

    config: BufferConfig
    rows: int
    epochs: int
    start: int
    events: int
    weights: tuple[int, ...]
    """How often each of ``EVENTS`` happens."""
    lagging: bool
    """Whether a replica may be behind the version that admission assumes."""
    newest_first: bool
    """Whether mostly the newest prompt ends next, so that the others are overtaken again and again."""


class Schedule:
    """One schedule; ``seed`` decides which event comes next, and whom it meets."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting, self.config = setting, setting.config
        self.choose = Random(seed).randrange
        contents = ["x" * (3 + 11 * (index % 4) + (90 if index % 5 == 4 else 0)) for index in range(setting.rows)]
        self.rows = [Row(text, None, {"task": "ab"[index % 2]}) for index, text in enumerate(contents)]
        self.order = self._reference_order()
        self.model = Model(version=setting.start)
        self.policy = setting.start
        self.open: dict[str, Account] = {}
        self.again: list[tuple[str, int, dict[str, Episode]]] = []
        self.prompts: dict[str, Prompt] = {}
        self.reissue: list[str] = []
        self.admissions = 0
        self.source = self._source()
        self.buffer = RolloutBuffer(self.config, Ledger(), setting.start)
        self.seen: Counter[str] = Counter()
        self.saved = self._save()

    def _source(self) -> PromptSource:
        config = DatasetConfig(kind="jsonl", path="-", epochs=self.setting.epochs, max_prompt_tokens=64)
        return PromptSource(config, Words(), seed=5, rows=self.rows)

    def _reference_order(self) -> list[tuple[str, bool]]:
        """(id, too long) of every occurrence, by a source of its own."""
        source, order = self._source(), []
        while True:
            try:
                order.append((next(source).prompt_id, False))
            except PromptTooLong as error:
                order.append((error.prompt_id, True))
            except StopIteration:
                return order

    # --- the schedule

    def run(self) -> None:
        RUNNER.run(self._run())

    async def _run(self) -> None:
        table = [name for name, weight in zip(EVENTS, self.setting.weights, strict=True) for _ in range(weight)]
        for _ in range(self.setting.events):
            event = table[self.choose(len(table))]
            getattr(self, event)()
            self.seen[event] += 1
            self.check()
        self.drain()

    def drain(self) -> None:
        """From anywhere: when rollouts end and the policy catches up, training goes on, to a short dataset's end."""
        for _ in range(20 if len(self.order) > 40 else 1000):
            if not (self.open or self.again or self.reissue or self.model.issued < len(self.order)):
                break
            before = (len(self.model.fates), self.buffer.retried)
            self.policy = self.model.version
            self.buffer.advance(self.policy)
            while self.can_admit():
                self.admit()
            self.admit()
            while any(account.group is None for account in self.open.values()):
                self.finish()
            self.update()
            self.check()
            assert (len(self.model.fates), self.buffer.retried) != before, "nothing goes on"
        else:
            return
        self.buffer.advance(self.model.version)
        assert at_once(self.buffer.admit(self.source)) is None
        assert set(self.model.fates) == {name for name, _ in self.order}, "every prompt exactly once"
        assert self.buffer.ledger.in_flight == 0
        self.check_selection()

    # --- events

    def can_admit(self) -> bool:
        return self.room() > 0 and bool(self.again or self.reissue or self.fresh())

    def room(self) -> int:
        c = self.config
        allowed = (c.max_staleness + 1 - (self.model.version - self.policy)) * c.groups_per_step
        return max(0, min(allowed, c.max_open_groups or allowed) - len(self.open))

    def fresh(self) -> bool:
        """Whether the dataset has a prompt left that fits."""
        return any(not long for _, long in self.order[self.model.issued :])

    def admit(self) -> None:
        prompt = at_once(self.buffer.admit(self.source))
        if not self.can_admit():
            if self.room() and not self.again:  # it has looked, and found no more
                self._skip_long()
            over = self.buffer.ended is not None and not self.again and not (self.open and self.config.retries)
            assert prompt is (None if over else WAITS)
            return
        assert isinstance(prompt, Prompt)
        name, attempt, kept = prompt.prompt_id, 1, {}
        if self.again:
            expected, attempts, kept = self.again.pop(0)
            attempt = attempts + 1
        elif self.reissue:
            expected = self.reissue.pop(0)
            self.model.undecided.append(expected)
        else:
            self._skip_long()
            expected = self.order[self.model.issued][0]
            self.model.issued += 1
            self.model.undecided.append(expected)
        assert name == expected, "out of order"
        assert name not in self.model.fates and name not in self.open
        if self.prompts.setdefault(name, prompt) is not prompt:
            assert (self.prompts[name].token_ids == prompt.token_ids).all()
        assert {e.episode_id: e for e in self.buffer.kept(name)} == kept
        self.open[name] = Account(prompt, self.admissions, self.policy, attempt, kept)
        self.admissions += 1

    def _skip_long(self) -> None:
        while self.model.issued < len(self.order) and self.order[self.model.issued][1]:
            self._decide(self.order[self.model.issued][0], "prompt_too_long", admitted=False)
            self.model.issued += 1

    def _running(self) -> str | None:
        names = [name for name, account in self.open.items() if account.group is None]
        if not names:
            return None
        return names[-1] if self.setting.newest_first and self.choose(8) else names[self.choose(len(names))]

    def finish(self) -> None:
        """Some of the episodes, each with token versions from its admission on (or older, of a lagging replica)."""
        name = self._running()
        if name is None:
            return
        account = self.open[name]
        lowest = max(0, account.stamp - (self.choose(3) if self.setting.lagging else 0))
        width = self.model.version - lowest + 1
        size = 1 + self.choose(GROUP_SIZE) if self.choose(4) == 0 else GROUP_SIZE
        versions = [sorted(lowest + self.choose(width) for _ in range(1 + self.choose(4))) for _ in range(size)]
        uniform = self.choose(3) == 0
        rewards = [1.0 if uniform else float(index) for index in range(size)]
        self._end(account, group_of(account.prompt, versions, rewards))

    def _end(self, account: Account, made: Group) -> None:
        """``made`` of this attempt, and what was there before."""
        episodes = {episode.episode_id: episode for episode in made.episodes} | account.kept
        group = Group(account.prompt, tuple(episodes.values()), failed=GROUP_SIZE - len(episodes))
        name, size = account.prompt.prompt_id, len(episodes)
        self.model.lengths[name] = "1-16" if size else "none"
        queued = self.buffer.finish(group)
        if size < self.config.min_group_size:
            self._lose(name, "group_too_small" if size else "failed")
        elif self.config.drop_uniform_groups and len({episode.reward for episode in group.episodes}) == 1:
            self._drop(name, "uniform_reward")
        else:
            account.group = group
        assert queued == (account.group is not None and name in self.open)

    def fail(self) -> None:
        """No episode was scored: they raised, timed out, or their worker died too often."""
        name = self._running()
        if name is not None:
            self._end(self.open[name], group_of(self.open[name].prompt, [], []))

    def drop(self) -> None:
        name = self._running()
        if name is not None:
            self.buffer.drop(name, "given_up")
            self._drop(name, "given_up")

    def advance(self) -> None:
        self.policy += self.choose(self.model.version - self.policy + 1)
        self.buffer.advance(self.policy)

    def skip(self) -> None:
        self.update(skipped=True)

    def update(self, skipped: bool = False) -> None:
        """A step, if a batch may leave."""
        u, c = self.model.version, self.config
        batch = self.buffer.take()
        allowed = self._gate()
        finished = sorted(
            (account for account in self.open.values() if account.group is not None), key=lambda account: account.number
        )
        ended = self.model.issued == len(self.order) and not self.reissue and self.buffer.ended is not None
        last = ended and not self.again and len(finished) == len(self.open)
        if not batch:
            if last and 0 < len(finished) < c.groups_per_step:
                assert not c.train_partial_batch
                for account in finished:
                    self._drop(account.prompt.prompt_id, "partial_batch")
                return
            enough = len(finished) >= c.groups_per_step
            assert not enough or self._crowded(finished[: c.groups_per_step]), "a batch was held back for nothing"
            return
        assert len(batch) == c.groups_per_step or (last and c.train_partial_batch)
        chosen = finished[: len(batch)]
        assert [group.prompt.prompt_id for group in batch] == [a.prompt.prompt_id for a in chosen], "not the oldest"
        for group, account in zip(batch, chosen, strict=True):
            self._check_promise(group, account, allowed[group.prompt.prompt_id])
        for account in self.open.values():
            if account not in chosen:
                account.overtaken += sum(other.number > account.number for other in chosen)
        if self.choose(4) == 0:
            self.checkpoint()  # while the trainer is at work on it
        self.buffer.trained(batch, u if skipped else u + 1)
        self.model.version = u if skipped else u + 1
        for account in chosen:
            (self._drop if skipped else self._train)(account.prompt.prompt_id, "skipped_step" if skipped else "trained")

    def _gate(self) -> dict[str, dict[str, list[int]]]:
        """Trainable token versions of each finished group, by episode; what has none left is lost."""
        c, u, allowed = self.config, self.model.version, {}
        for name, account in list(self.open.items()):
            if account.group is None:
                continue
            kept: dict[str, list[int]] = {}
            for episode in account.group.episodes:
                stale = [u - v for v in episode.turns[0].completion.policy_versions.tolist()]
                figure = {"oldest": max(stale), "mean": sum(stale) / len(stale), "newest": min(stale)}[c.staleness_of]
                if figure <= c.max_staleness and max(stale) <= c.max_staleness + c.window:
                    kept[episode.episode_id] = [u - s for s in stale]
                elif c.stale == "mask":
                    kept[episode.episode_id] = [u - s for s in stale if s <= c.max_staleness]
            rewards = {e.reward for e in account.group.episodes if e.episode_id in kept}
            if c.stale == "resume" and len(kept) < len(account.group.episodes) and account.attempt <= c.retries:
                self._lose(name, "stale", {e.episode_id: e for e in account.group.episodes if e.episode_id in kept})
            elif not any(kept.values()) or (c.stale != "mask" and len(kept) < c.min_group_size):
                self._lose(name, "stale")
            elif len(rewards) == 1 and c.drop_uniform_groups:
                self._drop(name, "uniform_reward")
            else:
                allowed[name] = kept
        return allowed

    def _check_promise(self, group: Group, account: Account, allowed: dict[str, list[int]]) -> None:
        c, u = self.config, self.model.version
        assert u - account.stamp <= c.max_staleness + c.window, "claim 1"
        assert account.overtaken or u - account.stamp <= c.max_staleness, "claim 2"
        assert {episode.episode_id for episode in group.episodes} == set(allowed)
        bound = c.max_staleness if c.staleness_of == "oldest" else c.max_staleness + c.window
        assert bound == c.token_bound
        for episode in group.episodes:
            trained = [v for v in episode.turns[0].completion.policy_versions.tolist() if v >= episode.trained_since]
            assert trained == allowed[episode.episode_id]
            stale = [u - v for v in trained]
            assert max(stale, default=0) <= bound
            if stale and c.staleness_of == "mean":
                assert sum(stale) <= c.max_staleness * len(stale)
            if stale and c.staleness_of == "newest":
                assert min(stale) <= c.max_staleness

    def _crowded(self, chosen: list[Account]) -> bool:
        """Whether what would be left without ``chosen`` no longer fits into the batches that may still train it."""
        left = [a.stamp for a in self.open.values() if a not in chosen]
        horizon = self.config.max_staleness + self.config.window
        after = self.model.version + 1
        return any(sum(s <= x for s in left) > (x + horizon + 1 - after) * self.config.groups_per_step for x in left)

    def checkpoint(self) -> None:
        self.check_selection()
        self.saved = self._save()

    def _save(self) -> tuple[str, Model]:
        state = {"source": self.source.state(), "ledger": self.buffer.ledger.state()}
        model = self.model.copy()
        model.undecided += self.reissue
        return json.dumps(state), model

    def kill(self) -> None:
        """All that is left is the checkpoint."""
        state, model = json.loads(self.saved[0]), self.saved[1].copy()
        ledger = Ledger()
        self.source = self._source()
        self.source.restore(state["source"], ledger.restore(state["ledger"]))
        self.buffer = RolloutBuffer(self.config, ledger, model.version)
        self.policy, self.open, self.again = model.version, {}, []
        self.reissue, model.undecided = model.undecided, []
        self.model = model
        for name in self.reissue:
            self.model.lengths.pop(name, None)

    def close(self) -> None:
        """The run ends: every prompt has a fate. Then it is resumed."""
        self.buffer.close()
        name = self._running()
        if name is not None:
            assert not self.buffer.finish(group_of(self.open[name].prompt, [[0]], [1.0])), "late work is not taken"
        for name in [*self.open, *(name for name, _, _ in self.again)]:
            self.model.undecided.remove(name)
            self.model.fates[name] = "run_ended"
        self.open, self.again = {}, []
        assert at_once(self.buffer.admit(self.source)) is None and self.buffer.take() == []
        assert self.buffer.ledger.in_flight == 0
        self.check()
        self.kill()

    # --- fates

    def _train(self, name: str, fate: str) -> None:
        del self.open[name]
        self._decide(name, fate)

    def _drop(self, name: str, reason: str) -> None:
        del self.open[name]
        self._decide(name, reason)

    def _lose(self, name: str, reason: str, kept: dict[str, Episode] | None = None) -> None:
        account = self.open[name]
        if account.attempt <= self.config.retries:
            del self.open[name]
            self.again.append((name, account.attempt, kept or {}))
        else:
            self._drop(name, reason)

    def _decide(self, name: str, fate: str, admitted: bool = True) -> None:
        assert name not in self.model.fates, "a second fate"
        self.model.fates[name] = fate
        if admitted:
            self.model.undecided.remove(name)

    # --- what always holds

    def check(self) -> None:
        c, buffer, ledger = self.config, self.buffer, self.buffer.ledger
        fates = Counter(self.model.fates.values())
        trained = fates.pop("trained", 0)
        assert ledger.balanced
        assert ledger.summary() == {
            "admitted": len(self.model.fates) + len(self.model.undecided),
            "trained": trained,
            "dropped": dict(sorted(fates.items())),
        }
        assert ledger.state()["in_flight"] == self.model.undecided
        assert (buffer.open, buffer.trainer_version) == (len(self.open), self.model.version)
        assert buffer.in_flight == sum(account.group is None for account in self.open.values())
        assert buffer.room == self.room() or buffer.ended == "run_ended"
        assert buffer.open <= c.capacity
        for x in {account.stamp for account in self.open.values()}:
            count = sum(account.stamp <= x for account in self.open.values())
            assert count <= (x + c.max_staleness + c.window + 1 - self.model.version) * c.groups_per_step, "(I)"

    def check_selection(self) -> None:
        """Submitted against trained, counted from the fates."""
        trained = sum(fate == "trained" for fate in self.model.fates.values())
        selection = self.buffer.ledger.selection()
        for attribute, item in selection.items():
            assert sum(item.trained.values()) == trained
            names = [*self.model.fates, *self.model.undecided]
            if attribute == "completion_tokens":
                known = self.model.lengths
                found = [known.get(n, "none") for n in names if n in self.model.fates or n in known]
            else:
                found = [self._strata(n)[attribute] for n in names]
            assert dict(item.submitted) == dict(Counter(found))

    def _strata(self, name: str) -> dict[str, str]:
        row = int(name.split("-")[1])
        length = len(self.rows[row].content)
        return {"task": "ab"[row % 2], "prompt_tokens": _bucket_of(length)}


def _bucket_of(length: int) -> str:
    for low, high in ((1, 16), (17, 32), (33, 64), (65, 128), (129, 256)):
        if length <= high:
            return f"{low}-{high}"
    raise AssertionError(length)
