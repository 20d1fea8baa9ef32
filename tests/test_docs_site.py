"""The documentation as a site: built without a warning, whole by itself, and every link in it leads somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from tests.pages import PAGES, ROOT

LOADED = {"link": "href", "script": "src", "img": "src", "source": "src", "iframe": "src"}
"""What a browser fetches to show a page."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``make site`` builds."""
    folder = tmp_path_factory.mktemp("site")
    makefile = (ROOT / "Makefile").read_text()
    (line,) = re.findall(r"^\t@\$\(BIN\)/python -m (sphinx .*) docs out/site$", makefile, re.M)
    options = line.replace("out/doctrees", str(folder / "doctrees")).split()
    command = [sys.executable, "-m", *options, "docs", str(folder / "html")]
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    result = subprocess.run(command, cwd=ROOT, env=environ, text=True, capture_output=True, timeout=240)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "WARNING" not in result.stderr
    return folder / "html"


class Page(HTMLParser):
    """Where a page's links lead, what it loads, and what in it can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.anchors.add(str(given["id"]))
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        if tag in LOADED and given.get(LOADED[tag]) and given.get("rel") not in ("index", "search", "next", "prev"):
            self.loaded.append(str(given[LOADED[tag]]))


@pytest.fixture(scope="module")
def pages(built: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path) for path in built.rglob("*.html")}


def test_the_site_builds_without_a_warning(built: Path) -> None:
    assert "forge_async" in (built / "index.html").read_text()


def test_every_page_and_notebook_is_in_it_and_can_be_reached(built: Path, pages: dict[Path, Page]) -> None:
    sources = [*PAGES[1:], *sorted((ROOT / "docs/notebooks").glob("*.ipynb"))]
    wanted = {(built / path.relative_to(ROOT / "docs")).with_suffix(".html").resolve() for path in sources}
    assert wanted <= set(pages)
    front = built.resolve() / "index.html"
    seen = {front} | {(front.parent / urlsplit(link).path).resolve() for link in pages[front].links}
    assert wanted - seen == set(), "the front page's contents name them all"


def test_every_link_leads_to_a_page_and_a_place_in_it(pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        for link in {*page.links, *page.loaded}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link == "#":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() or (parts.fragment and target in pages and not has(pages[target], parts.fragment)):
                broken.append(f"{path.name}: {link}")
    assert broken == []


def has(page: Page, fragment: str) -> bool:
    return unquote(fragment) in page.anchors


def test_nothing_is_loaded_from_elsewhere(built: Path, pages: dict[Path, Page]) -> None:
    outside = [f"{path.name}: {address}" for path, page in pages.items() for address in page.loaded if "//" in address]
    assert outside == []
    for style in built.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text()), style.name


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("run", ["forge_async.launch", "Run.step", "PolicyControl.generate", "forge_async.doctor.examine"]),
        ("records", ["forge_async.types.Completion.policy_versions"]),
        ("rollout", ["Environment.session", "Session.reply", "forge_async.rollout.rewards.exact_match"]),
        ("buffer", ["RolloutBuffer", "forge_async.buffer.Ledger"]),
        ("policy", ["PolicyActor.generate"]),
        (
            "trainer",
            ["TrainerActor.step", "forge_async.trainer.advantages.advantages", "forge_async.trainer.loss.policy_loss"],
        ),
        ("store", ["forge_async.store.WeightStore"]),
        ("configuration", ["forge_async.config.load_config", "forge_async.errors.ConfigError"]),
    ],
)
def test_the_reference_has_what_scripts_use(built: Path, pages: dict[Path, Page], page: str, names: list[str]) -> None:
    anchors = pages[(built / f"api/{page}.html").resolve()].anchors
    assert [name for name in names if not any(anchor.endswith(name) for anchor in anchors)] == []


@pytest.fixture
def narrow(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 400, "height": 800}, color_scheme="dark")
    yield context.new_page()
    context.close()


def test_it_fits_a_phone_and_is_dark_where_the_system_is(narrow: Any, built: Path) -> None:
    for name in ("index", "buffer", "configuration-reference", "api/run", "notebooks/1_drive_a_run"):
        narrow.goto((built / f"{name}.html").as_uri())
        assert narrow.evaluate("document.documentElement.scrollWidth") <= 400, name
    shade = narrow.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", shade)[:3])) < 60, shade
