"""A headless Chromium for the tests of the dashboard, and what they all look at."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium; where there is none, its tests are skipped."""
    if not CHROMIUM:
        pytest.skip("there is no Chromium here (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@contextmanager
def opened(
    browser: Any, url: str, width: int = 1280, height: int = 900, scheme: str = "light", may_end: bool = False
) -> Iterator[Any]:
    """A page that must log no error and ask nobody but its server, which ``may_end`` while the page is open."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    wrong: list[str] = []
    own = urlsplit(url).netloc

    def route(route: Any) -> None:
        address = urlsplit(route.request.url)
        if address.scheme in ("http", "https", "ws", "wss") and address.netloc != own:
            wrong.append(f"request to {route.request.url}")
            route.abort()
        else:
            route.continue_()

    context.route("**/*", route)
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.set_default_timeout(20_000)
    try:
        page.goto(url)
        page.wait_for_selector(".panel")
        yield page
        assert [text for text in wrong if not (may_end and "ERR_CONNECTION_" in text)] == []
    finally:
        context.close()


def figure(page: Any, name: str) -> str:
    """The text of one figure, such as ``reward``."""
    return str(page.inner_text(f'[data-figure="{name}"]')).strip()
