"""The page of a run that goes on, acted out by writing its files."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from benchmarks.dashboard import Page
from forge_async.dashboard.config import DashboardConfig
from forge_async.dashboard.serve import Beside, bind
from forge_async.observability.run_folder import RunPaths
from forge_async.testing.run_folder import write_run
from tests.browser import figure, opened

pytestmark = pytest.mark.timeout(120)

STATUS: dict[str, Any] = {
    "state": "running",
    "policy": [
        {
            "replica": 0,
            "state": "healthy",
            "version": 7,
            "tokens_per_s": 123.4,
            "running": 3,
            "waiting": 2,
            "idle": 0.25,
        },
        {"replica": 1, "state": "starting", "respawns": 1},
    ],
    "trainer": [{"rank": 0, "state": "silent", "cause": "no answer"}],
    "store": {"state": "silent", "cause": "no answer"},
    "buffer": {"ages": {"0": [2, 1], "2": [0, 4]}, "open": 7, "capacity": 9, "ready": 2, "in_flight": 5},
}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[RunPaths, str, list[dict[str, Any]]]]:
    """A run of 150 steps that has no metrics and goes on, its page's address, and its episodes."""
    paths = write_run(tmp_path / "live", steps=150)
    paths.metrics.unlink()
    with paths.config.open("a") as config:
        config.write("metrics: {status_every_s: 0}\n")  # however slow the machine, it is not taken for killed
    add(paths.events, kind="start", at=time.time() - 50)
    for replica in (0, 1):
        add(paths.events, kind="swapped", replica=replica, version=5, pause_ms=1.0, at=time.time())
    add(paths.events, kind="ready", at=time.time())
    paths.status.write_text(json.dumps(STATUS | {"at": time.time()}))
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    server = Beside.start(paths.path, DashboardConfig(port=port))
    try:
        yield paths, server.answer()["url"], [json.loads(line) for line in paths.episodes.read_text().splitlines()]
    finally:
        server.stop()


