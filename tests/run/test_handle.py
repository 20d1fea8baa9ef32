"""The handle where no engine is up: what it refuses, what it shows, and what it makes of changed settings."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forge_async
from forge_async.config import Config, changed, differences
from forge_async.errors import ConfigError, DataError, ForgeError, ModelNotFoundError, RunFailed, RunStateError
from forge_async.journal import Journal
from forge_async.mesh import ActorDied
from forge_async.observability.events import EventLog
from forge_async.policy.config import UpdateConfig
from forge_async.policy.turns import Diverged
from forge_async.run import Run, Status
from forge_async.run.controls import PageControl, prompt_ids, sampling_of
from forge_async.run.parts import Parts
from forge_async.run.recording import Recording
from forge_async.run.status import ReplicaStatus

CALLS: dict[str, Any] = {
    "step": lambda run: run.step(1),
    "resume": lambda run: run.resume(),
    "pause": lambda run: run.pause(),
    "wait": lambda run: run.wait(),
    "checkpoint": lambda run: run.checkpoint(),
    "generate": lambda run: run.policy.generate("hello"),
    "changing trainer.optimizer.lr": lambda run: run.trainer.set_lr(1.0),
    "changing policy.sampling.temperature": lambda run: run.policy.set_sampling(temperature=1.0),
    "changing policy.update.mode": lambda run: run.policy.set_update_mode("drain"),
}


@pytest.mark.parametrize("name", CALLS)
async def test_before_the_start_and_after_the_end_a_call_says_what_to_do(name: str) -> None:
    run = forge_async.launch(Config())
    with pytest.raises(RunStateError, match=f"^{name}.*: the run is new. Call `await run.start"):
        await CALLS[name](run)
    await run.stop()
    with pytest.raises(RunStateError, match=f"^{name}.*: the run is stopped. Launch another one"):
        await CALLS[name](run)
    assert run.status().state == run.state == "stopped"


async def test_what_there_is_to_see_before_the_start_is_the_status_alone() -> None:
    run = forge_async.launch(Config(name="mine"))
    assert "run mine: new" in repr(run) and "run mine: new" in run._repr_html_()
    for look in (run.episodes, run.summary, lambda: run.metrics, lambda: run.weights, lambda: run.buffer):
        with pytest.raises(RunStateError, match="the run is new"):
            look()


async def test_a_start_that_fails_leaves_a_stopped_run_that_cannot_be_started_again(tmp_path: Path) -> None:
    run = forge_async.launch(changed(Config(), {"model.path": str(tmp_path / "none"), "output_dir": str(tmp_path)}))
    with pytest.raises(ModelNotFoundError):
        await run.start()
    with pytest.raises(RunStateError, match="was started before"):
        await run.start()
    assert run.state == "stopped"
    assert os.listdir(tmp_path) == []
    await run.stop()


async def test_an_environment_that_is_not_there_leaves_no_folder(tmp_path: Path, tiny_llama: Path) -> None:
    settings = {"model.path": str(tiny_llama), "output_dir": str(tmp_path), "rollout.environment": "no_such:World"}
    run = forge_async.launch(changed(Config(), settings))
    with pytest.raises(ConfigError, match=r"rollout.environment = 'no_such:World': .* There is no no_such in "):
        await run.start()
    assert os.listdir(tmp_path) == []


async def test_what_an_earlier_leg_said_at_its_end_is_gone_once_the_run_goes_on(
    tmp_path: Path, tiny_llama: Path
) -> None:
    settings = {"model.path": str(tiny_llama), "output_dir": str(tmp_path), "policy.max_model_len": 64}
    settings |= {"dashboard.enabled": False, "metrics.console": False, "metrics.tensorboard": False, "steps": 3}
    settings |= {"policy.sampling.max_tokens": 8}

    async def opened(**more: Any) -> Parts:
        parts = Parts(changed(Config(), settings | more), None, None, PageControl(forge_async.launch(Config())))
        try:
            await parts.open()
        finally:
            await parts.take_apart("finished")
        return parts

    parts = await opened()
    folder = parts.folder
    state = {"source": parts.source.state(), "ledger": parts.buffer.ledger.state()}
    checkpoint = folder.checkpoints / "version-000002"
    checkpoint.mkdir()
    (checkpoint / "forge.json").write_text(json.dumps({"version": 2, "extra": state}))
    for path in (folder.summary, folder.status):
        path.write_text("{}")
    with pytest.raises(ConfigError, match="steps = 2: must be more than the checkpoint's version, 2"):
        await opened(resume=str(folder.path), steps=2)
    assert folder.summary.exists() and folder.status.exists(), "a run that was refused has changed nothing"
    assert (await opened(resume=str(folder.path))).first_version == 2
    assert not folder.summary.exists() and not folder.status.exists()


async def test_rewards_are_named_where_no_environment_gives_any() -> None:
    run = forge_async.launch(changed(Config(), {"reward.functions": []}))
    with pytest.raises(
        ConfigError, match=r"reward\.functions = \[\]: must be at least one .* where rollout\.environment"
    ):
        await run.start()


async def test_a_wrong_count_of_steps_is_refused() -> None:
    with pytest.raises(RunStateError, match="0 steps"):
        await forge_async.launch(Config()).step(0)
    with pytest.raises(RunStateError, match="'2' steps"):
        await forge_async.launch(Config()).step("2")  # type: ignore[arg-type]


def test_controls_show_themselves_and_an_attribute_that_they_do_not_have_is_refused() -> None:
    run = forge_async.launch(Config())
    assert repr(run.policy).startswith("<policy of run grpo, new: temperature 1, at most ")
    assert repr(run.trainer).startswith("<trainer of run grpo, new: learning rate 1e-05; set_lr(lr)")
    for control in (run.policy, run.trainer):
        with pytest.raises(AttributeError, match="lr"):
            control.lr = 1e-5  # type: ignore[attr-defined]


def test_a_prompt_is_text_messages_or_ids() -> None:
    with pytest.raises(DataError, match="the prompt is 7: give text, chat messages or token ids"):
        prompt_ids(7, None, Config().dataset)  # type: ignore[arg-type]


def test_changed_settings_are_checked_as_loaded_ones() -> None:
    config = changed(Config(), {"trainer.optimizer.lr": 1e-3, "policy.update.mode": "drain"})
    assert config.trainer.optimizer.lr == 1e-3 and config.policy.update == UpdateConfig(mode="drain")
    assert differences(Config(), config) == {
        "trainer.optimizer.lr": (1e-5, 1e-3),
        "policy.update.mode": ("never_stop", "drain"),
    }
    for settings, message in (
        ({"trainer.optimizer.lr": -1.0}, r"trainer.optimizer.lr = -1.0: must be above 0"),
        ({"policy.sampling.temprature": 1.0}, r"Did you mean policy.sampling.temperature\?"),
        ({"policy.sampling.temperature": "hot"}, r"policy.sampling.temperature = 'hot': must be a number"),
        ({"policy.sampling.temperature": 0.0}, "above 0 for training"),
        ({"policy.update.mode": "never"}, "policy.update.mode = 'never': must be one of never_stop"),
        ({"policy.update.mode": "drain", "policy.update.kv": "recompute"}, "policy.update.kv"),
    ):
        with pytest.raises(ConfigError, match=message):
            changed(Config(), settings)


def test_a_config_shows_what_is_not_as_by_default_and_no_secret() -> None:
    config = changed(Config(), {"steps": 3, "policy.update.mode": "drain", "dashboard.token": "secret" * 3})
    assert repr(config) == "Config(steps=3, policy.update.mode='drain')"


def test_text_with_a_dollar_sign_survives_a_change() -> None:
    config = changed(Config(), {"dataset.prompt_template": "${x} {question}", "dataset.params": {"a": 1}})
    again = changed(config, {"seed": 4, "dataset.examples": [{"prompt": "p", "answer": "${y}"}]})
    assert again.dataset.prompt_template == "${x} {question}" and again.dataset.params == {"a": 1}
    assert again.dataset.examples[0].answer == "${y}"
    assert changed(again, {}) == again


def test_sampling_of_one_call_may_be_greedy_and_is_checked() -> None:
    assert sampling_of(Config().policy, {"temperature": 0, "top_k": 5}).temperature == 0
    with pytest.raises(ConfigError, match=r"policy.sampling.top_p = 2.0: must be in \(0, 1\]"):
        sampling_of(Config().policy, {"top_p": 2})
    with pytest.raises(ConfigError, match="policy.sampling.max_tokens"):
        sampling_of(Config().policy, {"max_tokens": 10**6})


def parts_of(tmp_path: Path) -> Any:
    parts: Any = Parts(Config(), None, None, PageControl(forge_async.launch(Config())))
    parts.loop = SimpleNamespace(version=3, config=parts.config)
    parts.journal = Journal(tmp_path / "schedule")
    parts.recording = SimpleNamespace(events=EventLog(tmp_path / "events.jsonl"), config=parts.config)
    return parts


def test_what_is_changed_by_hand_is_in_the_event_log_and_the_schedule(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    config = changed(parts.config, {"trainer.optimizer.lr": 1e-3})
    parts.apply(config)
    assert parts.config is parts.loop.config is parts.recording.config is config
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {key: event[key] for key in ("kind", "key", "old", "new", "version")} == {
        **{"kind": "changed", "key": "trainer.optimizer.lr", "old": 1e-5, "new": 1e-3, "version": 3},
    }
    with parts.by_hand("a prompt was answered", n=2):
        pass
    lines = [json.loads(line) for line in (tmp_path / "schedule/loop.jsonl").read_text().splitlines()]
    assert [line["what"] for line in lines] == ["trainer.optimizer.lr was changed", "a prompt was answered"]
    assert {line["k"] for line in lines} == {"hand"}


async def test_a_trainer_that_dies_while_it_saves_ends_the_run_as_failed() -> None:
    async def call(name: str, *args: Any) -> None:
        raise ActorDied(f"traineractor-2.{name}: process 7 ended")

    parts: Any = Parts(Config(), None, None, PageControl(forge_async.launch(Config())))
    parts.engines = SimpleNamespace(trainer=SimpleNamespace(call=call))
    with pytest.raises(RunFailed, match=r"the trainer failed in 'save_checkpoint': .*process 7 ended"):
        await parts.ask_trainer("save_checkpoint", "folder", {})


def test_a_failed_run_says_how_to_go_on_once() -> None:
    parts: Any = Parts(Config(), None, None, PageControl(forge_async.launch(Config())))
    died = RunFailed("the trainer died.")
    assert parts.explain(died) is died, "there is no folder yet"
    parts.folder = SimpleNamespace(path=Path("runs/x"))
    parts.checkpoints = SimpleNamespace(newest=lambda: Path("runs/x/checkpoints/version-000001"))
    explained = parts.explain(died)
    assert str(explained) == "the trainer died. Resume with resume=runs/x." and explained.__cause__ is died
    assert parts.explain(explained) is explained
    for other in (Diverged("a replay"), ForgeError("something else")):
        assert parts.explain(other) is other


def test_an_answer_cap_below_what_the_task_needs_is_named_within_the_first_step() -> None:
    """CASES: 97% truncated."""
    warnings: list[str] = []
    recording: Any = object.__new__(Recording)
    recording.config, recording._warned_truncated = Config(), False
    recording.console = SimpleNamespace(warn=warnings.append)
    for _ in range(3):
        recording.warn_truncated(0.97)
    (warning,) = warnings
    assert "97% of the completions ended at policy.sampling.max_tokens" in warning


def test_a_status_shows_itself_as_text_and_as_html() -> None:
    status = Status("x", "failed", steps=9, replicas=(ReplicaStatus("healthy", 3, 2, 7.4, 1),), failure="<died>")
    text, page = repr(status), status._repr_html_()
    assert (
        "run x: failed" in text
        and "healthy, version 3, 2 requests running (7 s ago), 1 respawns" in text
        and "<died>" in text
    )
    assert "&lt;died&gt;" in page and "<died>" not in page


async def test_an_unstarted_run_can_be_left_by_cancelling_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    run = forge_async.launch(Config())
    hanging = asyncio.Event()

    async def wait() -> None:
        hanging.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(run.parts, "open", wait)
    starting = asyncio.ensure_future(run.start())
    await hanging.wait()
    with pytest.raises(RunStateError, match="step: the run is starting"):
        await run.step()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert run.state == "stopped"


async def test_a_stop_while_it_starts_gives_the_start_up_and_returns_when_all_is_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, done = forge_async.launch(Config()), []
    opening, ending = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        opening.set()
        await asyncio.sleep(60)

    async def take_apart(outcome: str) -> None:
        await ending.wait()
        done.append(outcome)

    monkeypatch.setattr(run.parts, "open", wait)
    monkeypatch.setattr(run.parts, "take_apart", take_apart)
    starting = asyncio.ensure_future(run.start())
    await opening.wait()
    stopping = [asyncio.ensure_future(run.stop()) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in stopping)
    ending.set()
    async with asyncio.timeout(5):
        await asyncio.gather(*stopping)
        with pytest.raises(RunStateError, match="start: the run was stopped before it was up. Launch another one."):
            await starting
    assert (run.state, done) == ("stopped", ["interrupted"])
    await run.stop()


async def test_two_stops_at_once_end_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run, done = forge_async.launch(Config()), []

    async def save() -> None:
        await asyncio.sleep(0.01)
        done.append("saved")

    async def take_apart(outcome: str) -> None:
        await asyncio.sleep(0.01)
        done.append(outcome)

    async def nothing() -> None:
        pass

    monkeypatch.setattr(run.parts, "save", save)
    monkeypatch.setattr(run.parts, "take_apart", take_apart)
    pace: Any = SimpleNamespace(failure=None, rest=nothing, close=nothing)
    run._pace, run._phase = pace, "up"
    run.parts.loop = SimpleNamespace(version=run.config.steps, ended_early=None)  # type: ignore[assignment]
    first, second = asyncio.ensure_future(run.stop()), asyncio.ensure_future(run.stop())
    async with asyncio.timeout(5):
        await second
    assert done == ["saved", "finished"], "the second one has waited for the first"
    await first
    await run.stop()
    assert done == ["saved", "finished"]


def test_run_is_what_launch_makes() -> None:
    assert isinstance(forge_async.launch(Config()), Run)
