"""Claim: overlapping generation and training brings the wall time close to that of the slower side alone.

``python benchmarks/async_vs_sync.py --config configs/grpo_tiny.yaml [--steps 20] [--repeats 3] [key=value ...]``

Runs one config synchronously (``buffer.max_staleness=0``) and asynchronously, the same number of steps, groups and
episodes, one after the other and in turns, and compares wall times from the first admission to the last step.
The ideal is max(G, T) / (G + T), with G and T the busy seconds of generator and trainer in the synchronous run.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


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
    common = [*options.overrides, f"steps={options.steps}"]
    sync: list[dict[str, Any]] = []
    overlapped: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            here = Path(folder)
            sync.append(
                run(
                    options.config,
                    here,
                    f"sync-{repeat}",
                    [*common, "buffer.max_staleness=0", "buffer.max_open_groups=null"],
                )
            )
            overlapped.append(run(options.config, here, f"async-{repeat}", [*common, *bound]))
    ratios = [a["wall_s"] / s["wall_s"] for a, s in zip(overlapped, sync, strict=True)]
    ideals = []
    for summary in sync:
        generate = (1 - statistics.mean(summary["idle_share"]["generators"])) * summary["wall_s"]
        train = (1 - summary["idle_share"]["trainer"]) * summary["wall_s"]
        ideals.append(max(generate, train) / (generate + train))
    result = {
        "config": options.config,
        "steps": options.steps,
        "repeats": options.repeats,
        "wall_async_over_sync": round(statistics.median(ratios), 3),
        "ideal": round(statistics.median(ideals), 3),
        "wall_async_over_sync_each": [round(ratio, 3) for ratio in ratios],
        "wall_s": {"sync": [s["wall_s"] for s in sync], "async": [s["wall_s"] for s in overlapped]},
        "reward_last10": {
            "sync": [s["reward"]["last10"] for s in sync],
            "async": [s["reward"]["last10"] for s in overlapped],
        },
        "staleness_max": {
            "sync": max(s["staleness"]["max_seen"] for s in sync),
            "async": max(s["staleness"]["max_seen"] for s in overlapped),
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
