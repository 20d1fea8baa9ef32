"""Lockstep between two processes without an engine: what travels, what does not, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import pytest

from forge_async.mesh.actor import free_port

pytestmark = pytest.mark.timeout(120)
CHILD = Path(__file__).parent / "lockstep_child.py"
LEADER = """
import sys
from concurrent.futures import Future

import torch.distributed as dist
from forge_async.policy.lockstep import Lockstep
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=0, world_size=2)
lockstep = Lockstep()
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Pair:
    """A leader that executes lines of Python, and the other rank's answers."""

    def __init__(self, leader: subprocess.Popen[str], answers: Connection) -> None:
        self.leader, self.answers = leader, answers

    def tell(self, line: str) -> None:
        assert self.leader.stdin is not None and self.leader.stdout is not None
        self.leader.stdin.write(line + "\n")
        self.leader.stdin.flush()
        assert self.leader.stdout.readline() == "done\n"

    def answer(self) -> object:
        assert self.answers.poll(30)
        return self.answers.recv()


@pytest.fixture
def pair(tmp_path: Path):
    port, address = str(free_port()), str(tmp_path / "socket")
    environment = os.environ | {"PYTHONPATH": str(CHILD.parents[2])}
    with Listener(address) as listener:
        leader = subprocess.Popen(
            [sys.executable, "-c", LEADER, port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        other = subprocess.Popen([sys.executable, str(CHILD), port, address], env=environment)
        try:
            with listener.accept() as answers:
                yield Pair(leader, answers)
        finally:
            for process in (leader, other):
                process.kill()
                process.communicate()


def test_commands_arrive_in_order_until_the_ranks_differ(pair: Pair) -> None:
    pair.tell("lockstep.send([('submit', (3, Future())), ('swap', (5, 'tensors', Future())), ('abort', 'x')], 7)")
    submit, swap, abort = pair.answer()  # type: ignore[misc]
    assert submit[0] == "submit" and "Future" in submit[2] and submit[2].startswith("(3, ")
    assert swap == ("swap", str(str), "own 5")
    assert abort == ("abort", str(str), "x")
    pair.tell("lockstep.send([], 7)")
    assert pair.answer() == []
    pair.tell("lockstep.send([('gather', 0)], 7); assert lockstep.gather('zero') == ['zero', 'one']")
    assert pair.answer() == [("gather", str(int), "0")]
    assert pair.answer() == ["zero", "one"]
    # Other tokens sampled: nothing that follows could be right.
    pair.tell("lockstep.send([], 8)")
    assert "LockstepBroken('rank 1 sampled other tokens than rank 0" in str(pair.answer())


def test_a_dead_leader_is_noticed_at_once(pair: Pair) -> None:
    pair.tell("lockstep.send([], 7)")
    assert pair.answer() == []
    pair.leader.kill()
    assert "RuntimeError" in str(pair.answer())


def test_the_end_is_sent_too(pair: Pair) -> None:
    pair.tell("lockstep.send(None, 7)")
    assert pair.answer() == "end"
