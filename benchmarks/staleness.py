"""Claim: with corrections, an aggressively asynchronous run learns as much from its samples as a synchronous one.

``python benchmarks/staleness.py [--config configs/grpo_tiny.yaml] [--steps 80] [--seeds 0 1 2] [--rates 3e-4]
[--arms synchronous corrected uncorrected] [--folder FOLDER] [--plot FILE.png] [key=value ...]``

Runs one config with the same number of steps, groups and episodes, for each learning rate and seed in these arms:

* synchronous: ``buffer.max_staleness=0``, every token is on-policy;
* corrected: ``buffer.max_staleness=4`` with as many open prompts as it allows, so that the trained tokens are about
  four versions old; decoupled PPO with truncated weights (docs/losses.md);
* uncorrected: the same staleness and the plain policy gradient, as if the tokens were on-policy;
* clipped, where asked for: the same with the config's own loss, whose ratio and clip are taken against the sampler.

On fresh tokens the gradients of all four are the same. In all of them the engine decodes every open request at once, so
that training, not generation, is the slower side, and samples are as stale as the bound lets them be. The reward of a
step is that of the batch it trains: in an asynchronous run, of policies some versions old. ``--folder`` keeps what was
measured, and does not run it again. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from forge_async.config import Config, load_config
from forge_async.observability.jsonl import read
from forge_async.observability.plot import smooth

ROOT = Path(__file__).resolve().parent.parent
AT_ONCE = "policy.max_num_seqs=256"
STALE = ("buffer.max_staleness=4", "buffer.max_open_groups=null")
CORRECTED = ("trainer.loss.correction.proximal=recompute", "trainer.loss.correction.importance=truncate")
UNCORRECTED = ("trainer.loss.surrogate=policy_gradient", "trainer.loss.correction.importance=none")
ARMS = {
    "synchronous": ("buffer.max_staleness=0", "buffer.max_open_groups=null"),
    "corrected": (*STALE, *CORRECTED),
    "clipped": STALE,
    "uncorrected": (*STALE, *UNCORRECTED),
}
COLOURS = {"synchronous": "#555555", "corrected": "#1b7f5c", "clipped": "#3c6fb4", "uncorrected": "#b03a48"}


@dataclass(frozen=True)
class Run:
    """What is compared of one run; sequences have one entry per step."""

    arm: str
    rate: str
    seed: int
    rewards: list[float]
    """Mean over the episodes that are trained."""
    staleness: list[float]
    """Mean over the trained tokens, versions."""
    staleness_max: int
    ratio_max: list[float]
    sample_share: list[float]
    """Effective sample size."""
    wall_s: float

    @property
    def last10(self) -> float:
        return mean(self.rewards[-10:])

    @property
    def area(self) -> float:
        """Under the curve, per sample: the mean reward of all samples."""
        return mean(self.rewards)


def measure(options: argparse.Namespace, folder: Path, arm: str, rate: str, seed: int) -> Run:
    """One whole run, or its record in ``folder``."""
    name = f"{arm}-{rate}-{seed}"
    record = folder / f"{name}.json"
    settings = [f"steps={options.steps}", f"seed={seed}", f"trainer.optimizer.lr={rate}"]
    what = ["--config", options.config, AT_ONCE, *options.overrides, *ARMS[arm], *settings]
    if not record.exists():
        quiet = [f"name={name}", f"output_dir={folder / 'runs'}", "checkpoint.export_hf=false", "metrics.plot=false"]
        command = [sys.executable, str(ROOT / "apps" / "grpo_main.py"), *what, *quiet]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(done.stdout)
            raise SystemExit(f"the run {name} failed with exit code {done.returncode}")
        path = Path(done.stdout.splitlines()[-1])
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        rows = list(read(path.parent / "metrics.jsonl"))
        made = Run(
            arm,
            rate,
            seed,
            [row["reward"] for row in rows],
            [row["staleness_mean"] for row in rows],
            summary["staleness"]["max_seen"],
            [row["train/ratio_max"] for row in rows],
            [row["train/effective_sample_size"] for row in rows],
            summary["wall_s"],
        )
        record.write_text(json.dumps({"of": what, "run": asdict(made)}), encoding="utf-8")
    recorded = json.loads(record.read_text(encoding="utf-8"))
    if recorded["of"] != what:
        raise SystemExit(f"{record} is of {' '.join(recorded['of'])}: give another --folder")
    run = Run(**recorded["run"])
    print(f"{name}: reward {run.last10:.3f}, area {run.area:.3f}, {run.wall_s:.0f} s", flush=True)
    return run


def figures(runs: list[Run]) -> dict[str, Any]:
    """What is said of one arm at one learning rate, over its seeds."""
    settled = [value for run in runs for value in run.staleness[10:] or run.staleness]
    return {
        "last10": round(mean(run.last10 for run in runs), 4),
        "last10_each": [round(run.last10, 4) for run in runs],
        "area": round(mean(run.area for run in runs), 4),
        "area_each": [round(run.area, 4) for run in runs],
        "staleness_mean": round(mean(settled), 2),  # without the first ten steps, before which there is nothing older
        "staleness_max": max(run.staleness_max for run in runs),
        "ratio_max": round(max(max(run.ratio_max) for run in runs), 2),
        "effective_sample_size": round(mean(value for run in runs for value in run.sample_share), 3),
        "effective_sample_size_min": round(min(min(run.sample_share) for run in runs), 3),
    }


def draw(runs: list[Run], samples: int, path: Path) -> None:
    """Reward against samples, a panel per learning rate: the mean of each arm's seeds, and each seed thinly."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rates = list(dict.fromkeys(run.rate for run in runs))
    figure = Figure(figsize=(4.6 * len(rates) + 0.6, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axis, rate in zip(figure.subplots(1, len(rates), sharey=True, squeeze=False)[0], rates, strict=True):
        for arm in ARMS:
            own = [run.rewards for run in runs if (run.arm, run.rate) == (arm, rate)]
            if own:
                seen = [samples * (step + 1) for step in range(len(own[0]))]
                for rewards in own:
                    axis.plot(seen, smooth(rewards, 5), color=COLOURS[arm], alpha=0.3, linewidth=0.9)
                middle = smooth([mean(values) for values in zip(*own, strict=True)], 5)
                axis.plot(seen, middle, color=COLOURS[arm], linewidth=2.2, label=arm)
        axis.set_title(f"learning rate {rate}", loc="left", fontweight="bold")
        axis.set_xlabel("trained samples")
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="best")
    figure.axes[0].set_ylabel("mean reward (mean of 5 steps)")
    figure.savefig(path, format="png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/grpo_tiny.yaml")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", default=["3e-4"], help="learning rates")
    usual = ["synchronous", "corrected", "uncorrected"]
    parser.add_argument("--arms", nargs="+", default=usual, choices=list(ARMS))
    parser.add_argument("--folder", type=Path, help="keeps a record of each run; default: a temporary one")
    parser.add_argument("--plot", type=Path, help="draw the curves into this PNG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    config: Config = load_config(ROOT / options.config, options.overrides)
    samples = config.buffer.groups_per_step * config.rollout.group_size
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        runs = [
            measure(options, folder.resolve(), arm, rate, seed)
            for seed in options.seeds
            for rate in options.rates
            for arm in options.arms
        ]
    table: dict[str, dict[str, Any]] = {}
    print(
        f"{'rate':>7} {'arm':>12} {'last 10':>8} {'area':>6} {'staleness':>10} {'max':>4} {'ratio max':>10} {'ess':>6}"
    )
    for rate in options.rates:
        for arm in options.arms:
            found = figures([run for run in runs if (run.arm, run.rate) == (arm, rate)])
            table.setdefault(rate, {})[arm] = found
            print(
                f"{rate:>7} {arm:>12} {found['last10']:8.3f} {found['area']:6.3f} {found['staleness_mean']:10.2f} "
                f"{found['staleness_max']:4d} {found['ratio_max']:10.2f} {found['effective_sample_size']:6.3f}   "
                + " ".join(f"{value:.3f}" for value in found["last10_each"])
            )
    if options.plot:
        draw(runs, samples, options.plot)
    result: dict[str, Any] = {"config": options.config, "seeds": options.seeds, "steps": options.steps}
    result |= {"samples": samples * options.steps, "arms": table}
    if "synchronous" in options.arms:
        for key in ("last10", "area"):
            result[f"{key}_over_synchronous"] = {
                rate: {arm: round(found[key] / of["synchronous"][key], 3) for arm, found in of.items()}
                for rate, of in table.items()
            }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
