"""A request's life under any order of commands, in every update mode, with a stand-in for vLLM that knows the truth.

The stand-in schedules, splits prefills, preempts and caches prefixes as it likes, and remembers of every token which
version computed it and what the oldest version in its cache was.
"""

from __future__ import annotations

import random
import tempfile
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_async.errors import ConfigError
from forge_async.journal import completion_line
from forge_async.policy import PolicyConfig, UpdateConfig
from forge_async.policy.engine import PolicyEngine
from forge_async.policy.life_cycle import spans_of
from forge_async.policy.live_weights import Prepared
from forge_async.policy.request import Request
from forge_async.policy.turns import TurnLog, TurnSchedule, read_turns
from forge_async.policy.updates import RULES
from forge_async.types import Completion

BLOCK = 2
PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4], [9])


@dataclass
class Params:
    max_tokens: int
    temperature: float = 0.75
    min_tokens: int = 0
    seed: int | None = None
    prompt: int = 0
    """Which of :data:`PROMPTS`."""

    def clone(self) -> Params:
        return replace(self)


@dataclass
class Scheduled:
    request_id: str
    external: str
    ids: list[int]
    params: Params
    salt: str
    kv: list[int] = field(default_factory=list)
    """The version of each position's keys and values."""
    labels: list[int] = field(default_factory=list)

    @property
    def num_computed_tokens(self) -> int:
        return len(self.kv)


class Vllm:
    """What :class:`PolicyEngine` uses of ``LLMEngine``."""

    def __init__(self, owner: PolicyEngine, seed: int) -> None:
        self.owner, self.random, self.version = owner, random.Random(seed), owner.version
        self.requests: dict[str, Scheduled] = {}
        self.waiting: list[Scheduled] = []
        self.running: list[Scheduled] = []
        self.cache: dict[tuple[Any, ...], list[int]] = {}
        self.truth: list[tuple[int, int]] = []
        """(version, oldest version attended to) of each token ever sampled; its index is minus the log-prob."""
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self))

    def add_request(self, external: str, prompt: dict[str, Any], params: Params) -> str:
        assert not self.owner._held and not self.owner._swaps, "nothing starts while the engine drains or is held"
        assert params.max_tokens >= 1
        name = f"{external}-{self.random.random()}"
        self.requests[name] = Scheduled(name, external, list(prompt["prompt_token_ids"]), params, prompt["cache_salt"])
        self.waiting.append(self.requests[name])
        return name

    def abort_request(self, names: list[str], internal: bool) -> None:
        for name in names:
            self._remove(self.requests[name])

    def _remove(self, request: Scheduled) -> None:
        del self.requests[request.request_id]
        (self.running if request in self.running else self.waiting).remove(request)

    def set_weight_version(self, label: str) -> None:
        self.version = int(label)

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        while self.running:
            self._preempt(self.running[-1])
        self.cache.clear()
        return True

    def _preempt(self, request: Scheduled) -> None:
        self.running.remove(request)
        request.kv.clear()
        self.waiting.insert(0, request)

    def step(self) -> list[Any]:
        draw = self.random.random
        if draw() < 0.3:
            self.cache.clear()  # evicted
        if len(self.running) > 1 and draw() < 0.3:
            self._preempt(self.running[-1])
        else:
            while self.waiting and (not self.running or draw() < 0.6):
                request = self.waiting.pop(0)
                for end in range(BLOCK, len(request.ids), BLOCK):
                    request.kv = self.cache.get((request.salt, *request.ids[:end]), request.kv)[:]
                self.running.append(request)
        outputs = []
        for request in list(self.running):
            start = len(request.kv)
            for position in range(start, len(request.ids)):
                if position > start and draw() < 0.1:
                    break  # the rest of this prefill comes in a later step; some token always comes in this one
                request.kv.append(self.version)
                if (position + 1) % BLOCK == 0:
                    self.cache[request.salt, *request.ids[: position + 1]] = request.kv[:]
            else:
                outputs.append(self._sample(request))
        return outputs

    def _sample(self, request: Scheduled) -> Any:
        token, serial = self.random.randrange(3), len(self.truth)
        self.truth.append((self.version, min(request.kv)))
        request.ids.append(token)
        request.labels.append(self.version)
        finished = len(request.labels) == request.params.max_tokens
        if finished:
            self._remove(request)
        spans = [SimpleNamespace(version=str(v), start=a, end=b) for v, a, b in spans_of(request.labels)]
        sample = SimpleNamespace(
            token_ids=[token],
            logprobs=SimpleNamespace(logprobs=[-float(serial)], start_indices=[0]),
            finish_reason="length" if finished else None,
            stop_reason=None,
            weight_versions=spans,
        )
        return SimpleNamespace(request_id=request.external, outputs=[sample], finished=finished)


