"""summary.json, its printed form, and the reward plot."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from forge_async.observability import MetricsConfig, MetricsLogger, Summary, plot_run
from forge_async.observability.advice import Measured, Resources, advise
from forge_async.observability.plot import read_curve, smooth


def make_summary(**changes: object) -> Summary:
    values: dict = dict(
        steps=12,
        wall_s=83.25,
        rewards=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1.0],
        swaps=24,
        swaps_in_flight=23,
        trained_tokens=9000,
        discarded_tokens=60,
        recomputed_tokens=500,
        staleness_bound=1,
        staleness_max=1,
        kv_staleness_max=3,
        staleness_histogram=[8000, 1000],
        admitted=100,
        trained=96,
        dropped={"prompt_too_long": 1, "run_ended": 3},
        requeued_requests=4,
        retried=2,
        selection_bias={"task": {"distance": 0.0, "strata": {"all": {"submitted": 100, "trained": 96, "ratio": 1.0}}}},
        idle_trainer=0.25,
        idle_generators=[0.05, 0.0],
        generated_tokens_per_s=700.0,
        trained_tokens_per_s=650.0,
        phase_s={"forward": 20.0, "backward": 30.0, "clip": 0.1},
        advice=advise(Measured(4.0, 3.9, 2.0, 0.2, 8, 1, resources=Resources(2, 4))),
    )
    return Summary(**{**values, **changes})


def test_the_file_has_exactly_the_agreed_keys(tmp_path: Path) -> None:
    make_summary().write(tmp_path / "summary.json")
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content == {
        "steps": 12,
        "wall_s": 83.25,
        "reward": {"first5": pytest.approx(0.2), "last10": pytest.approx(0.49)},
        "swaps": 24,
        "swaps_in_flight": 23,
        "aborted_by_swap": 0,
        "tokens": {"trained": 9000, "without_version": 0, "discarded": 60, "recomputed": 500},
        "staleness": {"bound": 1, "max_seen": 1, "kv_max_seen": 3, "histogram": [8000, 1000]},
        "digest_mismatches": 0,
        "ledger": {"admitted": 100, "trained": 96, "dropped": {"prompt_too_long": 1, "run_ended": 3}},
        "requeued": {"requests": 4, "prompts": 2},
        "selection_bias": {
            "task": {"distance": 0.0, "strata": {"all": {"submitted": 100, "trained": 96, "ratio": 1.0}}}
        },
        "idle_share": {"trainer": 0.25, "generators": [0.05, 0.0]},
        "tokens_per_s": {"generated": 700.0, "trained": 650.0},
        "trainer_s": {"forward": 20.0, "backward": 30.0, "clip": 0.1},
        "advice": {
            "waited": "generators",
            "idle_trainer": pytest.approx(0.025),
            "idle_generators": 0.5,
            "trainer": 3,
            "generators": 3,
            "unit": "cores",
            "groups_per_step": None,
            "max_staleness": None,
            "max_open_groups": None,
            "step_s": pytest.approx(8 / 3),
        },
    }
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_a_run_without_steps_has_a_summary() -> None:
    content = Summary(steps=0, wall_s=0.0, rewards=[]).to_dict()
    assert content["reward"] == {"first5": None, "last10": None}
    assert content["idle_share"] == {"trainer": 0.0, "generators": []}


def test_the_last_line_printed_is_the_path_unwrapped() -> None:
    file = io.StringIO()
    path = Path("/runs") / ("long_name_" * 20) / "summary.json"
    make_summary().print(path, plot=Path("runs/x/reward.png"), file=file)
    text = file.getvalue()
    assert text.endswith(f"\n{path}\n")
    for expected in (
        "backward 60%, forward 40%\n",
        "the generators waited for the trainer 50% of the time; 3 cores for the trainer and 3 for the generators",
        "0.200 (first 5 steps) → 0.571 (last 7)\n",
        "24, 23 with requests in flight\n",
    ):
        assert expected in text
    assert "DOES NOT BALANCE" not in text
    assert "without a policy version" not in text


def test_what_is_wrong_is_said() -> None:
    file = io.StringIO()
    summary = make_summary(trained=95, tokens_without_version=2)
    assert not summary.balanced
    summary.print(Path("summary.json"), file=file)
    assert "THE LEDGER DOES NOT BALANCE" in file.getvalue()
    assert "2 of 9000 without a policy version" in file.getvalue()
    still_up = make_summary(trained=95, in_flight=1)
    assert still_up.balanced and dict(still_up.lines())["prompts"].endswith("in flight: 1")
    lost = dict(make_summary(aborted_by_swap=3, digest_mismatches=1).lines())["swaps"]
    assert lost == "24, 23 with requests in flight, 3 REQUESTS LOST, 1 DIGEST MISMATCHES"


def test_first_and_last_steps_are_compared_where_they_are_others() -> None:
    def rewards(count: int) -> str:
        return dict(Summary(steps=count, wall_s=1, rewards=[float(step) for step in range(count)]).lines())["reward"]

    assert [rewards(count) for count in (0, 1, 2, 9, 10)] == [
        *("-", "0.000", "0.500 (mean of 2 steps)", "4.000 (mean of 9 steps)"),
        "2.000 (first 5 steps) → 7.000 (last 5)",
    ]
    assert rewards(80) == "2.000 (first 5 steps) → 74.500 (last 10)"


def test_a_summary_shows_itself() -> None:
    text, page = repr(make_summary()), make_summary()._repr_html_()
    assert text.startswith("summary\n") and "staleness  at most 1, bound 1" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "96 trained" in page and page.startswith("<table>")


def test_smoothing_uses_fewer_neighbours_at_the_ends() -> None:
    assert smooth([0.0, 3.0, 6.0, 0.0], 3) == [1.5, 3.0, 3.0, 3.0]


def test_the_curve_keeps_the_last_record_of_a_step(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, MetricsConfig(tensorboard=False))
    for step in (1, 2, 3):
        logger.log(step, {"reward": step / 10, "staleness_mean": 0.5, "staleness_max": 1})
    logger.log(3, {"loss": 1.0})  # not a point of the curve
    logger.close()
    resumed = MetricsLogger(tmp_path, MetricsConfig(tensorboard=False))
    resumed.log(2, {"reward": 0.9, "staleness_max": 0})
    resumed.close()
    curve = read_curve(tmp_path / "metrics.jsonl")
    assert (curve.steps, curve.reward) == ([1, 2, 3], [0.1, 0.9, 0.3])
    assert curve.staleness_max == [1, 0, 1]


def test_the_plot_is_a_picture_with_the_curve_in_it(tmp_path: Path) -> None:
    assert plot_run(tmp_path / "metrics.jsonl", tmp_path / "reward.png") is None  # nothing was logged
    logger = MetricsLogger(tmp_path, MetricsConfig(tensorboard=False))
    for step in range(1, 61):
        logger.log(step, {"reward": step / 60, "staleness_mean": 0.5, "staleness_max": 1})
    logger.close()
    path = plot_run(tmp_path / "metrics.jsonl", tmp_path / "reward.png", title="grpo_tiny", staleness_bound=1)
    assert path == tmp_path / "reward.png"

    import matplotlib.image

    image = matplotlib.image.imread(path)
    assert image.shape[1] == 1040 and image.shape[0] == 676
    green = (image[..., 1] - image[..., 0] > 0.3) & (image[..., 1] - image[..., 2] > 0.05)  # the reward's colour
    rows, columns = green.nonzero()
    left, right = rows[columns < 400].mean(), rows[(columns > 600) & (rows < 350)].mean()
    assert left > right + 80  # a rising line: further up on the right
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "reward.png"]


def test_a_run_of_one_step_can_be_drawn(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, MetricsConfig(tensorboard=False))
    logger.log(1, {"reward": 0.5})
    logger.close()
    assert plot_run(tmp_path / "metrics.jsonl", tmp_path / "reward.png") is not None
