"""Claim: the dashboard opens a run of any size at once, and a run that is watched is as fast as one that is not.

``python benchmarks/dashboard.py [--only open|cost] [--config configs/grpo_tiny.yaml] [--pairs 16] [key=value ...]``

*open*: a made-up folder with 100,000 episodes and 10,000 steps. Seconds from asking for a page until every panel has
its figures, of a server that has just begun to listen, and once more; then the time between frames
while the list of episodes is scrolled over all of its length, beside that of the same motion over its first rows.

*cost*: one run, in turns watched and not, some steps each: what it trains per second, in pairs of neighbours. Watched
is metrics, TensorBoard, recorded episodes, spans, status and a page that asks every two seconds; not watched is none of
them. The quotient's standard error is given, too, as are the processor seconds that watching takes, by part.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shutil
import statistics
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from forge_async.config import Config, load_config
from forge_async.dashboard.config import DashboardConfig
from forge_async.dashboard.serve import Beside
from forge_async.dashboard.view import DRAWN
from forge_async.observability.run_folder import RunPaths
from forge_async.run import Run, launch
from forge_async.testing.run_folder import write_run

EVERYTHING = (".stage", ".u-over", ".timeline canvas", ".list .item .reward", ".token", ".events li time")
"""What the panels show once they have figures."""

KEYS = ",".join(DRAWN)

SCROLL = """
([from, to, frames]) => new Promise(done => {
  const list = document.querySelector(".list"), times = [];
  let before = 0, n = 0;
  const frame = now => {
    if (before) times.push(now - before);
    before = now;
    if (n > frames) return done(times);
    list.scrollTop = from + (to - from) * (0.5 - 0.5 * Math.cos(2 * Math.PI * n++ / frames));
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})"""


def opening(folder: Path, steps: int, episodes: int, repeats: int) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    began = time.perf_counter()
    paths = RunPaths(folder)
    if not paths.episodes.exists():
        write_run(folder, steps=steps, episodes_per_step=episodes // steps)
    size = sum(path.stat().st_size for path in paths.path.iterdir())
    print(
        f"{episodes} episodes and {steps} steps, {size >> 20} MiB, in {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    found: dict[str, list[float]] = {"first": [], "again": [], "server": []}
    frames: dict[str, list[float]] = {"all": [], "near": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(repeats):
            began = time.perf_counter()
            server = Beside.start(paths.path, DashboardConfig())
            try:
                url = server.answer()["url"]
                found["server"].append(time.perf_counter() - began)
                for which in ("first", "again"):
                    context = browser.new_context(viewport={"width": 1280, "height": 900})
                    page = context.new_page()
                    began = time.perf_counter()
                    page.goto(url)
                    for selector in EVERYTHING:
                        page.locator(selector).first.wait_for(state="attached")
                    found[which].append(time.perf_counter() - began)
                    if which == "again":
                        page.locator(".list").scroll_into_view_if_needed()
                        for name, reach in (("near", 400), ("all", 40 * episodes)):
                            frames[name] += page.evaluate(SCROLL, [0, reach, 180])
                    context.close()
            finally:
                server.stop()
        browser.close()
    rows = {name: statistics.median(values) for name, values in found.items()}
    print(f"\n{'':34}{'median':>8}{'worst':>8}")
    for name, words in (
        ("server", "the server listens, s"),
        ("first", "all panels, just started, s"),
        ("again", "again, s"),
    ):
        print(f"{words:34}{rows[name]:8.2f}{max(found[name]):8.2f}")
    marks = {}
    for name, times in frames.items():
        times.sort()
        marks[name] = {"median": statistics.median(times), "p95": times[int(0.95 * len(times))], "max": times[-1]}
        mark = marks[name]
        print(
            f"{'frames, ms, scrolling ' + name:34}{mark['median']:8.1f}  p95 {mark['p95']:.1f}, max {mark['max']:.1f}"
        )
    return {
        "episodes": episodes,
        "steps": steps,
        "open_s": round(rows["first"], 3),
        "open_worst_s": round(max(found["first"]), 3),
        "again_s": round(rows["again"], 3),
        "server_s": round(rows["server"], 3),
        "frame_ms": {name: {k: round(v, 1) for k, v in mark.items()} for name, mark in marks.items()},
    }


class Viewer:
    """Asks every two seconds for what is new, as an open page does."""

    def __init__(self, url: str) -> None:
        self.url, self.watching = url, False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        had = ""
        while not self._stop.wait(2.0):
            if self.watching:
                metrics, events = (state := self._get(f"api/state?keys={KEYS}{had}"))["metrics"], state["events"]
                had = f"&row={metrics['row'] + len(metrics['steps'])}&generation={metrics['generation']}"
                had += f"&event={events['count']}&events={events['generation']}"
                self._get("api/timeline?pixels=1000")
                self._get("api/episodes?count=200")

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.loads(answer.read())

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def watch(run: Run, viewer: Viewer, on: bool, per_step: int) -> None:
    viewer.watching = on
    run.parts.recording._recorder._per_step = per_step if on else 0
    if run.parts.monitor._watching is not None:
        run.parts.monitor._watching.cancel()
    run.parts.monitor._watching = asyncio.create_task(run.parts.monitor._watch()) if on else None


async def costing(config_path: str, folder: Path, pairs: int, block: int, overrides: list[str]) -> dict[str, Any]:
    fixed = [f"output_dir={folder}", f"steps={2 * pairs * block + 2 * block}", "checkpoint.export_hf=false"]
    config: Config = load_config(config_path, [*overrides, *fixed, "dashboard.enabled=true", "metrics.console=false"])
    rates: dict[bool, list[float]] = {True: [], False: []}
    logged = 0.0
    async with launch(config) as run:
        assert run.parts.monitor._page is not None
        page = run.parts.monitor._page
        await asyncio.gather(*run.parts.monitor._tasks)  # until the page is there
        event = next(e for e in map(json.loads, run.folder.events.read_text().splitlines()) if e["kind"] == "dashboard")
        viewer, server = Viewer(f"http://127.0.0.1:{event['port']}/"), psutil.Process(page.process.pid)
        order: list[bool | None] = [None, None]  # of the blocks: two to warm up
        for pair in range(pairs):
            order += [True, False] if pair % 2 == 0 else [False, True]
        tokens, steps, began, watched_s, server_s, cpu_before = 0, 0, time.monotonic(), 0.0, 0.0, 0.0
        on = order.pop(0)
        try:
            async for step in run.steps():
                if on is not False:
                    at = time.thread_time()
                    run.log(step)
                    logged += (time.thread_time() - at) if on else 0.0
                tokens, steps = tokens + step.stats.trained_tokens, steps + 1
                if steps == block:
                    elapsed = time.monotonic() - began
                    cpu = sum(server.cpu_times()[:2])
                    if on is not None:
                        rates[on].append(tokens / elapsed)
                        watched_s += elapsed if on else 0.0
                        server_s += cpu - cpu_before if on else 0.0
                    if not order:
                        break
                    on = order.pop(0)
                    watch(run, viewer, on is not False, config.metrics.episodes_per_step)
                    cpu_before = sum(server.cpu_times()[:2])
                    tokens, steps, began = 0, 0, time.monotonic()
        finally:
            viewer.stop()
        looks = []
        for _ in range(20):
            at = time.process_time()
            await run.parts.monitor.look()
            looks.append(time.process_time() - at)
    logs = [math.log(a / b) for a, b in zip(rates[True], rates[False], strict=True)]
    mean, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    shares = {
        "logging": logged / watched_s,
        "looking": statistics.median(looks) / config.metrics.status_every_s,
        "server": server_s / watched_s,
    }
    print(
        f"\ntrained tokens/s: watched {statistics.median(rates[True]):.1f}, not {statistics.median(rates[False]):.1f}"
    )
    print(f"watched / not: {math.exp(mean):.4f} +- {error:.4f} over {len(logs)} pairs of {block} steps")
    for name, share in shares.items():
        print(f"{'processor time of ' + name:34}{share:8.2%} of one core")
    return {
        "watched_over_not": round(math.exp(mean), 4),
        "standard_error": round(error, 4),
        "pairs": len(logs),
        "steps_per_block": block,
        "cpu_share": {name: round(share, 5) for name, share in shares.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("open", "cost"))
    parser.add_argument("--config", default="configs/grpo_tiny.yaml")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where the made-up run is kept from one call to the next")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--block", type=int, default=8, help="steps of half a pair")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "cost":
            result["open"] = opening(
                options.folder or Path(folder) / "made_up", options.steps, options.episodes, options.repeats
            )
        if options.only != "open":
            result["cost"] = asyncio.run(
                costing(options.config, Path(folder), options.pairs, options.block, options.overrides)
            )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
