"""No schedule of events breaks a promise; and the fuzz finds what is planted.

``make fuzz`` (``--hypothesis-profile=fuzz``) runs 10,000 schedules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge_async.buffer import BufferConfig, Ledger, RolloutBuffer
from forge_async.buffer import buffer as buffer_module
from forge_async.buffer import gate as gate_module
from forge_async.errors import ForgeError
from forge_async.rollout.datasets import PromptSource
from tests.buffer.schedules import EVENTS, Schedule, Setting

SCHEDULES = 10_000 if settings.get_current_profile_name() == "fuzz" else 1_000

MIX = {  # (at least this often, divided by): many prompts run at a time, killed and closed runs are rare
    "admit": (4, 1),
    "finish": (2, 3),
    "fail": (0, 2),
    "drop": (0, 2),
    "update": (4, 1),
    "advance": (2, 1),
    "skip": (0, 3),
    "checkpoint": (0, 2),
    "kill": (0, 6),
    "close": (0, 6),
}
assert tuple(MIX) == EVENTS


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of drops are meant here."""
    caplog.set_level(logging.CRITICAL, logger="forge_async.buffer")


@st.composite
def settings_of_a_schedule(draw: Any) -> Setting:
    window = draw(st.integers(0, 3))
    size = draw(st.integers(1, 3))
    spare = draw(st.none() | st.integers(0, 4))
    stale = draw(st.sampled_from(("drop", "mask", "resume")))
    config = BufferConfig(
        max_staleness=draw(st.integers(0, 3)),
        window=window,
        staleness_of=draw(st.sampled_from(("oldest", "mean", "newest") if window else ("oldest",))),
        stale=stale,
        groups_per_step=size,
        max_open_groups=None if spare is None else size + spare,
        min_group_size=draw(st.integers(1, 3)),
        drop_uniform_groups=draw(st.booleans()),
        retries=draw(st.integers(1 if stale == "resume" else 0, 2)),
        train_partial_batch=draw(st.booleans()),
        max_consecutive_drops=10**6,
    )
    weights = draw(st.tuples(*[st.integers(0, 6)] * len(EVENTS)))
    return Setting(
        config=config,
        rows=draw(st.integers(1, 9)),
        epochs=draw(st.sampled_from((1, 2, 3, 20))),
        start=draw(st.integers(0, 2)),
        events=draw(st.integers(0, 250)),
        weights=tuple(floor + weight // rarity for (floor, rarity), weight in zip(MIX.values(), weights, strict=True)),
        lagging=draw(st.booleans()),
        newest_first=draw(st.booleans()),
    )


schedules = given(setting=settings_of_a_schedule(), seed=st.integers(0, 2**32))


@settings(max_examples=SCHEDULES, suppress_health_check=list(HealthCheck))
@schedules
def test_every_schedule_keeps_every_promise(setting: Setting, seed: int) -> None:
    Schedule(setting, seed).run()


def off_by_one(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """The gate lets through what is one version too old."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = gate_module.too_old
        patch.setattr(gate_module, name, lambda versions, version, config: original(versions, version - 1, config))

    return plant


def drop_without_the_ledger(patch: pytest.MonkeyPatch) -> None:
    def drop(self: RolloutBuffer, prompt_id: str, reason: str) -> None:
        self._open.pop(prompt_id, None)
        self._wake()

    patch.setattr(RolloutBuffer, "drop", drop)


def restore_that_forgets(patch: pytest.MonkeyPatch) -> None:
    original = Ledger.restore
    patch.setattr(Ledger, "restore", lambda self, state: original(self, state)[1:])


def one_prompt_too_many(patch: pytest.MonkeyPatch) -> None:
    original = RolloutBuffer.room.fget
    patch.setattr(RolloutBuffer, "room", property(lambda self: original(self) + 1))


def no_batch_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RolloutBuffer, "_keeps_the_bound", lambda self, chosen: True)


def every_batch_waits_too_long(patch: pytest.MonkeyPatch) -> None:
    original = RolloutBuffer._keeps_the_bound
    patch.setattr(RolloutBuffer, "_keeps_the_bound", lambda self, chosen: original(self, chosen[1:]))


def mask_off_by_one(patch: pytest.MonkeyPatch) -> None:
    original = gate_module.gate

    def gate(*args: Any) -> Any:
        gated = original(*args)
        if gated.group is None:
            return gated
        episodes = tuple(replace(e, trained_since=max(0, e.trained_since - 1)) for e in gated.group.episodes)
        return replace(gated, group=replace(gated.group, episodes=episodes))

    patch.setattr(buffer_module, "gate", gate)


def lost_work_is_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RolloutBuffer, "_lose", lambda self, prompt_id, reason, kept=(): self.drop(prompt_id, reason))


def resume_that_forgets(patch: pytest.MonkeyPatch) -> None:
    original = RolloutBuffer._lose
    patch.setattr(RolloutBuffer, "_lose", lambda self, prompt_id, reason, kept=(): original(self, prompt_id, reason))


def second_resume_that_forgets(patch: pytest.MonkeyPatch) -> None:
    original = PromptSource.state
    patch.setattr(PromptSource, "state", lambda self: {**original(self), "again": []})


PLANTED = {
    "the gate is off by one": off_by_one("too_old"),
    "a drop is not in the ledger": drop_without_the_ledger,
    "a restore forgets a prompt in flight": restore_that_forgets,
    "a second resume forgets what the first had still to issue": second_resume_that_forgets,
    "one prompt too many is admitted": one_prompt_too_many,
    "no batch waits for a straggler": no_batch_waits,
    "batches wait for more than they must": every_batch_waits_too_long,
    "a masked token is trained": mask_off_by_one,
    "lost work is not given back": lost_work_is_not_given_back,
    "a resumed group forgets what it has": resume_that_forgets,
}


def busy(seed: int) -> None:
    """A schedule with stragglers, stale tokens and kills, of a kind that a run of any size has."""
    config = BufferConfig(
        max_staleness=1 + seed % 2,
        window=seed // 2 % 2,
        stale=("drop", "mask", "resume")[seed // 4 % 3],
        groups_per_step=1 + seed % 3,
        max_consecutive_drops=10**6,
    )
    weights = dict(admit=8, finish=4, fail=1, drop=1, update=6, advance=3, skip=0, checkpoint=1, kill=1, close=0)
    setting = Setting(config, 9, 20, 0, 200, tuple(weights[name] for name in EVENTS), seed % 3 == 0, True)
    Schedule(setting, seed).run()


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(12):
        busy(seed)
    PLANTED[fault](monkeypatch)
    with pytest.raises((AssertionError, ForgeError, KeyError, ValueError)):
        for seed in range(300):
            busy(seed)
