"""However a run ends, no process and no shared-memory segment remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_async.mesh.processes import find_processes

SCRIPT = Path(__file__).with_name("controller_script.py")


class Controller:
    """The script in a session of its own, so that a signal to its process group is what a terminal's Ctrl-C sends."""

    def __init__(self, where: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), where],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self.run_id = ""

    def ready(self) -> None:
        """Wait until it sits where it was told to."""
        self.run_id = self.read("RUN")
        self.read("READY")

    def read(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise AssertionError(f"ended before {word}: {self.process.communicate()[1]}")

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, timeout_s: float) -> tuple[int, str]:
        try:
            error = self.process.communicate(timeout=timeout_s)[1]
        finally:
            if self.process.poll() is None:
                self.process.kill()
        return self.process.returncode, error

    def leftovers(self, within_s: float = 5.0) -> list[int]:
        """Processes of the run that are still there after ``within_s``."""
        deadline = time.monotonic() + within_s
        while (found := find_processes(self.run_id)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found


@pytest.fixture
def start():
    """Starts controllers; ends those that a failed test left, and looks for shared memory left behind."""
    before = set(os.listdir("/dev/shm"))
    started: list[Controller] = []

    def make(where: str) -> Controller:
        started.append(Controller(where))
        return started[-1]

    yield make
    for controller in started:
        if controller.process.poll() is None:
            controller.process.kill()
            controller.process.communicate()
    assert {name for name in set(os.listdir("/dev/shm")) - before if "torch" in name or "forge" in name} == set()


@pytest.mark.parametrize("where", ["start", "calls", "store"])
def test_ctrl_c_ends_cleanly(start, where):
    controller = start(where)
    controller.ready()
    time.sleep(0.3)
    controller.interrupt()
    code, error = controller.wait(30)
    assert controller.leftovers(0) == []
    assert code == -signal.SIGINT, error
    assert error.rstrip().endswith("KeyboardInterrupt")


def test_sigterm_ends_cleanly(start):
    controller = start("calls")
    controller.ready()
    controller.process.terminate()
    code, error = controller.wait(30)
    assert controller.leftovers(0) == []
    assert code == 128 + signal.SIGTERM, error


def test_sigterm_ends_a_run_that_was_started_by_a_cell_that_has_ended(start):
    """As in a notebook: the runtime is left by a later cell, so no task that the signal could end is inside it."""
    controller = start("cell")
    controller.ready()
    controller.process.terminate()
    code, error = controller.wait(30)
    assert controller.leftovers(1) == []
    assert code == -signal.SIGTERM, error


def test_second_ctrl_c_forces(start):
    controller = start("calls")
    controller.ready()
    controller.interrupt()
    time.sleep(0.3)
    controller.interrupt()
    started = time.monotonic()
    code, _ = controller.wait(30)
    assert time.monotonic() - started < 4
    assert code != 0
    assert controller.leftovers(1) == []


def test_killed_controller_leaves_nothing(start):
    controller = start("store")
    controller.ready()
    controller.process.kill()
    controller.wait(30)
    assert controller.leftovers() == []


def test_dead_actor_ends_the_script_with_its_cause(start):
    controller = start("fail")
    controller.run_id = controller.read("RUN")
    started = time.monotonic()
    code, error = controller.wait(60)
    assert controller.leftovers(0) == []
    assert code == 1
    assert "ActorDied" in error
    assert time.monotonic() - started < 40