def add(path: Path, **record: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_every_mesh_tells_how_it_is_and_the_last_spans_come_with_the_end(browser: Any, run: Any) -> None:
    paths, url, records = run
    with opened(browser, url) as page:
        assert figure(page, "replica-0-version") == "v7", "a respawned one has taken it without a swap that was told"
        assert figure(page, "replica-0-rate") == "123"
        assert (figure(page, "replica-0-queued"), figure(page, "replica-0-idle")) == ("2", "25%")
        assert page.locator('[data-replica="1"] .line').inner_text().split() == ["replica", "1", "–", "starting"]
        assert (figure(page, "trainer-doing"), figure(page, "store-doing")) == ("silent", "silent")
        assert page.locator('[data-figure="trainer-doing"]').get_attribute("title") == "no answer"
        ages = page.locator(".age .sum").all_inner_texts()
        assert (ages, figure(page, "buffer-ready"), figure(page, "buffer-in-flight")) == (["3", "0", "4"], "2", "5")
        expect(page.locator('[data-figure="episodes"]')).to_have_text("600")
        add(paths.episodes, **records[-1] | {"step": 151, "episode_id": "the newest"})
        expect(page.locator(".list .item", has_text="the newest")).to_be_visible(timeout=10_000)
        store = {"versions": [5, 7], "readers": {"5": 2}, "leases": 2, "pending": [8]}
        paths.status.write_text(json.dumps(STATUS | {"at": time.time(), "store": store, "buffer": {"ages": {"0": 3}}}))
        expect(page.locator("#pipeline")).to_contain_text("This panel cannot be drawn")
        assert page.locator(".token").count() > 0, "the others can"
        paths.status.write_text(json.dumps(STATUS | {"at": time.time(), "store": store}))
        expect(page.locator('[data-figure="store-doing"]')).to_have_text("writing v8")
        chips = page.locator('[data-figure="versions"] .chip').evaluate_all("all => all.map(c => ({...c.dataset}))")
        assert chips == [{"version": "5", "leases": "2"}, {"version": "7", "leases": "0"}]
        page.locator("#timeline").scroll_into_view_if_needed()
        with page.expect_response("**/api/timeline*&after=*") as added:
            add(paths.spans, actor="trainer 0", lane="main", name="clip", at=time.time(), s=0.5)
        assert sum(len(lane["spans"]) for lane in added.value.json()["lanes"]) == 1, "only what is new"
        expect(page.locator(".legend", has_text="clip")).to_contain_text("publish")
        add(paths.spans, actor="trainer 0", lane="main", name="checkpoint", at=time.time(), s=0.5)
        add(paths.events, kind="end", outcome="finished", at=time.time())
        expect(page.locator(".legend", has_text="checkpoint")).to_be_visible(timeout=10_000)
        expect(page.locator('[data-figure="state"]')).to_have_text("finished")
        assert page.locator('[data-figure="replica-0-rate"]').count() == 0, "that was then"


def test_rows_that_come_while_one_scrolls_double_none_and_a_page_that_failed_is_asked_again(
    browser: Any, run: Any
) -> None:
    paths, url, records = run
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    refused = []

    def refuse_once(route: Any) -> None:
        if refused:
            route.continue_()
        else:
            refused.append(route.request.url)
            route.fulfill(status=503, json={"error": "busy"})

    page.route("**/api/episodes?start=400*", refuse_once)
    page.goto(url)
    page.wait_for_selector(".token")
    page.route("**/api/state*", lambda route: route.abort())  # from now on it knows of no new ones
    for number in range(4):
        add(paths.episodes, **records[0] | {"step": 151, "episode_id": f"new {number}"})
    for first in (195, 405):
        page.evaluate("at => document.querySelector('.list').scrollTop = 40 * at", first)
        wanted = [records[599 - i]["episode_id"] for i in range(first, first + 12)]
        for episode_id in wanted:
            expect(page.locator(".list .item .id").get_by_text(episode_id, exact=True)).to_have_count(1)
    assert len(refused) == 1
    page.context.close()


def test_the_benchmarks_page_asks_what_a_page_asks(browser: Any, run: Any) -> None:
    paths, url, records = run
    asked: dict[str, list[str]] = {"page": [], "benchmark": []}

    def grow(number: int) -> None:
        add(paths.episodes, **records[0] | {"step": 151 + number})
        add(paths.spans, actor="trainer 0", lane="main", name="train", at=time.time(), s=0.5)

    with opened(browser, url, height=4000) as page:
        page.wait_for_selector(".token")
        page.on("request", lambda request: asked["page"].append(request.url.removeprefix(url)))
        for number in range(5):
            with page.expect_response("**/api/state*"):
                grow(number)
    mine = Page(urlsplit(url).netloc)
    ask = mine._get
    mine.ask()
    mine.ask()
    mine._get = lambda path: asked["benchmark"].append(path) or ask(path)  # type: ignore[method-assign,func-returns-value]
    for number in range(2):
        grow(number)
        mine.ask()
    page_asked, own = ({re.sub(r"=\d+", "=N", path) for path in paths} for paths in asked.values())
    assert page_asked == own and len(own) == 3


def test_the_time_of_a_silent_run_stands_still(browser: Any, tmp_path: Path) -> None:
    at = time.time() - 5000
    paths = RunPaths(tmp_path)
    add(paths.events, kind="start", at=at)
    add(paths.events, kind="ready", at=at + 61)
    server = Beside.start(tmp_path, DashboardConfig())
    try:
        with opened(browser, server.answer()["url"]) as page:
            assert (figure(page, "state"), figure(page, "duration")) == ("silent", "1 min 1 s")
    finally:
        server.stop()


def test_a_page_left_open_shows_nothing_but_the_run_that_is_served_now(browser: Any, tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / f"of {steps}", steps=steps).path for steps in (30, 5))
    with bind("127.0.0.1", 0) as free:
        config = DashboardConfig(port=free.getsockname()[1])
    server = Beside.start(first, config)
    try:
        with opened(browser, server.answer()["url"], may_end=True) as page:
            assert figure(page, "episodes") == "120"
            page.wait_for_selector(".tokens")  # else it may ask the other run for this one's last episode
            server.stop()
            server = Beside.start(second, config)
            server.answer()
            page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # it asks at once
            expect(page.locator('[data-figure="episodes"]')).to_have_text("20")
            expect(page.locator("h1")).to_contain_text("of 5")
    finally:
        server.stop()
