"""What is asked of a run's policy and trainer by hand, between fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from forge_async.config import Config, changed
from forge_async.errors import ConfigError, DataError, ForgeError, RunFailed
from forge_async.journal import Journal
from forge_async.mesh import ReplicaDied
from forge_async.observability.events import EventLog
from forge_async.observability.jsonl import read
from forge_async.policy.config import SamplingConfig
from forge_async.run.controls import (
    ATTEMPTS,
    Answer,
    PageControl,
    PolicyControl,
    TrainerControl,
    generate,
    prompt_ids,
)
from forge_async.run.parts import Parts
from forge_async.types import Completion


class Service:
    """Answers each request by its own prompt; the first ``deaths`` of them die with their replica."""

    def __init__(self, deaths: int = 0) -> None:
        self.deaths, self.requests, self.told = deaths, [], []
        self.refuses: ForgeError | None = None

    async def call(self, name: str, *args: Any, session: str = "") -> Any:
        if name == "check":
            if self.refuses is not None:
                raise self.refuses
            return None
        ids, sampling, request, seed = args
        self.requests.append((request, seed))
        if len(self.requests) <= self.deaths:
            raise ReplicaDied("replica 0: process 7 ended")
        versions = np.zeros(len(ids), np.int32)
        logprobs = np.full(len(ids), -0.5, np.float32)
        return Completion(ids, ids, logprobs, versions, versions, "stop", temperature=sampling.temperature)

    async def fan_out(self, name: str, *args: Any, timeout: float = 0) -> list[Any]:
        self.told.append((name, *args))
        return [None, ReplicaDied("one is being respawned")]


Made = tuple[Any, Service, list[Config]]


@pytest.fixture
def make() -> Callable[..., Made]:
    def make(settings: dict[str, Any] | None = None, failure: ForgeError | None = None) -> Made:
        service, applied = Service(), []
        run = SimpleNamespace(config=changed(Config(), settings or {}), engines=SimpleNamespace(policy=service))

        def checked(new: dict[str, Any]) -> Config:
            if failure is not None:
                raise failure
            return changed(run.config, new)

        async def ask_trainer(endpoint: str, *args: Any) -> list[Any]:
            if endpoint == "set_learning_rate":
                return [args[0] / 2]
            return [[np.arange(len(sequence.token_ids), dtype=np.float32) for sequence in args[0]]]

        console = SimpleNamespace(warn=lambda text: service.told.append(("warned", text)))
        run.changed, run.require_up = checked, lambda what: None
        run.parts = SimpleNamespace(
            apply=applied.append, ask_trainer=ask_trainer, recording=SimpleNamespace(console=console)
        )
        return run, service, applied

    return make


async def test_a_refused_prompt_is_no_event_and_an_answered_one_is(
    make: Callable[..., Made], tmp_path: Path, tiny_llama: Path
) -> None:
    run, service, _ = make()
    parts: Any = Parts(run.config, None, None, PageControl(run))
    parts.loop, parts.journal = SimpleNamespace(version=3), Journal(tmp_path / "schedule")
    parts.recording = SimpleNamespace(events=EventLog(tmp_path / "events.jsonl"))
    parts.tokenizer, run.parts = AutoTokenizer.from_pretrained(tiny_llama), parts
    logs = tmp_path / "events.jsonl", tmp_path / "schedule/loop.jsonl"

    def told() -> list[list[Any]]:
        return [[line["what"] for line in read(path)] for path in logs]

    service.refuses = DataError("the prompt has 9 tokens, allowed are 1 to 8")
    with pytest.raises(DataError, match="^the prompt has 9 tokens"):
        await PolicyControl(run).generate([5] * 9)
    for wrong in (["one"], ["101", "11"]):
        with pytest.raises(DataError, match="one prompt per call"):
            await PolicyControl(run).generate(wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="give text, chat messages or token ids"):
        await PolicyControl(run).generate({"role": "user", "content": "101"})  # type: ignore[arg-type]
    for wrong in ([2**40], [[5], [6, 7]]):
        with pytest.raises(DataError, match="neither text nor chat messages nor token ids"):
            await PolicyControl(run).generate(wrong)  # type: ignore[arg-type]
    assert told() == [[], []] and service.requests == []
    service.refuses, service.deaths = None, 99
    with pytest.raises(ForgeError, match="was not answered"):
        await PolicyControl(run).generate([5])
    assert told() == [[], ["a prompt was answered"]], "its draws may have been taken: no replay goes on after it"
    service.deaths = 0
    (answer,) = await PolicyControl(run).generate([5, 6])
    assert told()[0] == ["a prompt was answered"]
    assert repr(answer).startswith("Answer('") and repr(answer).endswith("2 tokens, versions 0, ended by stop)")
    assert len(repr(Answer("long " * 1000, answer.completion))) < 300


async def test_settings_that_the_engine_cannot_serve_are_refused_and_nothing_changes(make: Callable[..., Made]) -> None:
    run, service, applied = make()
    service.refuses = ConfigError("sampling.top_k", 0, "above 0")
    with pytest.raises(ConfigError, match=r"^policy.sampling.top_k = 0: must be above 0"):
        await PolicyControl(run).set_sampling(top_p=0.5)
    assert applied == []


async def test_the_length_limit_stays_where_rewards_are_shaped_by_it(make: Callable[..., Made]) -> None:
    run, _, applied = make({"trainer.loss.algorithm": "dapo"})
    with pytest.raises(ConfigError, match="policy.sampling.max_tokens = 9: must be left as it is"):
        await PolicyControl(run).set_sampling(max_tokens=9)
    await PolicyControl(run).set_sampling(temperature=0.5)
    assert [config.policy.sampling.temperature for config in applied] == [0.5]
    run, _, applied = make()
    assert (await PolicyControl(run).set_sampling(max_tokens=9)).max_tokens == 9 and len(applied) == 1


async def test_sampling_that_biases_training_is_allowed_with_a_warning(make: Callable[..., Made]) -> None:
    run, service, _ = make()
    await PolicyControl(run).set_sampling(top_k=4, sampling_mask=False)
    (warning,) = [text for kind, text in service.told if kind == "warned"]
    assert "policy.sampling.sampling_mask is off" in warning


async def test_an_update_mode_is_told_to_every_replica_after_it_counts_for_new_ones(make: Callable[..., Made]) -> None:
    run, service, _ = make()
    run.parts.apply = lambda config: service.told.append(("applied", config.policy.update.mode))
    await PolicyControl(run).set_update_mode("never_stop", kv="recompute")
    assert service.told == [("applied", "never_stop"), ("set_mode", "never_stop", "recompute")]
    with pytest.raises(ConfigError, match="policy.update.timeout_s"):
        await PolicyControl(make({"policy.update.timeout_s": 1.0})[0]).set_update_mode("drain")


async def test_a_learning_rate_is_checked_before_the_trainer_hears_of_it(make: Callable[..., Made]) -> None:
    run, _, applied = make()
    assert await TrainerControl(run).set_lr(1e-3) == 0.5e-3, "what the schedule makes of it"
    assert applied[0].trainer.optimizer.lr == 1e-3
    for wrong in (0.0, float("nan"), "fast"):
        with pytest.raises(ConfigError, match="trainer.optimizer.lr"):
            await TrainerControl(run).set_lr(wrong)  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match="died"):
        await TrainerControl(make(failure=RunFailed("it died"))[0]).set_lr(1e-3)
    assert len(applied) == 1


async def test_logprobs_are_those_of_the_sampled_tokens_alone(make: Callable[..., Made]) -> None:
    run, _, _ = make()
    prompt, ids = np.array([4, 5, 6], np.int32), np.array([7, 8], np.int32)
    completion = Completion(prompt, ids, np.zeros(2, np.float32), ids, ids, "stop", temperature=0.7)
    (logprobs,) = await TrainerControl(run).logprobs([completion])
    assert logprobs.tolist() == [3, 4], "prompt tokens are left out"


async def test_a_request_whose_replica_dies_is_asked_again_with_its_own_draws(tiny_llama: Path) -> None:
    tokenizer, ids = AutoTokenizer.from_pretrained(tiny_llama), np.array([40, 41], np.int32)
    service: Any = Service(deaths=1)
    answers = await generate(service, ids, SamplingConfig(temperature=0.5), 2, tokenizer, "hand-0", seed=5)
    assert len(answers) == 2 and answers[0].completion.temperature == 0.5
    names, seeds = zip(*service.requests, strict=True)
    assert len(set(names)) == 3, "an engine takes each name once"
    assert len(set(seeds)) == 2 and seeds.count(seeds[0]) == 2, "the one that was asked again kept its seed"
    service = Service(deaths=99)
    with pytest.raises(ForgeError, match="the prompt was not answered: replica 0: process 7 ended"):
        await generate(service, ids, SamplingConfig(), 1, tokenizer, "hand-1")
    assert len(service.requests) == ATTEMPTS and {seed for _, seed in service.requests} == {None}


@pytest.mark.parametrize("ends", ["interrupted", "failed"])
async def test_requests_whose_caller_has_left_are_aborted(tiny_llama: Path, ends: str) -> None:
    tokenizer, ids = AutoTokenizer.from_pretrained(tiny_llama), np.array([40, 41], np.int32)

    class Slow(Service):
        left = 0

        async def call(self, name: str, *args: Any, session: str = "") -> Any:
            self.requests.append((args[2], args[3]))
            if args[2] == "hand-7-0-0":
                return await Service().call(name, *args)
            if args[2] == "hand-7-2-0" and ends == "failed":
                raise ForgeError("no replica is left")
            try:
                await asyncio.sleep(60)
            finally:
                self.left += 1

    slow = Slow()
    service: Any = slow
    cell = asyncio.ensure_future(generate(service, ids, SamplingConfig(), 4, tokenizer, "hand-7"))
    await asyncio.sleep(0.01)
    if ends == "interrupted":
        cell.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError if ends == "interrupted" else ForgeError):
            await cell
    assert slow.left == (3 if ends == "interrupted" else 2) and len(asyncio.all_tasks()) == 1
    aborted = {request for kind, request in slow.told if kind == "abort"}
    assert aborted == {"hand-7-1-0", "hand-7-2-0", "hand-7-3-0"}, "the first one was answered"


def test_text_messages_and_ids_become_the_prompt_that_each_means(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    dataset = changed(Config(), {"dataset.system_prompt": "be brief"}).dataset
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    text = prompt_ids("hi", tokenizer, dataset)
    assert text.tolist() == prompt_ids(messages, tokenizer, dataset).tolist()
    assert text.tolist() != prompt_ids(messages[1:], tokenizer, dataset).tolist(), "messages are taken as they are"
    assert tokenizer.decode(text).count("be brief") == 1
    for ids in ([5, 6], np.array([5, 6])):
        assert prompt_ids(ids, tokenizer, dataset).tolist() == [5, 6]
