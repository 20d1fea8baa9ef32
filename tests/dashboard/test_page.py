"""The page in a browser, over a made-up run; ``tests/integration/test_dashboard.py`` has a real, live one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from forge_async.dashboard.config import DashboardConfig
from forge_async.dashboard.serve import Beside, bind
from forge_async.testing.run_folder import write_run
from tests.browser import figure, opened

pytestmark = pytest.mark.timeout(120)

EPISODES = 3_000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A run of 750 steps, and the address of its page."""
    paths = write_run(tmp_path_factory.mktemp("runs") / "made_up", steps=EPISODES // 4)
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    page = Beside.start(paths.path, DashboardConfig(port=port, control=True))
    try:
        yield paths.path, page.answer()["url"]
    finally:
        page.stop()


def test_a_long_list_has_only_the_rows_in_sight(browser: Any, served: tuple[Path, str]) -> None:
    folder, url = served
    records = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    with opened(browser, url) as page:
        page.wait_for_selector(".item.chosen")
        assert figure(page, "episodes") == f"{EPISODES:,}"
        assert page.locator(".list .item").count() < 40
        for at in (1_500, 2_990):
            page.evaluate("([at]) => document.querySelector('.list').scrollTop = 40 * at", [at])
            wanted = records[EPISODES - 1 - at]
            row = page.locator(".list .item", has_text=wanted["episode_id"]).first
            row.wait_for()
            row.click()
            page.wait_for_selector(f'.reader[data-episode="{wanted["episode_id"]}"]')
            assert float(figure(page, "episode-reward")) == wanted["reward"]
            assert page.locator(".list .item").count() < 40
        page.get_by_label("swapped midway").check()
        mixed = sum(record["oldest"] != record["newest"] for record in records)
        expect(page.locator('[data-figure="episodes"]')).to_have_text(f"{mixed:,}")
        page.get_by_label("Only of this step").fill("700")
        of_step = sum(record["oldest"] != record["newest"] for record in records if record["step"] == 700)
        expect(page.locator(".list .item .step")).to_have_text(["700"] * of_step)


def test_tokens_are_shaded_by_version_log_prob_ratio_and_mask(browser: Any, served: tuple[Path, str]) -> None:
    folder, url = served
    records = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    record = next(record for record in reversed(records) if record["oldest"] != record["newest"])
    (turn,) = record["turns"]
    cut = turn["versions"][0][1]
    with opened(browser, url) as page:
        page.get_by_label("swapped midway").check()
        page.locator(".list .item", has_text=record["episode_id"]).first.click()
        page.wait_for_selector(f'.reader[data-episode="{record["episode_id"]}"]')
        versions = [int(v) for v in page.locator(".token").evaluate_all("all => all.map(t => t.dataset.version)")]
        assert versions == [version for version, count in turn["versions"] for _ in range(count)]
        assert page.locator(".swap").all_inner_texts() == [f"v{record['newest']}"]
        assert page.locator(".token").all_text_contents() == [p.replace("\n", "↵\n") for p in turn["pieces"]]

        def shades() -> list[str]:
            return page.locator(".token").evaluate_all("all => all.map(t => getComputedStyle(t).backgroundColor)")

        colours = shades()
        assert len(set(colours[:cut])) == len(set(colours[cut:])) == 1
        assert colours[0] != colours[-1]
        page.get_by_role("radio", name="mask").click()
        masked = shades()
        assert len(set(masked[:2])) == 1 and len(set(masked[2:])) == 1 and masked[0] != masked[2]
        for mode in ("log-prob", "ratio"):
            page.get_by_role("radio", name=mode).click()
            assert len(set(shades())) > 5
        page.locator('.token[data-token="3"]').hover()
        tip = {name: page.inner_text(f'[data-tip="{name}"]') for name in ("version", "logprob", "ratio", "mask")}
        logprob, trainer = turn["logprobs"][3], turn["trainer_logprobs"][3]
        assert float(tip["logprob"]) == pytest.approx(logprob, abs=1e-4)
        assert float(tip["ratio"]) == pytest.approx(2.718281828 ** (trainer - logprob), abs=1e-3)
        assert (int(tip["version"]), tip["mask"]) == (versions[3], "trained")


def settled(page: Any, canvas: Any) -> str:
    """A canvas' image, when it has not changed for half a second: until then the server's answer is being drawn."""
    image = ""
    for _ in range(40):
        before, image = image, canvas.evaluate("c => c.toDataURL()")
        if image == before:
            return image
        page.wait_for_timeout(500)
    raise AssertionError("The canvas changes without end.")


def test_the_timeline_zooms_to_single_spans(browser: Any, served: tuple[Path, str]) -> None:
    with opened(browser, served[1]) as page:
        canvas = page.locator(".timeline canvas")
        canvas.wait_for()
        note = page.locator("#timeline .note").first
        expect(note).to_have_text("12 min 29 s shown")
        with page.expect_response(lambda answer: "api/timeline" in answer.url and "start=" in answer.url):
            page.get_by_role("button", name="last 10 s").click()
        expect(note).to_have_text("10.0 s shown")
        canvas.scroll_into_view_if_needed()
        tip, box = page.locator(".tip"), canvas.bounding_box()
        for attempt in range(50):  # the spans of the new range are drawn a moment after the server's answer
            page.mouse.move(box["x"] + 116 + (box["width"] - 116) * 0.47 + attempt % 2, box["y"] + 22 + 12)
            if tip.inner_text():
                break
            page.wait_for_timeout(200)
        assert tip.inner_text().startswith("train")
        shown = settled(page, canvas)
        page.mouse.down()
        canvas.dispatch_event("pointercancel")  # as when a finger's way becomes one of the whole page
        page.mouse.move(box["x"] + 300, box["y"] + 40)
        page.wait_for_timeout(300)
        assert canvas.evaluate("c => c.toDataURL()") == shown, "nobody drags it any more"
        page.mouse.up()
        canvas.dblclick(position={"x": 400, "y": 40})
        expect(note).to_have_text("12 min 29 s shown")


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_sticks_out_at_any_width_and_dark_is_dark(browser: Any, served: tuple[Path, str], width: int) -> None:
    with opened(browser, served[1], width=width) as page:
        page.wait_for_selector(".u-over")
        page.wait_for_selector(".list .item")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        sticking = page.evaluate(
            """() => [...document.querySelectorAll('main *')].filter(e => !e.closest('.list') && !e.closest('.u-wrap')
               && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.className || e.tagName)"""
        )
        assert sticking == []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            colour = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).map(Number)")
            assert (sum(colour[:3]) < 150) == (scheme == "dark")
        if width == 400:  # the reader takes the list's place, and gives it back
            page.locator(".list .item").first.click()
            page.wait_for_selector(".tokens")
            assert not page.locator(".list").is_visible()
            page.get_by_role("button", name="← episodes").click()
            assert page.locator(".list").is_visible()


def test_a_page_without_its_token_says_what_is_missing(browser: Any, tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    server = Beside.start(tmp_path, DashboardConfig(port=port, token="sixteen-characters"))
    try:
        url = server.answer()["url"]
        context = browser.new_context()
        page = context.new_page()
        page.goto(url.partition("?")[0])
        assert page.inner_text("h1") == "A token is needed"
        page.goto(url)
        page.wait_for_selector(".panel")
        assert "token" not in page.url
        assert "There is no event in this folder" in page.inner_text(".warning")
        context.close()
        context = browser.new_context()  # of somebody who was sent the link
        page, message = context.new_page(), f'<a href="{url}">our run</a>'
        page.route("http://chat.example/", lambda route: route.fulfill(body=message, content_type="text/html"))
        page.goto("http://chat.example/")
        page.get_by_text("our run").click()
        page.wait_for_selector(".panel")
        context.close()
    finally:
        server.stop()
