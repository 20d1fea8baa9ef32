"""What is printed: one plain line per step to a file, a live view to a terminal, warnings once."""

from __future__ import annotations

import io

import pytest

from forge_async.observability import Console, StepView
from forge_async.observability.console import sparkline


def view(step: int, reward: float = 0.25, **changes: object) -> StepView:
    values: dict = dict(
        step=step,
        reward=reward,
        staleness_mean=0.5,
        staleness_max=1,
        generated_tokens_per_s=812.4,
        trained_tokens_per_s=640.0,
        buffer_ready=3,
        buffer_in_flight=8,
        idle_trainer=0.125,
        idle_generators=[0.0, None],
        step_s=1.26,
    )
    return StepView(**{**values, **changes})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_step_is_one_plain_line_in_a_file() -> None:
    file = io.StringIO()
    with Console(60, file=file) as console:
        console.phase("starting the policy")
        console.phase("starting the policy")  # said once
        console.step(view(7))
        console.step(view(8, note="skipped: no token has a loss"))
    figures = "reward 0.250  staleness 0.5 max 1  tok/s gen 812 train 640  buffer 3+8  idle trainer 12% gen 0% -  1.3 s"
    assert file.getvalue().splitlines() == [
        "starting the policy",
        f"step  7/60  {figures}",
        f"step  8/60  {figures}  skipped: no token has a loss",
    ]


def test_a_terminal_gets_the_live_view_and_is_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = Terminal()
    with Console(60, title="grpo_tiny", file=file) as console:
        console.phase("first batch")
        for step in range(1, 12):
            console.step(view(step, reward=step / 100))
        console.warn("something odd")
    text = file.getvalue()
    for expected in ("grpo_tiny", "first batch", "11/60", "0.110", "idle trainer", "3 + 8", "warning: something odd"):
        assert expected in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again


def test_an_exception_inside_leaves_the_terminal_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    file = Terminal()
    with pytest.raises(KeyboardInterrupt), Console(60, file=file) as console:
        console.step(view(1))
        raise KeyboardInterrupt
    text = file.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_switched_off_console_still_warns_once(capsys: pytest.CaptureFixture[str]) -> None:
    file = io.StringIO()
    with Console(60, enabled=False, file=file) as console:
        console.phase("starting")
        console.step(view(1))
        console.print("hello")
        console.warn("all answers were cut off: raise policy.sampling.max_tokens")
        console.warn("all answers were cut off: raise policy.sampling.max_tokens")
    assert file.getvalue() == ""
    assert capsys.readouterr().err == "warning: all answers were cut off: raise policy.sampling.max_tokens\n"


def test_brackets_in_text_are_not_markup() -> None:
    file = io.StringIO()
    with Console(1, file=file) as console:
        console.warn("rollout.rewards=[my_task:right] raised [ValueError]")
        console.print("[bold]x[/bold]")
    assert file.getvalue() == "warning: rollout.rewards=[my_task:right] raised [ValueError]\n[bold]x[/bold]\n"


def test_sparkline() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([0, 7], 10) == "▁█"
    assert sparkline([1, 1, 1], 10) == "▁▁▁"
    assert sparkline([0, 2, 6, 8], 2) == "▁█"  # means 1 and 7
    assert len(sparkline(list(range(1000)), 60)) == 60


def test_a_notebooks_cell_gets_plain_lines_though_it_says_that_it_is_a_terminal() -> None:
    class OutStream(Terminal):
        __module__ = "ipykernel.iostream"

    file = OutStream()
    with Console(60, file=file) as console:
        console.step(view(7))
    assert file.getvalue().startswith("step  7/60  reward 0.250") and "\x1b" not in file.getvalue()
