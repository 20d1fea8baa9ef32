"""The whole system on a tiny model: what a run promises, and what happens when parts of it die."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from forge_async.observability import RunFolder
from forge_async.replay import NotReplayable, Recorded
from forge_async.run.checkpoints import Checkpoints

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and "Z" not in _state(pid)]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.timeout(600)
def test_a_run_keeps_its_invariants_is_replayed_and_resumes(app) -> None:
    # A random model hardly ever ends by itself, and would not be answered.
    turns = ("rollout.environment=tiny_task:Again", "policy.sampling.stop_token_ids=[20,21,22,23,24,25,26,27]")
    code, output = app.run("checkpoint.every_steps=2", *turns)
    assert code == 0, output
    path = Path(output.splitlines()[-1])
    assert (app.folder / path).resolve() == (app.folder / "runs/tiny/summary.json").resolve()
    summary = app.summary()
    assert set(summary) == {
        *("steps", "wall_s", "reward", "swaps", "swaps_in_flight", "aborted_by_swap", "tokens", "staleness"),
        *("digest_mismatches", "ledger", "requeued", "selection_bias", "idle_share", "tokens_per_s"),
        *("trainer_s", "advice"),
    }
    assert summary["trainer_s"]["backward"] > 0
    assert summary["advice"] is None and "\nbalance " not in output, "four steps say too little"
    assert sum(summary["staleness"]["histogram"]) == summary["tokens"]["trained"]
    assert summary["staleness"]["kv_max_seen"] >= summary["staleness"]["max_seen"]
    assert summary["steps"] == 4
    assert 1 <= summary["swaps_in_flight"] <= summary["swaps"] <= 4, "of several that wait, only the newest is taken"
    assert summary["aborted_by_swap"] == summary["digest_mismatches"] == summary["tokens"]["without_version"] == 0
    assert summary["tokens"]["trained"] > 0
    assert summary["staleness"]["max_seen"] <= summary["staleness"]["bound"] == 2
    ledger = summary["ledger"]
    assert ledger["trained"] == 16
    assert ledger["admitted"] == ledger["trained"] + sum(ledger["dropped"].values())

    run = app.folder / "runs" / "tiny"
    published = {event["version"]: event["digest"] for event in app.events() if event["kind"] == "published"}
    swapped = {event["version"]: event["digest"] for event in app.events() if event["kind"] == "swapped"}
    assert set(published) == {0, 1, 2, 3, 4}
    assert len(set(published.values())) == 5, "every step changes the weights"
    assert {version: published[version] for version in swapped} == swapped and 4 in swapped
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    assert (run / "reward.png").stat().st_size > 10_000
    assert (run / "model" / "config.json").exists()
    episodes = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == 16
    assert max(len(episode["turns"]) for episode in episodes) > 1, "the environment answered"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["version-000002", "version-000004"]

    saved = json.loads((run / "checkpoints" / "version-000004" / "forge.json").read_text())["extra"]["ledger"]
    bias = summary["selection_bias"]
    assert set(bias) == {"task", "prompt_tokens", "completion_tokens"}
    assert sum(s["trained"] for s in bias["completion_tokens"]["strata"].values()) == 16
    assert saved["dropped"] == {}, "prompts open at the end of the run are not lost to a resume"
    assert len(saved["in_flight"]) == saved["admitted"] - 16 > 0
    code, output = app.replay()
    assert code == 0, output
    assert [line.partition(":")[0] for line in output.splitlines() if line.startswith("step ")] == [
        f"step {step}" for step in (1, 2, 3, 4)
    ]
    assert "5 versions" in output and "4 steps: as recorded" in output

    (run / "checkpoints" / "version-000099.partial").mkdir()
    (run / "checkpoints" / "version-000099.partial" / "forge.json").write_text('{"cut off')

    code, output = app.run("resume=runs/tiny", "steps=6", *turns)
    assert code == 0, output
    summary = app.summary()
    assert summary["steps"] == 2
    ledger = summary["ledger"]
    assert ledger["trained"] == 24
    assert ledger["dropped"].keys() <= {"run_ended"}
    assert ledger["admitted"] - ledger["trained"] <= 8, "no more than were open at the end"
    with pytest.raises(NotReplayable, match="the run was resumed after step 4.*--steps 4"):
        Recorded.read(run)
    assert ledger["admitted"] == ledger["trained"] + sum(ledger["dropped"].values())


def test_a_killed_generator_is_replaced_and_the_run_goes_on(app) -> None:
    process = app.start("steps=12")
    app.wait_for(process, "step")
    victim = next(event for event in app.events() if event["kind"] == "started")["policy"][0]
    os.kill(victim, signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert any(event["kind"] == "respawned" for event in app.events())
    assert app.summary()["steps"] == 12
    assert app.summary()["advice"]["idle_trainer"] >= 0 and "\nbalance    " in output
    with pytest.raises(NotReplayable, match="a replica was lost"):
        Recorded.read(app.folder / "runs" / "tiny")
    ledger = app.summary()["ledger"]
    assert ledger["admitted"] == ledger["trained"] + sum(ledger["dropped"].values())


def test_a_killed_trainer_ends_the_run_with_cause_and_resume_command(app) -> None:
    process = app.start("steps=500", "checkpoint.every_steps=1")
    app.wait_for(process, "checkpoint")
    started = next(event for event in app.events() if event["kind"] == "started")
    killed = time.monotonic()
    os.kill(started["trainer"][0], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - killed < 20
    assert process.returncode == 1
    assert "the trainer failed" in output
    assert "resume=runs/tiny" in output
    assert not alive([*started["trainer"], *started["policy"]])


@pytest.mark.parametrize("event", ["start", "checkpoint"])
def test_ctrl_c_ends_cleanly(app, event: str) -> None:
    """In the engines' start; and while a checkpoint is written, a version published, and the next groups generated."""
    process = app.start("steps=500", "checkpoint.every_steps=1")
    app.wait_for(process, event)
    checkpoints = app.folder / "runs" / "tiny" / "checkpoints"
    if event == "start":
        time.sleep(3)
    else:
        deadline = time.monotonic() + 60
        while not list(checkpoints.glob("*.partial")):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    pids = [pid for e in app.events() if e["kind"] == "started" for pid in [*e["trainer"], *e["policy"]]]
    assert not alive(pids)
    if event == "checkpoint":
        ledger = app.summary()["ledger"]
        assert ledger["admitted"] == ledger["trained"] + sum(ledger["dropped"].values())
        assert Checkpoints(RunFolder(app.folder / "runs" / "tiny")).read()["version"] >= 1, "what was saved is whole"


