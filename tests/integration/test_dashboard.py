"""The dashboard over a real run, while it goes on and when it is over: every figure is that of the run's own files."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forge_async.dashboard.config import DashboardConfig
from forge_async.dashboard.serve import Beside, bind
from forge_async.observability.jsonl import read
from forge_async.observability.trace import write_trace
from tests.browser import figure, opened

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

STEPS = 16
"""A fast machine takes several in a second: enough that some are left when the page is asked to pause."""


@pytest.mark.timeout(600)
def test_the_page_shows_a_live_run_and_afterwards_exactly_what_its_files_say(app: Any, browser: Any) -> None:
    from playwright.sync_api import expect

    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    process = app.start(
        *(f"steps={STEPS}", "dashboard.enabled=true", f"dashboard.port={port}", "dashboard.control=true"),
        *("metrics.status_every_s=0.3", "metrics.episodes_per_step=16"),
    )
    port = app.wait_for(process, "dashboard")["port"]
    url = f"http://127.0.0.1:{port}/"
    with opened(browser, url) as page:  # from its start on, without being loaded again
        assert figure(page, "state") == "starting"
        expect(page.locator('[data-figure="state"]')).to_have_text("running", timeout=240_000)
        expect(page.locator('[data-figure="step"]')).not_to_have_text("0", timeout=60_000)
        page.get_by_role("button", name="Pause").click()
        expect(page.locator('[data-figure="state"]')).to_have_text("paused", timeout=30_000)
        paused_at = figure(page, "step")
        page.wait_for_selector(".u-over")
        page.wait_for_selector(".timeline canvas")
        page.wait_for_selector(".token")
        page.wait_for_timeout(2_500)
        assert int(figure(page, "step")) <= int(paused_at) + 1, "what was begun is ended, and no more"
        assert process.poll() is None
        page.get_by_role("button", name="Resume").click()
        expect(page.locator('[data-figure="state"]')).to_have_text("running", timeout=30_000)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert f"dashboard: {url}" in output
    folder = app.folder / "runs" / "tiny"
    asked = [(e["command"], e["outcome"]) for e in app.events() if e["kind"] == "control"]
    assert asked == [("pause", "done"), ("resume", "done")]
    spans = check_spans(folder)
    served = Beside.start(folder, DashboardConfig(port=port))
    try:
        with opened(browser, served.answer()["url"]) as page:
            check_panels(page, folder)
            check_episode(page, folder)
            assert page.locator("button", has_text="Pause").count() == 0, "without control there is none"
            for name in {span["name"] for span in spans}:
                assert page.locator(".legend", has_text=name).count() == 1
    finally:
        served.stop()


def check_spans(folder: Path) -> list[dict[str, Any]]:
    """Every actor's spans are there, and agree with the event log on what happened when."""
    spans, events = list(read(folder / "spans.jsonl")), list(read(folder / "events.jsonl"))
    kinds = Counter((span["actor"], span["lane"], span["name"]) for span in spans)
    assert kinds["trainer 0", "main", "train"] == STEPS
    assert kinds["generator 0", "main", "swap"] == kinds["generator 0", "weights", "pull"] == STEPS + 1
    assert kinds["trainer 0", "publishing", "publish"] == STEPS + 1
    assert all(kinds["trainer 0", "step", phase] >= STEPS for phase in ("data", "forward", "logprobs", "backward"))
    for expected in (("generator 0", "main", "generate"), ("rewards", "worker 0", "reward")):
        assert kinds[expected] > 0
    assert kinds["trainer 0", "main", "checkpoint"] >= 1
    swapped = {event["version"]: event for event in events if event["kind"] == "swapped"}
    published = {event["version"]: event for event in events if event["kind"] == "published"}
    for span in spans:
        version = span.get("args", {}).get("version")
        if span["name"] == "swap" and version:
            assert span["s"] * 1e3 == pytest.approx(swapped[version]["pause_ms"], abs=0.01)
            assert span["at"] <= swapped[version]["at"] + 0.01, "one clock: told after it was done"
            assert swapped[version]["at"] - span["at"] < 2.0
        if span["name"] == "publish" and span["lane"] == "publishing":
            assert span["at"] + span["s"] <= published[version]["at"] + 0.01
    by_lane: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for span in spans:
        by_lane.setdefault((span["actor"], span["lane"]), []).append(span)
    for lane, own in by_lane.items():
        if lane[0] == "rewards":
            continue  # one lane per worker, which may be asked anew before its last answer is in
        own.sort(key=lambda span: span["at"])
        for earlier, later in itertools.pairwise(own):
            assert earlier["at"] + earlier["s"] <= later["at"] + 1e-3, f"{lane}: one thing at a time"
    trace = json.loads(write_trace(folder).read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in trace) == len(spans)
    return spans


