"""Serving the page: by ``forge-async dashboard``, and by a process beside a live run."""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from forge_async.dashboard.config import LOOPBACK_HOSTS, PORT, DashboardConfig
from forge_async.errors import ConfigError, ForgeError, require

logger = logging.getLogger(__name__)

PORTS_TRIED = 20
TOKEN_VARIABLE = "FORGE_ASYNC_DASHBOARD_TOKEN"
"""A run's own token goes to its dashboard by it: every user of the machine can read command lines."""


class Url(NamedTuple):
    """What to open, and the token that is in it."""

    text: str
    token: str | None


def bind(host: str, port: int, next_ports: int = 0) -> socket.socket:
    """A socket that listens on ``port``, or on one of the ``next_ports`` after it where that is taken.

    Raises:
        ForgeError: none is free, ``host`` is not this machine's, or the port is for others.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken_because = ""
    for number in range(port, min(port + next_ports, 65535) + 1):
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, number))
            listening.listen(128)
            return listening
        except (OSError, UnicodeError) as error:
            listening.close()
            reason = getattr(error, "strerror", None) or str(error)
            if not isinstance(error, OSError) or error.errno != errno.EADDRINUSE:  # the next port would not do either
                raise ForgeError(
                    f"the dashboard cannot listen on {host}:{number}: {reason}. Give an address of this machine with "
                    "--host, and a port above 1023 with --port (dashboard.host and dashboard.port of a run)"
                ) from error
            taken_because = reason
    tried = f"ports {port} to {port + next_ports} are" if next_ports else f"port {port} is"
    raise ForgeError(
        f"the dashboard's {tried} not free on {host} ({taken_because}): another dashboard may be running. Choose "
        "another one with --port (dashboard.port of a run)"
    )


def needs_token(host: str) -> bool:
    """Whether others than this machine's users can reach ``host``."""
    return host not in LOOPBACK_HOSTS


def url_of(host: str, port: int, token: str | None) -> str:
    """What to open in a browser on this machine."""
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{port}/" + (f"?token={quote(token)}" if token else "")


def taken(port: int, listening: socket.socket) -> str:
    """A remark beside the address where it is not at ``port``."""
    return f" (port {port} is taken)" if listening.getsockname()[1] != port else ""


@contextlib.contextmanager
def options_named() -> Iterator[None]:
    """What is wrong with a setting is wrong with the option of that name here."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"--{error.key}", error.value, error.allowed, error.remedy) from None


def make_server(folder: Path, listening: socket.socket, token: str | None, control: bool) -> Callable[[], None]:
    """What serves until interrupted (or, in the process beside a run, until that ends). All that it needs is loaded
    when this returns, so that it answers at once."""
    sys.setswitchinterval(0.001)  # reading ahead must not hold answers up
    from forge_async.dashboard.view import RunView

    view = RunView(folder)
    view.read_ahead()
    import uvicorn

    from forge_async.dashboard.app import make_app
    from forge_async.dashboard.uvicorn_compat import SeldomServer

    app = make_app(view, listening.getsockname()[1], token, control)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none")
    config.load()
    return lambda: SeldomServer(config).run(sockets=[listening])


def open_dashboard(
    run: Path, port: int | None = None, host: str = "127.0.0.1", token: str | None = None, control: bool = False
) -> None:
    """Serve the page of a run, live or finished, out of its folder, until interrupted; prints its address.

    Args:
        port: None: the usual one, or the next that is free; 0: any free one.
        token: None: none on a loopback address, one that is made up on any other.
    Raises:
        ForgeError: there is no such folder, or the port is taken.
    """
    with options_named():
        require(port is None or 0 <= port <= 65535, "port", port, "a port from 1 to 65535, or 0 for any free one")
        listening, url = _listen(run, port, PORT if port is None else port, host, token or "")
    moved = taken(PORT, listening) if port is None else ""
    with contextlib.suppress(KeyboardInterrupt):  # how a server is ended
        serve = make_server(run, listening, url.token, control)
        print(f"dashboard of {run}: {url.text}{moved}", flush=True)
        serve()


def serve_beside(arguments: list[str] | None = None) -> None:
    """The process beside a run: its answer is one line of JSON, its end is the run's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--control", action="store_true")
    options = parser.parse_args(arguments)
    try:
        listening, url = _listen(options.run, None, options.port, options.host, os.environ.pop(TOKEN_VARIABLE, ""))
    except ForgeError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    serve = make_server(options.run, listening, url.token, options.control)
    answer = {"url": url.text, "port": listening.getsockname()[1], "moved": taken(options.port, listening)}
    print(json.dumps(answer), flush=True)
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    serve()


def _listen(run: Path, asked: int | None, port: int, host: str, token: str) -> tuple[socket.socket, Url]:
    """A listening socket and what to open; only a port that nobody ``asked`` for may be another."""
    config = DashboardConfig(port=port or PORT, host=host, token=token)
    if not run.is_dir():
        raise ForgeError(f"there is no run folder {run}")
    listening = bind(host, port, PORTS_TRIED if asked is None else 0)
    given = config.token or (secrets.token_urlsafe(24) if needs_token(host) else None)
    return listening, Url(url_of(host, listening.getsockname()[1], given), given)


def _end_with_standard_input() -> None:
    """The run holds the other end: however it ends, this process does not outlive it."""
    while os.read(0, 4096):
        pass
    os._exit(0)


@dataclass
class Beside:
    """The page of a live run, in a process of its own that ends with the run."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, folder: Path, config: DashboardConfig) -> Beside:
        """Start it; returns at once."""
        command = [sys.executable, "-m", "forge_async.dashboard", str(folder)]
        command += ["--port", str(config.port), "--host", config.host, *(["--control"] if config.control else [])]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if config.token:
            environ[TOKEN_VARIABLE] = config.token
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environ,
            start_new_session=True,  # Ctrl-C is the run's
        )
        return cls(process)

    def answer(self, timeout_s: float = 30.0) -> dict[str, str]:
        """``{"url": ...}`` once it listens, or ``{"error": ...}``. Blocks."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if ready else ""
        try:
            answer: dict[str, str] = json.loads(line)
        except ValueError:
            return {"error": f"the dashboard's process did not start (exit code {self.process.poll()})"}
        return answer

    def stop(self) -> None:
        """End it; safe to call again."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
