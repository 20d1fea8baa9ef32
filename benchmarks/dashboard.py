"""Claim: the dashboard opens a run of any size at once, and a run that is watched is as fast as one that is not.

``python benchmarks/dashboard.py [--only open|cost|monarch] [--config configs/grpo_tiny.yaml] [--seconds 480]
[key=value ...]``

*open*: a made-up folder with 100,000 episodes and 10,000 steps. Seconds from asking for a page until every panel has
its figures, of a server that has just begun to listen, and once more; then the time between frames
while the list of episodes is scrolled over all of its length, beside that of the same motion over its first rows.

*cost*: one run whose completions all have one length, in turns watched and not, some steps each, in pairs whose order
alternates. Watched over not, as the trimmed mean of the pairs' log quotients with its standard error: tokens trained
per second; tokens generated per second, the same in the long run, but counted token by token instead of in steps; and
processor time of all processes per token. Then the processor time that watching takes, by part. Watched is metrics,
TensorBoard, recorded episodes, a look at all actors, and an open page; not watched is none of them. In both the event
log and the schedule are written, actors note what they do, and the server is there, asked by nobody. The page is a
process that asks the server for what the page's code asks for, at the same times, with all panels in sight; its own
work counts as part of the cost, though a browser is on another machine, or would be there anyway.

*monarch*: four runs, without ``dashboard.monarch``, twice with it, and without: the same quotients, with over without.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

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

KEYS = quote(",".join(DRAWN), safe="")
PAGE_S = 2.0
"""As LIVE_MS in ``static/app.js``."""

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


class Page:
    """What an open page asks for with all panels in sight: the state, and every second time new spans and episodes."""

    def __init__(self, url: str) -> None:
        self._web = http.client.HTTPConnection(url, timeout=10)
        self._had = f"keys={KEYS}"
        self._size = self._count = self._spans = None
        self._times = 0

    def ask(self) -> None:
        state = self._get(f"api/state?{self._had}")
        metrics, events, episodes = state["metrics"], state["events"], state["episodes"]
        self._had = f"row={metrics['row'] + len(metrics['steps'])}&generation={metrics['generation']}&keys={KEYS}"
        self._had += f"&event={events['count']}&events={events['generation']}"
        self._times += 1
        if self._times % 2:
            return
        if state["spans"] != self._size:
            self._size, has = state["spans"], self._spans
            more = f"&after={has['count']}&generation={has['generation']}" if has and has.get("count") else ""
            self._spans = self._get(f"api/timeline?pixels=1000{more}")
        if episodes != self._count:
            self._count = episodes
            self._get("api/episodes?start=0&count=50&order=newest&mixed=0")

    def _get(self, path: str) -> Any:
        try:
            self._web.request("GET", f"/{path}")
            return json.loads(self._web.getresponse().read())
        except (http.client.RemoteDisconnected, ConnectionResetError):  # it was quiet for long
            self._web.close()
            return self._get(path)


def view(url: str) -> None:
    """The process of a page: it asks while the last line of standard input is "on"."""
    page, asking = Page(url), False

    def listen() -> None:
        nonlocal asking
        for line in sys.stdin:
            asking = line == "on\n"
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        time.sleep(PAGE_S)
        if asking:
            page.ask()


class Watching:
    """Everything that watching a run takes, on or off: recording, a look at all actors, an open page."""

    def __init__(self, run: Run, port: int) -> None:
        self.run, self.on = run, False
        self._every_s, self._per_step = run.config.metrics.status_every_s, run.config.metrics.episodes_per_step
        command = [sys.executable, __file__, "--view", f"127.0.0.1:{port}"]
        self._page = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert run.parts.monitor._watching is not None
        run.parts.monitor._watching.cancel()
        run.parts.monitor._watching = asyncio.create_task(self._look())
        self.switch(True)

    async def _look(self) -> None:
        """As the monitor does, but the clock goes on while nobody watches: a block has its share of looks."""
        while True:
            await asyncio.sleep(self._every_s)
            if self.on:
                await self.run.parts.monitor.look()

    def switch(self, on: bool) -> None:
        self.on = on
        self.run.parts.recording._recorder._per_step = self._per_step if on else 0
        assert self._page.stdin is not None
        self._page.stdin.write("on\n" if on else "off\n")
        self._page.stdin.flush()

    def stop(self) -> None:
        self._page.kill()
        self._page.wait()


def seconds_of(pid: int, thread: int | None = None) -> float:
    """Processor time of a process, or of one of its threads, to the nanosecond."""
    paths = Path(f"/proc/{pid}/task").glob(f"{thread or '*'}/schedstat")
    return sum(int(path.read_text().split()[0]) for path in paths) / 1e9


def middle(values: list[float], share: float = 0.2) -> tuple[float, float]:
    """Trimmed mean, without ``share`` of the values at each end, and its standard error (Tukey and McLaughlin 1963)."""
    ordered, cut = sorted(values), int(share * len(values))
    low, high = ordered[cut], ordered[len(values) - cut - 1]
    error = statistics.stdev(min(max(value, low), high) for value in values)
    return statistics.mean(ordered[cut : len(values) - cut]), error / ((1 - 2 * share) * math.sqrt(len(values)))


def resolved(config_path: str, folder: Path, overrides: list[str]) -> Config:
    """The config with completions of one length each, so that steps are alike."""
    alike = ["policy.sampling.ignore_eos=true", "checkpoint.export_hf=false", "metrics.console=false"]
    fixed = [f"output_dir={folder}", "steps=1000000", "metrics.plot=false", "dashboard.enabled=true"]
    return load_config(config_path, [*alike, *overrides, *fixed])


class Meter:
    """What a run has done and used so far; one reading and the next make figures."""

    FIGURES = ("trained tokens/s", "generated tokens/s", "processor time per token")

    def __init__(self, run: Run) -> None:
        self.run, self.trained = run, 0
        self._everyone = [psutil.Process(), *psutil.Process().children(recursive=True)]

    async def read(self) -> tuple[float, int, int, float]:
        """(Seconds, tokens trained, tokens generated as of now, processor seconds of all processes)."""
        await self.run.parts.recording.look(self.run.engines.policy)
        generated = sum(status["generated_tokens"] for status in self.run.parts.recording.replicas.values())
        used = sum(sum(process.cpu_times()[:2]) for process in self._everyone)
        return time.monotonic(), self.trained, generated, used

    @classmethod
    def figures(cls, before: tuple[float, ...], after: tuple[float, ...]) -> dict[str, float]:
        seconds, trained, generated, used = (b - a for a, b in zip(before, after, strict=True))
        return dict(zip(cls.FIGURES, (trained / seconds, generated / seconds, used / generated), strict=True))


def told(name: str, what: str, mean: float, error: float) -> dict[str, float]:
    """One quotient, printed, out of its logarithm."""
    print(f"{name + ', ' + what:60}{math.exp(mean):.4f} +- {error:.4f}")
    return {"quotient": round(math.exp(mean), 4), "standard_error": round(error, 4)}


async def costing(config_path: str, folder: Path, seconds: float, block: int, overrides: list[str]) -> dict[str, Any]:
    config = resolved(config_path, folder, overrides)
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    recording = server = watched_s = 0.0
    async with launch(config) as run:
        page = run.parts.monitor._page
        assert page is not None
        await asyncio.gather(*run.parts.monitor._tasks)  # until the page is there
        event = next(e for e in map(json.loads, run.folder.events.read_text().splitlines()) if e["kind"] == "dashboard")
        watching = Watching(run, event["port"])
        writer = next(t.native_id for t in threading.enumerate() if type(t).__name__ == "_AsyncWriterThread")
        meter, ended, order = Meter(run), time.monotonic() + seconds, [True] * 3  # after the first, to warm up
        done, steps, before = -4, 0, await meter.read()
        threads = seconds_of(os.getpid(), writer), seconds_of(page.process.pid)
        try:
            async for step in run.steps():
                if watching.on:
                    at = time.thread_time()
                    run.log(step)
                    recording += time.thread_time() - at if done >= 0 else 0.0
                meter.trained, steps = meter.trained + int(step.stats.trained_tokens), steps + 1
                if steps % block:
                    continue
                now, on = await meter.read(), watching.on
                if done >= 0:
                    found[on].append(Meter.figures(before, now))
                    if on:
                        watched_s += now[0] - before[0]
                        recording += seconds_of(os.getpid(), writer) - threads[0]
                        server += seconds_of(page.process.pid) - threads[1]
                done, before = done + 1, now
                if not order:
                    if time.monotonic() > ended:
                        break
                    order = [True, False] if done % 4 == 0 else [False, True]
                watching.switch(order.pop(0))
                threads = seconds_of(os.getpid(), writer), seconds_of(page.process.pid)
            watching.on = False
            looks = []
            for _ in range(20):
                await asyncio.sleep(0.5)
                looked = time.process_time()
                await run.parts.monitor.look()
                looks.append(time.process_time() - looked)
        finally:
            watching.stop()
        await run.stop(save=False)
    looking = statistics.median(looks) / config.metrics.status_every_s
    shares = {"recording": recording / watched_s, "looking": looking, "server": server / watched_s}
    pairs = list(zip(found[True], found[False], strict=True))
    medians = (statistics.median(each["trained tokens/s"] for each in found[on]) for on in (True, False))
    print("\ntrained tokens/s: watched {:.1f}, not {:.1f}".format(*medians))
    print(f"{len(pairs)} pairs of {block} steps each")
    result: dict[str, Any] = {"pairs": len(pairs), "steps_per_block": block, "cpu_share": shares}
    for name in Meter.FIGURES:
        result[name] = told(name, "watched / not", *middle([math.log(a[name] / b[name]) for a, b in pairs]))
    for name, share in shares.items():
        print(f"{'processor time of ' + name:60}{share:.2%} of one core")
    return result


async def with_monarchs(
    config_path: str, folder: Path, seconds: float, block: int, overrides: list[str]
) -> dict[str, Any]:
    """Runs with Monarch's own page and without, by turns: it cannot be switched within one."""
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for on in (False, True, True, False):
        config = resolved(config_path, folder, [*overrides, f"dashboard.monarch={str(on).lower()}"])
        async with launch(config) as run:
            meter, ended, done, steps = Meter(run), time.monotonic() + seconds / 4, -2, 0
            before = await meter.read()
            async for step in run.steps():
                run.log(step)
                meter.trained, steps = meter.trained + int(step.stats.trained_tokens), steps + 1
                if steps % block:
                    continue
                now = await meter.read()
                if done >= 0:
                    found[on].append(Meter.figures(before, now))
                done, before = done + 1, now
                if now[0] > ended:
                    break
            await run.stop(save=False)
    result: dict[str, Any] = {"blocks": sum(map(len, found.values())), "steps_per_block": block}
    print(f"\n{result['blocks']} blocks of {block} steps each")
    for name in Meter.FIGURES:
        (a, a_error), (b, b_error) = (middle([math.log(each[name]) for each in found[on]]) for on in (True, False))
        result[name] = told(name, "with Monarch's page / without", a - b, math.hypot(a_error, b_error))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("open", "cost", "monarch"))
    parser.add_argument("--view", metavar="HOST:PORT", help=argparse.SUPPRESS)
    parser.add_argument("--config", default="configs/grpo_tiny.yaml")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where the made-up run is kept from one call to the next")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=480, help="of training")
    parser.add_argument("--block", type=int, default=4, help="steps of half a pair")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    if options.view:
        view(options.view)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.only in (None, "open"):
            result["open"] = opening(
                options.folder or Path(folder) / "made_up", options.steps, options.episodes, options.repeats
            )
        training = (options.config, Path(folder), options.seconds, options.block, options.overrides)
        if options.only in (None, "cost"):
            result["cost"] = asyncio.run(costing(*training))
        if options.only in (None, "monarch"):
            result["monarch"] = asyncio.run(with_monarchs(*training))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
