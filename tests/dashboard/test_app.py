"""What the dashboard answers, to whom, and what it does to a run."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from forge_async import cli
from forge_async.dashboard import serve
from forge_async.dashboard.app import make_app
from forge_async.dashboard.commands import Commands, send_command
from forge_async.dashboard.config import DashboardConfig
from forge_async.dashboard.monitor import Monitor
from forge_async.dashboard.view import RunView
from forge_async.errors import ConfigError, ForgeError
from forge_async.observability.run_folder import RunPaths
from forge_async.testing.run_folder import write_run

TOKEN = "a-token-of-sixteen+"


def client(folder: Path, base_url: str = "http://127.0.0.1:8790", **options: object) -> TestClient:
    return TestClient(make_app(RunView(folder), 8790, **options), base_url=base_url)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "made_up", steps=20).path


def test_the_page_asks_only_for_its_own_files(made_up: Path) -> None:
    web = client(made_up)
    page = web.get("/")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert "access-control-allow-origin" not in page.headers
    static = Path(serve.__file__).parent / "static"
    for name in ("app.js", "style.css", "vendor/uplot.js", "vendor/LICENSE-uplot"):
        assert web.get(f"/static/{name}").content == (static / name).read_bytes()
    own = [
        path for path in static.rglob("*.*") if path.suffix in (".js", ".css", ".html") and "vendor" not in str(path)
    ]
    assert not [path for path in own if "http://" in path.read_text() or "https://" in path.read_text()]
    assert web.get("/static/../app.py").status_code == 404


def test_the_server_is_light() -> None:
    """It starts with every run: no engine is imported for it."""
    code = "import sys, forge_async.dashboard.app as _; print({'torch', 'vllm', 'monarch', 'wandb'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_state_is_given_since_what_the_page_has(made_up: Path) -> None:
    web = client(made_up)
    first = web.get("/api/state?keys=reward,train/loss").json()
    rows = [json.loads(line) for line in (made_up / "metrics.jsonl").read_text().splitlines()]
    assert first["metrics"]["steps"] == [row["step"] for row in rows]
    assert first["metrics"]["columns"]["reward"] == pytest.approx([row["reward"] for row in rows], rel=1e-5)
    assert first["run"]["state"] == "finished"
    assert first["events"]["kinds"]["swapped"] == first["events"]["swaps"]["0"]["count"] == 20
    assert (first["config"]["steps"], first["control"]) == (20, False)
    query = f"row=18&generation={first['metrics']['generation']}&event={first['events']['count'] - 1}&keys=reward"
    then = web.get(f"/api/state?{query}").json()
    assert (then["metrics"]["row"], then["metrics"]["steps"]) == (18, [19, 20])
    assert [event["kind"] for event in then["events"]["new"]] == ["end"]
    assert web.get("/api/state?row=18&generation=77&keys=reward").json()["metrics"]["row"] == 0


def test_episodes_are_given_in_pages(made_up: Path) -> None:
    web = client(made_up)
    page = web.get("/api/episodes?start=70&count=50&order=oldest").json()
    assert (page["total"], len(page["rows"]), page["rows"][0][0]) == (80, 10, 70)
    record = web.get("/api/episodes/70").json()
    assert record == json.loads((made_up / "episodes.jsonl").read_text().splitlines()[70])
    assert web.get("/api/episodes/80").status_code == 404


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("episodes?start=abc", "start = 'abc': must be a whole number"),
        ("episodes?step=1.5", "step = '1.5': must be a whole number"),
        ("episodes?count=%s" % ("9" * 5000), f"count = '{'9' * 50}': must be a whole number"),
        ("timeline?start=nan", "start = 'nan': must be a finite number"),
        ("episodes?order=best-first", "order = 'best-first': must be one of newest, oldest, best, worst"),
        ("timeline?start=0&end=nonsense", "end = 'nonsense': must be a finite number"),
        ("state?row=-x", "row = '-x': must be a whole number"),
    ],
)
def test_a_wrong_parameter_is_named_in_a_sentence(made_up: Path, address: str, message: str) -> None:
    answer = client(made_up).get(f"/api/{address}")
    assert (answer.status_code, answer.json()) == (400, {"error": message})


def test_figures_for_prometheus_are_the_newest(made_up: Path) -> None:
    answer = client(made_up).get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = {family.name: family.samples[0] for family in text_string_to_metric_families(answer.text)}
    last = json.loads((made_up / "metrics.jsonl").read_text().splitlines()[-1])
    assert found["forge_async_reward"].value == pytest.approx(last["reward"])
    assert found["forge_async_train_loss"].labels == {"run": "made_up"}
    assert found["forge_async_running"].value == 0


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8790", "127.0.0.1.evil.example", ""])
def test_a_name_that_was_rebound_to_this_machine_is_refused(made_up: Path, host: str) -> None:
    web = client(made_up)
    answer = web.get("/api/state", headers={"host": host})
    assert answer.status_code == 421
    for good in ("localhost:8790", "127.0.0.1", "[::1]:8790"):
        assert web.get("/api/state", headers={"host": good}).status_code == 200


def test_without_the_token_there_is_a_clear_answer_and_nothing_else(made_up: Path) -> None:
    web = client(made_up, "http://machine.example:8790", token=TOKEN)
    page = web.get("/")
    assert page.status_code == 401
    assert "opened without its token" in page.text and "?token=" in page.text
    assert web.get("/api/state").json() == {"error": "This dashboard was opened without its token."}
    assert web.get("/static/app.js").status_code == 401
    assert "token is wrong" in web.get("/?token=guess").text
    assert web.get("/api/state", headers={"authorization": b"Bearer \xe9"}).status_code == 401
    assert web.get("/api/state", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert web.get("/", params={"token": TOKEN}, follow_redirects=False).headers["location"] == "/"
    assert web.get("/").status_code == 200, "the browser has the cookie now"
    (cookie,) = web.cookies.jar
    assert cookie.has_nonstandard_attr("HttpOnly")
    assert cookie.get_nonstandard_attr("SameSite") == "lax", "a link in a chat brings no strict one along"


@pytest.mark.parametrize("token", [TOKEN, 'odd; "quoted", = token'])
@pytest.mark.parametrize("others", ["", 'theirs={"a": [1, 2]}; ', "user/a@b.example=1; ", "no value; ", 'a="; b=x; '])
def test_what_other_services_of_the_machine_set_does_not_hide_the_token(made_up: Path, token: str, others: str) -> None:
    web = client(made_up, "http://machine.example:8790", token=token)
    given = web.get("/", params={"token": token}, follow_redirects=False).headers["set-cookie"].partition("; ")[0]
    web.cookies.clear()
    for header in (f"{others}{given}", f"{given}; {others}"):
        for more in ({}, {"authorization": "Basic dXNlcjpwYXNz"}, {"authorization": "Bearer wrong"}):
            assert web.get("/api/state", headers={"cookie": header} | more).status_code == 200
    assert web.get("/api/state", headers={"cookie": others, "authorization": f"bearer {token}"}).status_code == 200
    refused = web.get("/api/state", headers={"cookie": others, "authorization": "Basic dXNlcjpwYXNz"})
    assert refused.json() == {"error": "This dashboard was opened without its token."}


def test_a_command_needs_more_than_the_cookie(made_up: Path) -> None:
    """It is lax: other sites' links bring it along, and what they send otherwise is refused."""
    web = client(made_up, "http://machine.example:8790", token=TOKEN, control=True)
    web.get("/", params={"token": TOKEN})
    own = {"x-forge-async": "control"}
    assert web.get("/api/control/stop", headers=own).status_code == 405
    for strange in ({}, own | {"origin": "http://evil.example"}, own | {"origin": "null"}):
        assert web.post("/api/control/stop", headers=strange).status_code == 403
    preflight = web.options("/api/control/stop", headers={"origin": "http://evil.example"})
    assert "access-control-allow-headers" not in preflight.headers
    assert not (made_up / "control.jsonl").exists()