class Harness:
    """An engine whose thread is the test's own."""

    def __init__(self, update: UpdateConfig, seed: int) -> None:
        self.engine = PolicyEngine(PolicyConfig(max_num_seqs=3, update=update), "nowhere")
        self.vllm = self.engine._engine = self.engine._requests.vllm = Vllm(self.engine, seed)  # type: ignore[assignment]
        self.engine.weights = SimpleNamespace(apply=lambda prepared: None, plan=SimpleNamespace(nbytes=0))  # type: ignore[assignment]
        self.requests: list[tuple[Request, Params]] = []
        self.aborted: set[str] = set()
        self.named, self.swaps, self.holds = 0, [], []

    def submit(self, prompt: int, tokens: int) -> None:
        params = Params(tokens, prompt=prompt)
        request = self.request(len(self.requests), params)
        self.requests.append((request, params))
        self.engine._inbox.post("submit", request)

    def request(self, number: int, params: Params) -> Request:
        return Request(f"r{number}", np.array(PROMPTS[params.prompt], np.int32), params, Future())  # type: ignore[arg-type]

    def abort(self, index: int) -> None:
        if self.requests:
            name = self.requests[index % len(self.requests)][0].request_id
            self.aborted.add(name)
            self.engine.abort(name)

    def swap(self) -> None:
        self.named += 1
        self.swaps.append(self.engine.swap(self.named, Prepared({}, None, False, 0.0)))

    def hold(self, back: int) -> None:
        self.holds.append(self.engine.hold(max(0, self.engine.version - back)))

    def mode(self, how: tuple[str, str]) -> None:
        self.engine.set_mode(*how)

    def turns(self, count: int) -> None:
        engine = self.engine
        while count and (engine._inbox or engine._runnable):
            assert engine._take_inbox()
            engine._turn()
            count -= 1
            assert len(engine._requests.active) <= 3
            assert engine._quiet == [] or (engine._held and engine._requests.active), (
                "a hold is answered once nothing runs"
            )

    def finish(self) -> list[Completion]:
        self.engine.release()
        self.turns(5000)
        futures = [request.future for request, _ in self.requests] + self.swaps + self.holds
        assert all(future.done() for future in futures)
        return [request.future.result() for request, _ in self.requests]


COMMAND = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, len(PROMPTS) - 1), st.integers(1, 20)),
    st.tuples(st.just("turns"), st.integers(1, 10)),
    st.tuples(st.just("swap")),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("hold"), st.integers(0, 1)),
    st.tuples(st.just("release")),
)
COMMANDS = st.lists(COMMAND, min_size=15, max_size=40)
ANY_MODE = st.tuples(st.just("mode"), st.sampled_from(list(RULES)))


@pytest.mark.parametrize("how", RULES, ids="-".join)
@settings(max_examples=100)
@given(commands=COMMANDS, seed=st.integers(0, 2**16))
def test_every_request_ends_once_with_the_versions_that_made_it(
    how: tuple[str, str], commands: list[Any], seed: int
) -> None:
    harness = Harness(UpdateConfig(mode=how[0], kv=how[1]), seed)
    for name, *arguments in commands:
        (harness.engine.release if name == "release" else getattr(harness, name))(*arguments)
    completions = harness.finish()
    for (request, params), completion in zip(harness.requests, completions, strict=True):
        full = len(completion.token_ids) == params.max_tokens
        assert completion.finish_reason == ("length" if full else "abort")
        assert full or request.request_id in harness.aborted
        assert completion.prompt_token_ids.tolist() == request.prompt.tolist()
        assert completion.temperature == params.temperature
        truth = [harness.vllm.truth[int(-serial)] for serial in completion.logprobs]
        named = zip(completion.policy_versions.tolist(), completion.kv_versions.tolist(), strict=True)
        assert list(named) == truth
        assert len(set(completion.policy_versions)) <= 1 or how[0] in ("never_stop", "abort_resume")
    counters = harness.engine.counters
    assert counters.generated_tokens == sum(len(c.token_ids) for c in completions) + counters.discarded_tokens
    assert counters.discarded_tokens == 0 or how[0] == "abort_retry"
    assert counters.aborted == 0
    assert [swap.result().version for swap in harness.swaps] == list(range(1, harness.named + 1))


