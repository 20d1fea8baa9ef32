"""Idle shares and rates, against hand-worked times of a clock that the test moves."""

from __future__ import annotations

import pytest

from forge_async.observability import BusyClock, IdleMeter, RateMeter


class FakeTime:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_busy_clock_splits_time() -> None:
    time = FakeTime()
    clock = BusyClock(time)
    time.now += 3  # idle
    with clock.busy():
        time.now += 2
    time.now += 1
    assert clock.read() == (2.0, 4.0)


def test_overlapping_sections_count_once_and_an_open_one_counts() -> None:
    time = FakeTime()
    clock = BusyClock(time)
    with clock.busy():
        time.now += 1
        with clock.busy():
            time.now += 1
        assert clock.read() == (2.0, 0.0)
        time.now += 1
    assert clock.read() == (3.0, 0.0)


def test_start_forgets_what_was_before() -> None:
    time = FakeTime()
    clock = BusyClock(time)
    time.now += 50
    with clock.busy():
        time.now += 5
        clock.start()
        time.now += 1
    time.now += 3
    assert clock.read() == (1.0, 3.0)


def test_a_busy_section_that_raises_ends() -> None:
    time = FakeTime()
    clock = BusyClock(time)
    with pytest.raises(RuntimeError), clock.busy():
        time.now += 1
        raise RuntimeError
    time.now += 1
    assert clock.read() == (1.0, 1.0)


def test_idle_meter_windows_and_total() -> None:
    meter = IdleMeter()
    assert meter.update("trainer", 10, 90) is None  # start-up is not counted
    assert meter.update("trainer", 13, 91) == 0.25
    assert meter.update("trainer", 14, 94) == 0.75
    assert meter.window("trainer") == 0.75
    assert meter.share("trainer") == 0.5  # busy 4, idle 4
    assert meter.share("unknown") is None
    assert meter.window("unknown") is None


def test_idle_meter_goes_on_over_a_replaced_worker() -> None:
    meter = IdleMeter()
    meter.update("generator 0", 0, 0)
    meter.update("generator 0", 6, 2)
    meter.update("generator 0", 1, 1)  # a new process: it counts from zero
    assert meter.share("generator 0") == 0.3  # busy 7, idle 3


def test_idle_meter_does_not_count_what_is_skipped() -> None:
    meter = IdleMeter()
    meter.update("g", 1.0, 1.0)
    meter.update("g", 2.0, 2.0)
    meter.skip("g", 2.5, 90.0)  # a pause
    assert meter.share("g") == meter.window("g") == 0.5
    assert meter.update("g", 5.5, 91.0) == 0.25
    assert meter.share("g") == pytest.approx(2 / 6)
    meter.skip("new", 4.0, 4.0)
    assert meter.update("new", 5.0, 4.0) == 0.0


def test_idle_meter_without_time_between_reports_keeps_its_window() -> None:
    meter = IdleMeter()
    meter.update("trainer", 0, 0)
    meter.update("trainer", 1, 3)
    assert meter.update("trainer", 1, 3) == 0.75


def test_rate_meter() -> None:
    time = FakeTime()
    meter = RateMeter(time)
    assert meter.mean() == 0.0
    assert meter.update("a", 1000) == 0.0
    time.now += 2
    assert meter.update("a", 1100) == 50.0
    assert meter.update("a", 1100) == 0.0  # no time has passed: no division by zero
    time.now += 2
    assert meter.update("a", 40) == 20.0  # replaced: counts from zero
    assert meter.total == 140
    assert meter.mean() == 35.0