def test_without_control_there_is_no_such_endpoint(made_up: Path) -> None:
    assert client(made_up).post("/api/control/stop", headers={"x-forge-async": "control"}).status_code == 404
    assert not (made_up / "control.jsonl").exists()


class Watched:
    """A run's side of its page over doubles: what it reads and records is the monitor's own."""

    def __init__(self, folder: Path, handle: Any, every_s: float = 0.05) -> None:
        self.events = folder / "events.jsonl"
        self.events.write_text("")
        config = SimpleNamespace(metrics=SimpleNamespace(status_every_s=every_s))
        console = SimpleNamespace(print=print, warn=print)
        self.told: list[tuple[int, Any]] = []
        tell = lambda index, status: self.told.append((index, status["running"]))  # noqa: E731
        self.monitor = Monitor(RunPaths(folder), config, self.record, tell, console, handle)  # type: ignore[arg-type]
        self.monitor.start(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
        self.web = client(folder, control=True)

    def record(self, kind: str, **fields: object) -> None:
        with self.events.open("a") as file:
            file.write(json.dumps({"t": 0, "at": time.time(), "kind": kind, **fields}) + "\n")

    async def post(self, name: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str]]:
        given = {"x-forge-async": "control", "origin": "http://127.0.0.1:8790"} if headers is None else headers
        answer = await asyncio.to_thread(self.web.post, f"/api/control/{name}", headers=given)
        return answer.status_code, answer.json()

    async def __aenter__(self) -> Watched:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.monitor.stop()
        self.monitor.close()