@settings(max_examples=200)
@given(commands=st.lists(st.one_of(COMMAND, ANY_MODE), min_size=15, max_size=60), seed=st.integers(0, 2**16))
def test_the_mode_may_change_while_requests_run_and_swaps_wait(commands: list[Any], seed: int) -> None:
    harness = Harness(UpdateConfig(), seed)
    for name, *arguments in commands:
        (harness.engine.release if name == "release" else getattr(harness, name))(*arguments)
    for completion in harness.finish():
        truth = [harness.vllm.truth[int(-serial)] for serial in completion.logprobs]
        named = zip(completion.policy_versions.tolist(), completion.kv_versions.tolist(), strict=True)
        assert list(named) == truth
    assert harness.engine.version == harness.named


def test_a_mode_that_does_not_exist_is_refused_and_the_engine_lives() -> None:
    engine = Harness(UpdateConfig(), seed=0).engine
    for mode, kv, message in (
        ("drian", "keep", "update.mode = 'drian'"),
        ("drain", "recompute", "update.kv = 'recomp"),
    ):
        with pytest.raises(ConfigError, match=f"^policy.{message}"):
            engine.set_mode(mode, kv)
    assert not engine._inbox


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("how", RULES, ids="-".join)
def test_other_weights_of_the_same_label_leave_no_keys_and_values(how: tuple[str, str], running: bool) -> None:
    """As when a replica's folder and the first version in the store differ: nothing would tell which made them."""
    harness = Harness(UpdateConfig(mode=how[0], kv=how[1]), seed=1)
    harness.submit(0, 9)
    harness.turns(4 if running else 50)
    assert harness.vllm.cache and len(harness.engine._requests.active) == running
    harness.swaps.append(harness.engine.swap(0, Prepared({}, None, False)))
    while not harness.swaps[0].done():
        assert harness.engine._take_inbox()
        harness.engine._update()
        if not harness.swaps[0].done():
            harness.engine._requests.step()  # mode drain waits
    assert harness.vllm.cache == {} and not any(request.kv for request in harness.vllm.requests.values())
    assert set(harness.finish()[0].policy_versions) == {0}


@pytest.mark.parametrize("how", RULES, ids="-".join)
@settings(max_examples=30)
@given(commands=COMMANDS, seed=st.integers(0, 2**16), order=st.randoms(use_true_random=False))
def test_recorded_turns_are_repeated_in_whichever_order_commands_come(
    how: tuple[str, str], commands: list[Any], seed: int, order: random.Random
) -> None:
    first, again = (Harness(UpdateConfig(mode=how[0], kv=how[1]), seed) for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "turns.jsonl"
        first.engine.use(TurnLog(path))
        for name, *arguments in commands:
            (first.engine.release if name == "release" else getattr(first, name))(*arguments)
        completions = first.finish()
        first.engine._inbox.close(RuntimeError("the end"))
        turns = list(read_turns(path))
    schedule = TurnSchedule(turns)
    again.engine.use(schedule)
    for _, params in first.requests:
        again.requests.append((again.request(len(again.requests), params), params))
    posted = [("submit", request) for request, _ in again.requests]
    posted += [("swap", (swap + 1, Prepared({}, None, False), Future())) for swap in range(first.named)]
    posted += [("hold", (item[1], Future())) for _, _, items in turns for item in items if item[0] == "hold"]
    order.shuffle(posted)
    for command in posted:
        again.engine._inbox.post(*command)
    while not schedule.ended(again.engine._inbox.turn):
        assert again.engine._take_inbox()
        again.engine._turn()
    again.turns(5000)
    repeated = [request.future.result(timeout=0) for request, _ in again.requests]
    for one, other in zip(completions, repeated, strict=True):
        assert completion_line("", one) == completion_line("", other)
    assert again.vllm.truth == first.vllm.truth


def test_a_swap_that_was_cancelled_while_it_waited_is_left_out() -> None:
    """Whoever cancels it gives its tensors back."""
    harness = Harness(UpdateConfig(mode="drain"), seed=0)
    harness.submit(0, 7)
    harness.turns(3)
    harness.swap()
    harness.turns(1)
    assert harness.engine.status()["draining"]
    assert harness.swaps[0].cancel()
    harness.swap()
    (completion,) = harness.finish()
    assert harness.engine.version == 2 and harness.engine.counters.swaps == 1
    assert set(completion.policy_versions) == {0}
