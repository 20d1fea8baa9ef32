"""What a run's rates say about its balance: each case worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_async.observability.advice import Measured, Resources, advise


def run(step_s: float, trainer: float, generators: float, fixed: float = 0.0, **changes: object) -> Measured:
    return Measured(step_s, trainer, generators, fixed, **{"groups_per_step": 8, "max_staleness": 1, **changes})  # type: ignore[arg-type]


def test_the_slower_side_gets_more_of_what_there_is() -> None:
    """Trainer: 10 s on 1 core; generators: 5 s on 3, 15 core seconds. Of 4 cores: 10 / 2 and 15 / 2 is the best."""
    advice = advise(run(10.0, 10.0, 5.0, resources=Resources(1, 3)))
    assert advice is not None
    assert (advice.waited, advice.trainer, advice.generators, advice.step_s) == ("generators", 2, 2, 7.5)
    assert str(advice) == (
        "the generators waited for the trainer 50% of the time; 2 cores for the trainer and 2 for the generators would "
        "make it about 7.5 s per step's worth of samples"
    )
    advice = advise(run(8.0, 2.0, 8.0, resources=Resources(4, 4, "GPUs")))
    assert advice is not None
    assert (advice.waited, advice.trainer, advice.generators) == ("trainer", 2, 6)  # 8 / 2 = 4; 32 / 6 = 5.3
    assert "2 GPUs for the trainer and 6 for the generators" in str(advice)


def test_a_split_that_gains_nothing_is_not_advised() -> None:
    for resources in (Resources(1, 1), Resources(2, 2, shared=True), None):
        advice = advise(run(10.0, 6.0, 10.0, resources=resources))
        assert advice is not None and advice.waited == "trainer"
        assert advice.nothing and "none of these settings" in str(advice)
    advice = advise(run(10.0, 9.5, 9.8, resources=Resources(1, 1)))
    assert advice is not None and (str(advice), advice.step_s) == ("both sides were busy", None)


def test_sides_that_wait_in_turns_need_more_batches_under_way() -> None:
    """Synchronous: 6 s of generation, then 4 s of training. Overlapped a step takes 6 s, with two batches under way."""
    advice = advise(run(10.0, 4.0, 6.0, max_staleness=0, resources=Resources(1, 1)))
    assert advice is not None
    assert (advice.waited, advice.max_staleness, advice.step_s) == ("both", 1, 6.0)
    assert "trainer and generators waited for each other (60% and 40% of the time); buffer.max_staleness=1" in str(
        advice
    )
    advice = advise(run(10.0, 4.0, 6.0, max_staleness=0, resources=Resources(2, 2, shared=True)))
    assert advice is not None and advice.waited == "both" and advice.nothing, "on one and the same there is no overlap"
    advice = advise(run(9.0, 3.0, 4.0, max_staleness=1))  # two batches take 18 s: at 4 s a step, that is 5 batches
    assert advice is not None and advice.max_staleness == 4


def test_what_may_be_open_bounds_the_batches_under_way() -> None:
    """One batch and a half is open, of the three that the staleness allows: 9 s at 4.5 s a step are 3 batches."""
    advice = advise(run(9.0, 3.0, 4.5, max_staleness=2, max_open_groups=12))
    assert advice is not None
    assert (advice.max_staleness, advice.max_open_groups, advice.step_s) == (None, 24, 4.5)
    assert "; buffer.max_open_groups=24 would make it about 4.5 s" in str(advice)
    advice = advise(run(9.0, 3.0, 2.25, max_staleness=0, max_open_groups=8))
    assert advice is not None
    assert (advice.max_staleness, advice.max_open_groups) == (2, 24)


def test_a_cap_that_is_there_to_make_room_early_is_left_alone() -> None:
    """As in configs/grpo_tiny.yaml: two batches and a half of three. At 5 / 4.4 of the pace, 2.8 are needed, so that 3
    would do; at 5 / 3.5, 3.6, so that the bound has to be raised, and what may be open with it."""
    tiny: dict[str, int] = {"groups_per_step": 16, "max_staleness": 2, "max_open_groups": 40}
    advice = advise(run(5.0, 4.4, 4.3, **tiny))
    assert advice is not None and advice.waited == "both" and advice.nothing
    advice = advise(run(5.0, 3.5, 3.4, **tiny))
    assert advice is not None
    assert (advice.max_staleness, advice.max_open_groups) == (3, 64)


def test_a_trainer_with_a_large_fixed_part_gets_larger_batches() -> None:
    """4 s of 10 are fixed. With 16 groups, 8 of them take 6 + 2 = 8 s, as long as they take to generate."""
    advice = advise(run(10.0, 10.0, 8.0, fixed=4.0, resources=Resources(1, 1)))
    assert advice is not None
    assert (advice.groups_per_step, advice.step_s) == (16, 8.0)
    advice = advise(run(10.0, 10.0, 8.0, fixed=0.1))
    assert advice is not None and advice.nothing, "the fixed part is not what makes it slow"


def test_nothing_measured_is_no_advice() -> None:
    assert advise(run(0.0, 0.0, 0.0)) is None
    assert advise(run(1.0, 1.0, 0.0)) is None
    assert advise(run(10.0, 10.0, 5.0, steps=5)) is None, "the first of them filled the pipeline"
    assert advise(run(10.0, 10.0, 5.0, steps=6)) is not None


@given(
    st.floats(0.1, 100),
    st.floats(0.01, 1),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(0, 4),
)
def test_advice_is_usable_and_never_for_the_worse(step, trainer, generators, fixed, on, off, staleness) -> None:
    advice = advise(
        run(
            step,
            step * trainer,
            step * generators,
            step * trainer * fixed,
            max_staleness=staleness,
            resources=Resources(on, off),
        )
    )
    assert advice is not None and str(advice)
    assert advice.nothing == (advice.step_s is None)
    if advice.trainer is not None:
        assert advice.trainer >= 1 and advice.generators >= 1 and advice.trainer + advice.generators == on + off
    assert advice.max_staleness is None or advice.max_staleness > staleness
    assert advice.groups_per_step is None or 8 < advice.groups_per_step <= 32
    assert advice.step_s is None or advice.step_s <= step * (1 + 1e-9)
    assert advice.idle_trainer == pytest.approx(1 - trainer)
