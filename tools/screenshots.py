"""Pictures of the dashboard for the docs, in headless Chromium.

``python tools/screenshots.py RUN [RUN] [--output docs/images]``: the first for all of the page, the second (by default
the same) for an episode in its reader.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from forge_async.dashboard.config import DashboardConfig
from forge_async.dashboard.serve import Beside


def opened(browser: Browser, url: str, width: int, height: int, scheme: str) -> Page:
    """The page with all panels filled, and an episode that has seen a swap in its reader."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        device_scale_factor=2 if width < 600 else 1,
    )
    page = context.new_page()
    page.goto(url)
    for selector in (".u-over", ".timeline canvas", ".list .item .reward"):
        page.wait_for_selector(selector)
    page.wait_for_timeout(800)
    return page


def read_longest(page: Page) -> None:
    """Open the longest of the newest episodes that have seen a swap."""
    page.get_by_label("swapped midway").check()
    page.wait_for_timeout(500)
    lengths = [int(text.replace(",", "")) for text in page.locator(".list .item .count").all_inner_texts()]
    if lengths:
        page.locator(".list .item").nth(max(range(len(lengths)), key=lengths.__getitem__)).click()
        page.wait_for_selector(".token")
        page.wait_for_timeout(500)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("reading", type=Path, nargs="?")
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("there is no Chromium here (Debian: apt-get install chromium)")
    servers = [Beside.start(run, DashboardConfig()) for run in (options.run, options.reading or options.run)]
    try:
        whole, reading = (server.answer()["url"] for server in servers)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for name, url, width, height, scheme in (
                ("desktop", whole, 1280, 1120, "light"),
                ("dark", whole, 1280, 1120, "dark"),
                ("phone", whole, 400, 860, "light"),
            ):
                page = opened(browser, url, width, height, scheme)
                page.screenshot(path=options.output / f"dashboard-{name}.png")
                page.context.close()
            page = opened(browser, reading, 1280, 900, "light")
            read_longest(page)
            page.locator("#episodes").scroll_into_view_if_needed()
            page.locator(".swap + .token").first.hover()
            page.locator("#episodes").screenshot(path=options.output / "dashboard-episodes.png")
            page.context.close()
            page = opened(browser, reading, 400, 860, "light")
            read_longest(page)
            page.evaluate("document.querySelector('#episodes').scrollIntoView()")
            page.screenshot(path=options.output / "dashboard-phone-episode.png")
            browser.close()
    finally:
        for server in servers:
            server.stop()


if __name__ == "__main__":
    main()
