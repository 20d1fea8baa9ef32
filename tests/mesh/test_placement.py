"""Which cores go where: expected plans by hand."""

from __future__ import annotations

import pytest

from forge_async.errors import ConfigError
from forge_async.mesh import PlacementConfig, plan_placement
from forge_async.mesh.placement import deal


def test_two_cores_are_one_each():
    plan = plan_placement(PlacementConfig(), trainer_procs=1, policy_replicas=1, cores=[0, 1])
    assert (plan.trainer, plan.policy) == ([0], [[1]])


def test_two_trainer_processes_share_on_two_cores():
    plan = plan_placement(PlacementConfig(), trainer_procs=2, policy_replicas=1, cores=[0, 1])
    assert (plan.trainer, plan.policy) == ([0], [[1]])


def test_more_cores_are_split_in_proportion():
    plan = plan_placement(PlacementConfig(), trainer_procs=2, policy_replicas=2, policy_procs=1, cores=range(8))
    assert (plan.trainer, plan.policy) == ([0, 1, 2, 3], [[4, 5], [6, 7]])


def test_one_core_is_shared_with_a_warning():
    with pytest.warns(UserWarning, match="one core only"):
        plan = plan_placement(PlacementConfig(), trainer_procs=1, policy_replicas=2, cores=[3])
    assert (plan.trainer, plan.policy) == ([3], [[3], [3]])


def test_named_cores_are_taken_and_the_rest_is_planned():
    plan = plan_placement(PlacementConfig(trainer_cores=[1]), trainer_procs=1, policy_replicas=1, cores=range(4))
    assert (plan.trainer, plan.policy) == ([1], [[0, 2, 3]])


def test_named_cores_that_overlap_warn():
    with pytest.warns(UserWarning, match=r"share cores \[0\]"):
        plan_placement(PlacementConfig(trainer_cores=[0], policy_cores=[0, 1]), 1, 1, cores=[0, 1])


def test_bad_cores_are_refused():
    with pytest.raises(
        ConfigError, match=r"policy_cores = \[7\]: must be among the cores this process may use, \[0, 1\]"
    ):
        plan_placement(PlacementConfig(policy_cores=[7]), 1, 1, cores=[0, 1])
    with pytest.raises(ConfigError, match=r"trainer_cores = \[\]"):
        PlacementConfig(trainer_cores=[])


def test_deal():
    assert deal([0, 1, 2, 3, 4], 2) == [[0, 1], [2, 3, 4]]
    assert deal([5], 3) == [[5], [5], [5]]
    assert deal([0, 1], 3) == [[0], [1], [0]]
