"""Claim: recording a run's schedule, which replays need, costs the run nothing that shows.

``python benchmarks/record_schedule.py [--config configs/grpo_tiny.yaml] [--steps 20] [--repeats 2] [key=value ...]``

Whole runs with and without ``metrics.record_schedule``, in turns; compares generated tokens per second and wall times
from the first admission to the last step. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from async_vs_sync import run  # type: ignore[import-not-found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/grpo_tiny.yaml")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    found: dict[str, list[dict[str, Any]]] = {"true": [], "false": []}
    written = 0
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for recorded in ("true", "false") if repeat % 2 else ("false", "true"):
                settings = [f"steps={options.steps}", f"metrics.record_schedule={recorded}"]
                name = f"recorded-{recorded}-{repeat}"
                found[recorded].append(run(options.config, Path(folder), name, [*options.overrides, *settings]))
                if recorded == "true":
                    written = sum(file.stat().st_size for file in (Path(folder) / name / "schedule").iterdir())
    generated, wall = (
        {name: [get(summary) for summary in summaries] for name, summaries in found.items()}
        for get in (lambda summary: summary["tokens_per_s"]["generated"], lambda summary: summary["wall_s"])
    )
    print(f"{'recorded':>8} {'tokens/s':>9} {'wall s':>7}   each")
    for name in found:
        each = " ".join(f"{value:.0f}" for value in generated[name])
        print(f"{name:>8} {statistics.median(generated[name]):9.1f} {statistics.median(wall[name]):7.1f}   {each}")
    result = {
        "config": options.config,
        "steps": options.steps,
        "repeats": options.repeats,
        "bytes": written,
        "generated_tokens_per_s": generated,
        "wall_s": wall,
        "recorded_over_not": round(statistics.median(generated["true"]) / statistics.median(generated["false"]), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