async def test_what_a_page_asks_for_reaches_the_run_and_its_outcome_the_page(tmp_path: Path) -> None:
    class Handle:
        state = "running"

        def hold(self) -> None:
            self.state = "paused"

        def let_go(self) -> None:
            raise ForgeError("it has trained all it was to")

        def end(self) -> None:
            self.state = "ended"

    send_command(tmp_path / "control.jsonl", "stop")  # asked before the run began: not meant for it
    handle = Handle()
    async with Watched(tmp_path, handle) as run:
        assert await run.post("pause") == (200, {"outcome": "done"})
        assert handle.state == "paused"
        assert await run.post("resume") == (200, {"outcome": "failed: it has trained all it was to"})
        assert await run.post("stop") == (200, {"outcome": "done"})
        assert handle.state == "ended"
        assert (await run.post("destroy"))[0] == 404
        for strange in ({}, {"x-forge-async": "control", "origin": "http://evil.example"}):
            assert (await run.post("pause", strange))[0] == 403
    kinds = [json.loads(line)["command"] for line in run.events.read_text().splitlines()]
    assert kinds == ["pause", "resume", "stop"]


async def test_what_a_replica_tells_the_page_the_runs_own_status_tells_too(tmp_path: Path) -> None:
    keys = ("version", "waiting", "held", "draining", "generated_tokens", "finished", "swaps", "aborted", "digest")
    status = dict.fromkeys((*keys, "busy_s", "idle_s"), 0) | {"running": 3, "swap_ms": [], "spans": {}}

    async def call(*asked: Any, timeout: float) -> list[Any]:
        return [status]

    replica = SimpleNamespace(state="healthy", respawns=0, handle=SimpleNamespace(call=call, pids=lambda: [7]))
    async with Watched(tmp_path, SimpleNamespace(state="paused"), every_s=0) as run:
        run.monitor._engines = SimpleNamespace(policy=SimpleNamespace(replicas=[replica]))  # type: ignore[assignment]
        assert (await run.monitor._replica(0))["running"] == 3
        assert run.told == [(0, 3)]


def test_commands_are_read_once_and_nonsense_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "control.jsonl"
    commands = Commands(path)
    assert commands.read() == []
    first = send_command(path, "pause")
    with path.open("a") as file:
        file.write('nonsense\n[1]\n{"id": "2", "command": "resume"')
    assert [command["id"] for command in commands.read()] == [first]
    with path.open("a") as file:
        file.write("}\n")
    assert [command["command"] for command in commands.read()] == ["resume"]
    with pytest.raises(ConfigError, match="pause, resume, stop"):
        send_command(path, "destroy")


def test_a_port_that_is_taken_is_passed_over_or_named() -> None:
    with serve.bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ForgeError, match=rf"port {port} is not free.*--port"):
            serve.bind("127.0.0.1", port)
        with serve.bind("127.0.0.1", port, 20) as second:
            assert port < second.getsockname()[1] <= port + 20


