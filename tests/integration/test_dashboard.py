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
"""A fast machine takes several in a second: enough that some are left when the page asks for a pause."""


CURVES = ("reward", "train/loss", "train/ratio_mean", "train/ratio_max", "staleness_mean", "staleness_max")


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
    folder = app.folder / "runs" / "tiny"
    with opened(browser, url, may_end=True) as page:  # from its start on, without being loaded again
        assert figure(page, "state") in ("starting", "running")
        app.wait_for(process, "step")
        page.get_by_role("button", name="Pause").click()
        expect(page.locator('[data-figure="state"]')).to_have_text("paused", timeout=60_000)
        page.wait_for_selector(".u-over")
        page.wait_for_selector(".timeline canvas")
        page.wait_for_selector(".token")
        check_live(page, folder)
        paused_at = figure(page, "step")
        page.wait_for_timeout(2_500)
        assert figure(page, "step") == paused_at, "what was begun is ended, and no more"
        assert process.poll() is None
        with page.expect_response("**/api/control/resume") as answer:
            page.get_by_role("button", name="Resume").click()
        assert answer.value.json() == {"outcome": "done"}
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert f"dashboard: {url}" in output
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


def check_live(page: Any, folder: Path) -> None:
    """While the run rests: what every panel shows is what the files say, within one look and one question."""
    differing: dict[str, tuple[str, Any]] = {}
    for _ in range(60):
        differing = {
            name: (shown, told)
            for name, told in told_live(folder).items()
            if not agrees(shown := text(page, name), told)
        }
        if not differing:
            return
        page.wait_for_timeout(500)
    raise AssertionError(f"shown and told: {differing}")


def text(page: Any, name: str) -> str:
    found = page.locator(f'[data-figure="{name}"]')
    return str(found.first.inner_text()).strip() if found.count() else ""


def agrees(shown: str, told: str | tuple[float, int]) -> bool:
    """Whether a text is ``told``: exactly, or as a number to so many digits (small ones have two in all)."""
    if isinstance(told, str):
        return " ".join(shown.split()) == told
    value, digits = told
    try:
        number = float(shown.removesuffix(" tok/s").replace(",", ""))
    except ValueError:
        return False
    return abs(number - value) <= (0.06 * abs(value) if 0 < abs(value) < 1e-3 else 0.51 * 10**-digits)


def told_live(folder: Path) -> dict[str, str | tuple[float, int]]:
    """By figure, what the run's files say now."""
    status = json.loads((folder / "status.json").read_text())
    (replica,), (trainer,), buffer, store = (status[key] for key in ("policy", "trainer", "buffer", "store"))
    events, last = list(read(folder / "events.jsonl")), list(read(folder / "metrics.jsonl"))[-1]
    newest = {event["kind"]: event for event in events}

    def percent(share: float) -> str:
        return f"{int(100 * share + 0.5)}%"

    counts: dict[str, float] = {
        "step": last["step"],
        "admitted": status["ledger"]["admitted"],
        "trained": status["ledger"]["trained"],
        "replica-0-rate": replica["tokens_per_s"],
        "replica-0-running": replica["running"],
        "replica-0-queued": replica["waiting"],
        "replica-0-tokens": replica["generated_tokens"],
        "buffer-ready": buffer["ready"],
        "buffer-in-flight": buffer["in_flight"],
        **{f"age-{age}": sum(counts) for age, counts in buffer["ages"].items()},
        "trained-rate": last["tokens_per_s/trained"],
        "leases": store["leases"],
        "episodes": sum(1 for _ in read(folder / "episodes.jsonl")),
    }
    digits = {"reward": (last["reward"], 3), "loss": (last["train/loss"], 4), "grad-norm": (last["train/grad_norm"], 3)}
    digits |= {name: (last[name], 3) for name in CURVES}
    return {
        "state": status["state"],
        **{name: (value, 0) for name, value in counts.items()},
        **digits,
        "replica-0-version": f"v{replica['version']}",
        "replica-0-doing": replica["doing"],
        "replica-0-idle": percent(last["idle/generator_0"]),
        "workers": f"{status['rewards']['busy']} of {status['rewards']['workers']} busy",
        "uniform": percent(last["buffer/uniform"]),
        "trainer-version": f"v{newest['published']['version']}",
        "trainer-idle": percent(last["idle/trainer"]),
        "trainer-doing": trainer["doing"],
        "digest": newest["published"]["digest"][:8],
        "versions": " ".join(f"v{v}{store['readers'].get(str(v), '')}" for v in store["versions"][-6:]),
    }


def check_spans(folder: Path) -> list[dict[str, Any]]:
    """Every actor's spans are there, and agree with the event log on what happened when."""
    spans, events = list(read(folder / "spans.jsonl")), list(read(folder / "events.jsonl"))
    kinds = Counter((span["actor"], span["lane"], span["name"]) for span in spans)
    assert kinds["trainer 0", "main", "train"] == STEPS
    swaps = kinds["generator 0", "main", "swap"]
    assert 2 <= swaps == kinds["generator 0", "weights", "pull"] <= STEPS + 1, "of several versions the newest counts"
    assert kinds["trainer 0", "publishing", "publish"] == STEPS + 1
    assert all(kinds["trainer 0", "step", phase] >= STEPS for phase in ("data", "forward", "logprobs", "backward"))
    for expected in (("generator 0", "main", "generate"), ("rewards", "worker 0", "reward")):
        assert kinds[expected] > 0
    assert kinds["trainer 0", "main", "checkpoint"] >= 1
    swapped = {event["version"]: event for event in events if event["kind"] == "swapped"}
    published = {event["version"]: event for event in events if event["kind"] == "published"}
    assert set(swapped) <= {s["args"]["version"] for s in spans if s["name"] == "swap" and s["actor"] == "generator 0"}
    for span in spans:
        version = span.get("args", {}).get("version")
        if span["name"] == "swap" and version in swapped:
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
    for name in CURVES:
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