def test_a_synchronous_run_on_two_trainer_processes_trains_a_short_dataset_to_its_end(app) -> None:
    """In mode blocking the replicas are held around each step, the last, partial one included."""
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(10)]
    (app.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, output = app.run(
        *("dataset.kind=jsonl", "dataset.path=rows.jsonl", "dataset.epochs=1", "dataset.prompt_template="),
        *("steps=50", "policy.update.mode=blocking", "trainer.procs=2"),
        *("buffer.max_staleness=0", "buffer.max_open_groups=null", "policy.sampling.temperature=1.0"),
    )
    assert code == 0, output
    assert "dataset ended" in output
    summary = app.summary()
    assert summary["steps"] == summary["swaps"] == 3, "4 + 4 + 2 groups"
    assert summary["swaps_in_flight"] == summary["tokens"]["discarded"] == summary["tokens"]["recomputed"] == 0
    assert summary["ledger"] == {"admitted": 10, "trained": 10, "dropped": {}}
    tokens = summary["tokens"]["trained"]
    assert summary["staleness"] == {"bound": 0, "max_seen": 0, "kv_max_seen": 0, "histogram": [tokens]}
    published = {event["version"]: event["digest"] for event in app.events() if event["kind"] == "published"}
    swapped = {event["version"]: event["digest"] for event in app.events() if event["kind"] == "swapped"}
    assert swapped == {version: published[version] for version in (1, 2, 3)}, "shards of two ranks make whole tensors"
    assert summary["digest_mismatches"] == 0
