"""Whole runs of the app on a tiny model, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_async.testing.models import ModelFactory

ROOT = Path(__file__).resolve().parents[2]

CONFIG = """
name: tiny
steps: 4
model: {path: "%s"}
dataset:
  kind: reasoning_gym
  name: chain_sum
  params: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}
  prompt_template: "{expression}="
rollout: {group_size: 4, timeout_s: 60}
reward: {functions: ["tiny_task:share_of_digits"], timeout_s: 5}
policy:
  max_model_len: 128
  kv_cache_gib: 0.25
  sampling: {temperature: 0.7, max_tokens: 64}
trainer: {max_sequence_tokens: 128, optimizer: {lr: 1.0e-3}}
buffer: {max_staleness: 2, max_open_groups: 8, groups_per_step: 4}
metrics: {tensorboard: false}
dashboard: {enabled: false}
"""

TASK = '''
from forge_async.rollout.environment import Environment, Session

class Again(Environment):
    """Answers every completion that ended by itself, until a limit is reached."""
    def session(self, prompt, episode_id):
        return Asks(prompt)

class Asks(Session):
    async def reply(self, text, completion):
        return [{"role": "tool", "content": str(len(text))}]

def share_of_digits(prompt, completion_text):
    """Dense, so that a random model has groups of unequal rewards."""
    return sum(c in "0123456789" for c in completion_text) / max(1, len(completion_text))

def raises(prompt, completion_text):
    raise ZeroDivisionError("no such luck")
'''


class App:
    """The app in a working directory of its own, with a user's reward module in it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.started = folder, []
        (folder / "tiny.yaml").write_text(CONFIG % model)
        (folder / "tiny_task.py").write_text(TASK)

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        """Start a run; its output goes to a pipe, standard error included."""
        command = [sys.executable, str(ROOT / "apps" / "grpo_main.py"), "--config", "tiny.yaml", *overrides]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *overrides: str, timeout: float = 240) -> tuple[int, str]:
        """Run to the end; exit code and output."""
        process = self.start(*overrides)
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output

    def replay(self, name: str = "tiny", timeout: float = 240) -> tuple[int, str]:
        """Replay a run; exit code and output."""
        command = [sys.executable, "-m", "forge_async.cli", "replay", f"runs/{name}"]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output

    def events(self, name: str = "tiny") -> list[dict[str, Any]]:
        path = self.folder / "runs" / name / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def summary(self, name: str = "tiny") -> dict[str, Any]:
        return json.loads((self.folder / "runs" / name / "summary.json").read_text())

    def wait_for(
        self, process: subprocess.Popen[str], kind: str, name: str = "tiny", timeout: float = 240
    ) -> dict[str, Any]:
        """The first event of a kind, once it is there."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and process.poll() is None:
            for event in self.events(name):
                if event["kind"] == kind:
                    return event
            time.sleep(0.1)
        raise AssertionError(f"no {kind!r} event; exit code {process.poll()}; events {self.events(name)[-3:]}")


@pytest.fixture
def app(tmp_path: Path, tiny_model: ModelFactory) -> Iterator[App]:
    app = App(tmp_path, tiny_model("llama", tied=True))
    yield app
    for process in app.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


AppFactory = Callable[[], App]