def check_panels(page: Any, folder: Path) -> None:
    events, metrics = list(read(folder / "events.jsonl")), list(read(folder / "metrics.jsonl"))
    summary = json.loads((folder / "summary.json").read_text())
    last, newest = metrics[-1], {event["kind"]: event for event in events}
    assert figure(page, "state") == newest["end"]["outcome"] == "finished"
    assert figure(page, "step") == str(STEPS)
    assert figure(page, "admitted") == str(summary["ledger"]["admitted"])
    assert figure(page, "trained") == str(summary["ledger"]["trained"])
    for reason, count in summary["ledger"]["dropped"].items():
        assert figure(page, f"dropped-{reason}") == str(count)
    assert figure(page, "replica-0-version") == f"v{newest['swapped']['version']}"
    assert figure(page, "replica-0-swaps").startswith(f"{summary['swaps']} ·")
    assert figure(page, "trainer-version") == f"v{newest['published']['version']}"
    assert figure(page, "digest") == newest["published"]["digest"][:8]
    assert figure(page, "buffer-ready") == str(last["buffer/ready"])
    assert figure(page, "buffer-in-flight") == str(last["buffer/in_flight"])
    for name, share in (("trainer-idle", last["idle/trainer"]), ("replica-0-idle", last["idle/generator_0"])):
        assert figure(page, name) == f"{int(100 * share + 0.5)}%"
    page.wait_for_selector(".u-over")
    for name in ("reward", "train/loss", "train/ratio_mean", "train/ratio_max", "staleness_mean", "staleness_max"):
        shown = page.locator(f'.chart [data-figure="{name}"]').inner_text()
        assert float(shown) == pytest.approx(last[name], rel=0.06, abs=5.1e-4), name
    for name in ("tokens_per_s/generated", "tokens_per_s/trained"):
        shown = page.locator(f'.chart [data-figure="{name}"]').inner_text()
        assert float(shown.replace(",", "")) == pytest.approx(last[name], rel=1e-3, abs=1)
    assert page.locator("#events .note").first.inner_text() == f"{len(events)} in all"


def check_episode(page: Any, folder: Path) -> None:
    """Shading changes exactly where a swap happened; a token's own figures are the recorded ones."""
    from playwright.sync_api import expect

    records = list(read(folder / "episodes.jsonl"))
    assert figure(page, "episodes") == str(len(records)) == str(STEPS * 16)
    mixed = [record for record in records if record["oldest"] != record["newest"]]
    assert mixed, "no episode of this run has seen a swap"
    record = mixed[-1]
    page.get_by_label("swapped midway").check()
    expect(page.locator('[data-figure="episodes"]')).to_have_text(str(len(mixed)))
    page.locator(".list .item", has_text=record["episode_id"]).first.click()
    page.wait_for_selector(f'.reader[data-episode="{record["episode_id"]}"]')
    (turn,) = record["turns"]
    versions = [version for version, count in turn["versions"] for _ in range(count)]
    tokens = page.locator(".token")
    assert [int(v) for v in tokens.evaluate_all("all => all.map(t => t.dataset.version)")] == versions
    colours = tokens.evaluate_all("all => all.map(t => getComputedStyle(t).backgroundColor)")
    changes = [i for i in range(1, len(versions)) if versions[i] != versions[i - 1]]
    assert changes
    assert [i for i in range(1, len(colours)) if colours[i] != colours[i - 1]] == changes
    swaps = {event["version"] for event in read(folder / "events.jsonl") if event["kind"] == "swapped"}
    assert {versions[i] for i in changes} <= swaps
    assert "".join(turn["pieces"]) == turn["completion"]
    at = changes[0]
    tokens.nth(at).hover()
    logprob, trainer = turn["logprobs"][at], turn["trainer_logprobs"][at]
    assert int(page.inner_text('[data-tip="version"]')) == versions[at]
    assert float(page.inner_text('[data-tip="logprob"]')) == pytest.approx(logprob, rel=0.05, abs=1e-4)
    assert float(page.inner_text('[data-tip="ratio"]')) == pytest.approx(
        2.718281828459 ** (trainer - logprob), abs=1e-3
    )
    assert page.inner_text('[data-tip="mask"]') == "trained"
    assert float(figure(page, "episode-reward")) == pytest.approx(record["reward"], abs=1e-3)
    for earlier in mixed:  # the trainer's log-probs are of the weights before its step
        step = [r for r in records if r["step"] == earlier["step"]]
        assert all(r["turns"][0]["trainer_logprobs"] is not None for r in step)
