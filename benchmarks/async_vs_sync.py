"""Claim: overlapping generation and training brings the wall time close to that of the slower side alone.

``python benchmarks/async_vs_sync.py --config configs/grpo_tiny.yaml [--steps 20] [--repeats 3] [key=value ...]``

Runs one config in three ways, the same number of steps, groups and episodes, one after the other and in turns, and
compares wall times from the first admission to the last step:

* async: as the config says, trainer and generators on cores of their own;
* sync: ``buffer.max_staleness=0`` on the same cores, so that each side's cores idle while the other works;
* sync on all cores: ``buffer.max_staleness=0``, and each phase has every core this process may use.

The ideal is max(G, T) / (G + T), with G and T the busy seconds of generator and trainer in the synchronous run on its
own cores. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SYNCHRONOUS = ["buffer.max_staleness=0", "buffer.max_open_groups=null"]


def every_core() -> list[str]:
    """Settings that give each side all cores of this process."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    return [f"placement.trainer_cores=[{cores}]", f"placement.policy_cores=[{cores}]"]


def run(config: str, folder: Path, name: str, overrides: list[str]) -> dict[str, Any]:
    """One whole run; returns its summary."""
    fixed = [f"output_dir={folder}", f"name={name}", "checkpoint.export_hf=false", "metrics.plot=false"]
    command = [sys.executable, str(ROOT / "apps" / "grpo_main.py"), "--config", config, *overrides, *fixed]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print(done.stdout)
        raise SystemExit(f"the run {name} failed with exit code {done.returncode}")
    summary = json.loads(Path(done.stdout.splitlines()[-1]).read_text(encoding="utf-8"))
    print(f"{name}: {summary['steps']} steps in {summary['wall_s']:.1f} s, idle {summary['idle_share']}", flush=True)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/grpo_tiny.yaml")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--max-staleness", type=int, default=None, help="of the asynchronous run; default: the config's"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    bound = [] if options.max_staleness is None else [f"buffer.max_staleness={options.max_staleness}"]
    arms = {"sync": SYNCHRONOUS, "sync_all_cores": [*SYNCHRONOUS, *every_core()], "async": bound}
    common = [*options.overrides, f"steps={options.steps}"]
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for arm, settings in arms.items():
                runs[arm].append(run(options.config, Path(folder), f"{arm}-{repeat}", [*common, *settings]))
    sync, overlapped = runs["sync"], runs["async"]

    def ratios(baseline: str) -> list[float]:
        return [
            round(mine["wall_s"] / theirs["wall_s"], 3) for mine, theirs in zip(overlapped, runs[baseline], strict=True)
        ]

    ideals = []
    for summary in sync:
        generate = (1 - statistics.mean(summary["idle_share"]["generators"])) * summary["wall_s"]
        train = (1 - summary["idle_share"]["trainer"]) * summary["wall_s"]
        ideals.append(max(generate, train) / (generate + train))
    result = {
        "config": options.config,
        "steps": options.steps,
        "repeats": options.repeats,
        "wall_async_over_sync": statistics.median(ratios("sync")),
        "wall_async_over_sync_all_cores": statistics.median(ratios("sync_all_cores")),
        "ideal": round(statistics.median(ideals), 3),
        "each": {"sync": ratios("sync"), "sync_all_cores": ratios("sync_all_cores")},
        "wall_s": {arm: [s["wall_s"] for s in own] for arm, own in runs.items()},
        "reward_last10": {arm: [s["reward"]["last10"] for s in own] for arm, own in runs.items()},
        "staleness_max": {arm: max(s["staleness"]["max_seen"] for s in own) for arm, own in runs.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
