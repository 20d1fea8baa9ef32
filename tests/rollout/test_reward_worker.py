"""Reward functions in worker processes: timed out, replaced, retried."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import numpy as np
import pytest

from forge_async.errors import ConfigError
from forge_async.mesh import MeshRuntime
from forge_async.rollout.config import RewardConfig
from forge_async.rollout.reward_worker import RewardPool
from forge_async.rollout.rewards import RewardFailure
from forge_async.types import Prompt

PROMPT = Prompt("0-0", (), np.zeros(1, np.int32), "7", {"level": 3})
MODULE = """
import os, re, time

def score(prompt, completion):
    if completion == "block":
        while True:
            pass
    if completion == "backtrack":  # holds the interpreter lock for ever
        re.match(r"(a+)+$", "a" * 60 + "b")
    if completion == "die":
        os.kill(os.getpid(), 9)
    if completion == "raise":
        raise RuntimeError("broken")
    return float(completion == prompt.answer) + prompt.metadata["level"]
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    (tmp_path / "zoo_worker.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return "zoo_worker:score"


async def test_workers_score_are_timed_out_and_replaced(module):
    async with MeshRuntime():
        config = RewardConfig(functions=[module], weights=[2.0], timeout_s=2.0, num_workers=2)
        pool = await RewardPool.create(config)
        assert await pool.score(PROMPT, ["7", "8"]) == [{"score": 4.0}, {"score": 3.0}]

        (failure,) = await pool.score(PROMPT, ["raise"])
        assert (
            isinstance(failure, RewardFailure) and "zoo_worker.py:13 in score: RuntimeError: broken" in failure.message
        )

        started = time.monotonic()
        blocked = [asyncio.create_task(pool.score(PROMPT, [text])) for text in ("block", "backtrack")]
        results = [(await task)[0] for task in blocked]
        assert time.monotonic() - started < 15
        assert [failure.reason for failure in results] == ["timeout", "timeout"]
        assert f"rewards {module} did not score prompt 0-0 within 2 s" in results[0].message
        assert await pool.score(PROMPT, ["7"]) == [{"score": 4.0}]
        assert pool.replaced == 2 and pool.failed == {"raised": 1, "timeout": 2}

        (failure,) = await pool.score(PROMPT, ["die"])
        assert failure.reason == "worker_died"
        assert await pool.score(PROMPT, ["7"]) == [{"score": 4.0}]
        await pool.stop()


async def test_a_worker_killed_between_requests_costs_nothing(module):
    async with MeshRuntime():
        pool = await RewardPool.create(RewardConfig(functions=[module]))
        for pid in pool.pids():
            os.kill(pid, signal.SIGKILL)
        assert await pool.score(PROMPT, ["7"]) == [{"score": 4.0}]


async def test_a_cancelled_call_costs_a_worker_only_when_it_is_needed_again(module):
    async with MeshRuntime():
        pool = await RewardPool.create(RewardConfig(functions=[module], timeout_s=30))
        call = asyncio.create_task(pool.score(PROMPT, ["block"]))
        await asyncio.sleep(0.5)
        call.cancel()
        await asyncio.wait({call})
        assert pool.replaced == 0, "at the end of a run nothing is started again"
        assert await pool.score(PROMPT, ["7"]) == [{"score": 4.0}]
        assert pool.replaced == 1


async def test_a_function_that_cannot_be_imported_ends_the_start(module):
    async with MeshRuntime():
        with pytest.raises(ConfigError, match=r"functions\[0\] = 'zoo_worker:scores'.*It has: score"):
            await RewardPool.create(RewardConfig(functions=["zoo_worker:scores"]))
