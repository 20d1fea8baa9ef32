"""Monarch 0.7.0's own dashboard, over meshes that were not started by a job of ``monarch.job``.

Monarch starts it from ``TelemetryConfig(include_dashboard=True)`` of a job only, in a process beside it, and has it
listen on every address of the machine. Here its parts are put together as ``monarch._src.job.telemetry_config`` does,
in the controller, on a loopback address: an actor that collects what processes tell through a Unix socket, a query
engine over it, and the page. All of it is private to Monarch; ``tests/mesh/test_monarch_telemetry.py`` fails when it
moves. Needed until Monarch serves the page of a plain proc mesh.

Processes that are spawned before :meth:`MonarchDashboard.start` tell nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
import socket
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

RETENTION_S = 3600
"""Seconds for which messages are kept, in the controller's memory."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class MonarchDashboard:
    """Made by :meth:`start`; ended by :meth:`stop`, before Monarch's client ends."""

    def __init__(self, url: str, server: Any, collector: Any, folder: str) -> None:
        self.url = url
        self._server, self._collector, self._folder = server, collector, folder

    @classmethod
    async def start(cls, listening: socket.socket) -> MonarchDashboard:
        """Serve on ``listening``, a loopback socket that it takes over.

        Raises:
            Exception: whatever Monarch or Flask raise about a part that is not there.
        """
        from monarch._src.job.telemetry_actor import TelemetryActor, telemetry_socket_dir, telemetry_socket_path
        from monarch.actor import context
        from monarch.distributed_telemetry.engine import QueryEngine
        from monarch.monarch_dashboard.server.app import create_app
        from monarch.monarch_dashboard.server.query_engine_adapter import QueryEngineAdapter
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Silent(WSGIRequestHandler):
            def log(self, type: str, message: str, *args: Any) -> None: ...

        identity = uuid.uuid4().hex
        folder, path = telemetry_socket_dir(identity), telemetry_socket_path(identity)
        collector = context().actor_instance.proc_mesh.spawn("telemetry", TelemetryActor, identity, RETENTION_S)
        try:
            if not await collector.activate.call_one():
                raise RuntimeError(f"nothing can be collected through {path}")
            app = create_app(QueryEngineAdapter(QueryEngine(collector)))
            app.wsgi_app = for_this_machine(app.wsgi_app)
            host, port = listening.getsockname()[:2]
            tell_from_now_on(path)
            server = make_server(host, port, app, threaded=True, request_handler=Silent, fd=listening.fileno())
        except BaseException:
            tell_from_now_on(None)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        listening.close()
        threading.Thread(target=server.serve_forever, daemon=True, name="monarch-dashboard").start()
        return cls(f"http://{host}:{port}/", server, collector, folder)

    async def stop(self) -> None:
        """End the page and the collector."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
        tell_from_now_on(None)
        with contextlib.suppress(Exception):  # the run is ending: nobody is left to handle it
            await asyncio.wait_for(self._collector.stop(), 5)
        shutil.rmtree(self._folder, ignore_errors=True)


_socket: str | None = None


def tell_from_now_on(socket_path: str | None) -> None:
    """Let this process and those spawned from now on tell what happens through this socket; None: those tell nobody."""
    global _socket
    _socket = socket_path
    if socket_path is not None:
        _register()
        _tell(socket_path)


@functools.cache
def _register() -> None:
    from monarch._src.actor.proc_mesh import SetupActor

    SetupActor.register_startup_function(lambda: None if _socket is None else functools.partial(_tell, _socket))


def _tell(socket_path: str) -> None:
    """In each process. Monarch's own function for it lies beside its web server, and vLLM's start trips over Flask."""
    from monarch._rust_bindings.monarch_distributed_telemetry import _set_unix_socket_sink_path

    _set_unix_socket_sink_path(socket_path)


Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def for_this_machine(application: Application) -> Application:
    """Refuse a name of elsewhere that was rebound to this machine (DNS rebinding): the page has no token."""

    def guarded(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if urlsplit(f"//{environ.get('HTTP_HOST', '')}").hostname in LOOPBACK:
            return application(environ, start_response)
        start_response("421 Misdirected Request", [("content-type", "text/plain")])
        return [b"this page is served to this machine only\n"]

    return guarded