@pytest.mark.parametrize("next_ports", [0, serve.PORTS_TRIED])
@pytest.mark.parametrize(
    ("host", "fault"),
    [
        ("203.0.113.7", ""),
        ("no-such-host.invalid", ""),
        ("x" * 300, ""),
        ("127.0.0.1", PermissionError(errno.EACCES, "Permission denied")),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_not_called_a_taken_port(
    monkeypatch: pytest.MonkeyPatch, host: str, fault: Any, next_ports: int
) -> None:
    if fault:

        def bind(self: socket.socket, address: object) -> None:
            raise fault

        monkeypatch.setattr(socket.socket, "bind", bind)
    with pytest.raises(ForgeError, match=rf"cannot listen on {host}:8790: .+--host") as caught:
        serve.bind(host, 8790, next_ports)
    assert "not free" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "key"), [({"port": 0}, "port"), ({"host": ""}, "host"), ({"token": "short"}, "token")]
)
def test_dashboard_config_names_the_wrong_key(values: dict, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DashboardConfig(**values)
    assert caught.value.key == key
    assert "short" not in str(caught.value), "tokens are not printed"


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_two_dashboards_on_one_port_and_the_end_of_the_run(made_up: Path) -> None:
    """The page of a second run gets the next port; both end with their runs, also where those are killed."""
    with serve.bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    first = serve.Beside.start(made_up, DashboardConfig(port=port))
    second = None
    try:
        answer = first.answer()
        assert (answer["port"], answer["moved"]) == (port, "")
        command = [sys.executable, "-m", "forge_async.cli", "dashboard", str(made_up), "--port", str(port)]
        other = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert other.returncode == 1
        assert other.stderr.startswith(f"error: the dashboard's port {port} is not free")
        second = serve.Beside.start(made_up, DashboardConfig(port=port, host="0.0.0.0", token=TOKEN))
        moved = second.answer()
        assert moved["port"] > port
        assert moved["url"].endswith(f":{moved['port']}/?token=a-token-of-sixteen%2B")
        command_line = Path(f"/proc/{second.process.pid}/cmdline").read_bytes()
        assert TOKEN.encode() not in command_line, "other users of the machine can read it"
        status, text = fetch(f"http://127.0.0.1:{port}/api/state")
        assert (status, json.loads(text)["name"]) == (200, "made_up")
        assert fetch(f"http://127.0.0.1:{moved['port']}/")[0] == 401
        third = subprocess.Popen([*command[:-1], "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert third.stdout is not None
        assert third.stdout.readline().startswith(f"dashboard of {made_up}: http://127.0.0.1:")
        time.sleep(0.5)
        third.send_signal(signal.SIGINT)
        assert third.communicate(timeout=10) == ("", "")
        assert third.returncode == 0
        second.process.kill()  # its run ends it all the same
    finally:
        first.stop()
        if second is not None:
            second.stop()
    assert first.process.returncode == 0, "it ended by itself"


@pytest.mark.parametrize("fault", [OSError("no more processes"), {"error": "the ports are not free."}])
async def test_a_run_without_its_page_warns_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    def start(folder: Path, config: DashboardConfig) -> Any:
        if isinstance(fault, OSError):
            raise fault
        return SimpleNamespace(answer=lambda: fault, stop=lambda: None)

    monkeypatch.setattr(serve.Beside, "start", start)
    warnings: list[str] = []
    config = SimpleNamespace(dashboard=DashboardConfig())
    console = SimpleNamespace(warn=warnings.append)
    ignore: Any = lambda *told, **fields: None  # noqa: E731
    monitor = Monitor(RunPaths(tmp_path), config, ignore, ignore, console, SimpleNamespace())  # type: ignore[arg-type]
    monitor.open_page()
    await asyncio.gather(*monitor._tasks)
    monitor.close()
    (warning,) = warnings
    assert "The run goes on without it" in warning


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "99999"], "error: --port = 99999: must be a port from 1 to 65535, or 0 for any free one.\n"),
        (["--port", "-1"], "error: --port = -1: must be a port from 1 to 65535, or 0 for any free one.\n"),
        (["--host", ""], "error: --host = '': must be an address of this machine, such as 127.0.0.1 or 0.0.0.0.\n"),
        (["--token", "short"], "error: --token = '*****': must be at least 16 ASCII characters.\n"),
    ],
)
def test_a_wrong_option_is_named(
    made_up: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["dashboard", str(made_up), *words]) == 1
    assert capsys.readouterr().err == message


def test_a_live_run_says_that_its_usual_port_was_taken(made_up: Path) -> None:
    with serve.bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        page = serve.Beside.start(made_up, DashboardConfig(port=port))
        try:
            answer = page.answer()
        finally:
            page.stop()
    assert answer["moved"] == f" (port {port} is taken)"


def test_a_dashboard_that_cannot_start_says_why(tmp_path: Path) -> None:
    page = serve.Beside.start(tmp_path / "nowhere", DashboardConfig())
    try:
        assert "there is no run folder" in page.answer()["error"]
    finally:
        page.stop()
    with pytest.raises(ForgeError, match="there is no run folder"):
        serve.open_dashboard(tmp_path / "nowhere")
