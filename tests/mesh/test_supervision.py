"""Faults go to the mesh they happened on."""

from __future__ import annotations

from forge_async.mesh.supervision import FaultBoard


def test_a_fault_reaches_the_listeners_of_its_own_mesh_only():
    board, heard = FaultBoard(), []
    for name in ("reward-1", "reward-10", "policyactor-2"):
        board.register(name, lambda fault, name=name: heard.append((name, fault.mesh_name)))
    board.report("reward-10-procs", "process 7 ended")
    board.report("reward-1", "it raised")
    board.report("policyactor-22", "nobody watches it")
    assert heard == [("reward-10", "reward-10-procs"), ("reward-1", "reward-1")]
    assert [fault.mesh_name for fault in board.unclaimed] == ["policyactor-22"]
