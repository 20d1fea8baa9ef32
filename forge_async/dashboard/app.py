"""The web application: one page, its files, and what it asks for as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import mimetypes
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request, cookie_parser
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route, Router

from forge_async.dashboard.commands import Commands, send_command
from forge_async.dashboard.episodes import ORDERS
from forge_async.dashboard.view import DRAWN, RunView
from forge_async.observability.jsonl import to_plain

STATIC = Path(__file__).parent / "static"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
OUTCOME_S = 15.0
"""Seconds that a command's outcome is waited for: a run looks for commands every few seconds."""

HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}

REFUSED = """<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>forge_async</title><h1>A token is needed</h1>
<p>{reason}</p>
<p>Open the address that was printed when the dashboard was started; it ends with <code>?token=...</code></p>"""


class Answer(JSONResponse):
    """What lines of other programs may hold, and JSON may not, is made plain: NaN, half a surrogate pair."""

    def render(self, content: Any) -> bytes:
        try:
            return super().render(content)
        except ValueError:
            return json.dumps(to_plain(content), allow_nan=False).encode()


class Guard:
    """Lets requests through that come from where they should: a known host, and with the token where there is one.

    Without a token the server listens on a loopback address only, and a page of another name that resolves to it (DNS
    rebinding) is refused by its Host header.
    """

    def __init__(self, app: Any, token: str | None, port: int) -> None:
        self.app, self.token = app, token
        self.cookie = f"forge_async_{port}"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        answer = self._refusal(headers, QueryParams(scope["query_string"]), scope["path"])
        if answer is not None:
            answer.headers.update(HEADERS)
            await answer(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *((k, v) for k, v in message["headers"] if k != b"cache-control"),
                    *((name.encode(), value.encode()) for name, value in HEADERS.items()),
                ]
            await send(message)

        await self.app(scope, receive, send_with_headers)

    def _refusal(self, headers: Headers, query: QueryParams, path: str) -> Response | None:
        if self.token is None:
            name = urlsplit(f"//{headers.get('host', '')}").hostname
            if name in LOOPBACK:
                return None
            return JSONResponse({"error": f"this dashboard is served to {', '.join(LOOPBACK)} only"}, 421)
        if "token" in query and self._is_token(query["token"]):
            answer = RedirectResponse(path, 303)
            # Lax, as strict ones are not sent after a click on a link elsewhere; what changes anything is a POST.
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="lax")
            return answer
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        cookie = cookie_parser(headers.get("cookie", "")).get(self.cookie, "")
        given = [bearer.strip() if scheme.lower() == "bearer" else "", cookie]
        if any(map(self._is_token, given)):
            return None
        given = list(filter(None, given))
        reason = "The token is wrong." if given or "token" in query else "This dashboard was opened without its token."
        if path.startswith("/api/"):
            return JSONResponse({"error": reason}, 401)
        return HTMLResponse(REFUSED.format(reason=reason), 401)

    def _is_token(self, given: str) -> bool:
        assert self.token is not None
        return hmac.compare_digest(given.encode(), self.token.encode())


def make_app(view: RunView, port: int, token: str | None = None, control: bool = False) -> Any:
    """The application.

    Args:
        token: what a browser has to bring; None on loopback addresses only.
        control: whether the page may pause and stop the run.
    """

    files = {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in STATIC.rglob("*") if path.is_file()}

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            return JSONResponse({"error": "there is no such file"}, 404)
        return Response(files[name], media_type=mimetypes.guess_type(name)[0] or "text/plain")

    def state(request: Request) -> Response:
        query = request.query_params
        keys = [key for key in query["keys"].split(",") if key][:100] if "keys" in query else DRAWN
        row, generation, event = (_whole(query, name) or 0 for name in ("row", "generation", "event"))
        found = view.state(row, generation, event, keys, _whole(query, "events") or 0)
        return Answer({**found, "control": control})

    def episodes(request: Request) -> Response:
        query = request.query_params
        return Answer(
            view.episode_rows(
                max(0, _whole(query, "start") or 0),
                max(0, min(1000, _whole(query, "count") or 200)),
                _order(query),
                query.get("mixed") == "1",
                _whole(query, "step"),
                _whole(query, "of"),
            )
        )

    def episode(request: Request) -> Response:
        record = view.episode(int(request.path_params["index"]))
        return JSONResponse({"error": "there is no such episode"}, 404) if record is None else Answer(record)

    def timeline(request: Request) -> Response:
        query = request.query_params
        window = _number(query, "start"), _number(query, "end"), _whole(query, "pixels") or 1000
        return Answer(view.timeline(*window, _whole(query, "after") or 0, _whole(query, "generation") or 0))

    def figures(request: Request) -> Response:
        from forge_async.dashboard.prometheus import CONTENT_TYPE, exposition

        return Response(exposition(view), media_type=CONTENT_TYPE)

    async def command(request: Request) -> Response:
        origin, host = request.headers.get("origin"), request.headers.get("host")
        if request.headers.get("x-forge-async") != "control" or (origin and urlsplit(origin).netloc != host):
            return JSONResponse({"error": "a command must come from the dashboard's own page"}, 403)
        name = str(request.path_params["name"])
        if name not in Commands.NAMES:
            return JSONResponse({"error": f"{name!r} is none of {', '.join(Commands.NAMES)}"}, 404)
        identity = await asyncio.to_thread(send_command, view.paths.commands, name)
        deadline = time.monotonic() + OUTCOME_S
        while time.monotonic() < deadline:
            event = await asyncio.to_thread(view.outcome_of, identity)
            if event is not None:
                return JSONResponse({"outcome": event["outcome"]})
            await asyncio.sleep(0.3)
        return JSONResponse({"outcome": "the run has not answered yet; its event log will tell"}, 202)

    def told(work: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
        """In a thread, while there is much to read; a fault of one request is an answer that says so."""

        async def endpoint(request: Request) -> Response:
            try:
                return work(request) if view.caught_up else await asyncio.to_thread(work, request)
            except ValueError as error:
                return JSONResponse({"error": str(error)}, 400)
            except OSError as error:
                return JSONResponse({"error": f"the run folder could not be read: {error}"}, 503)

        return endpoint

    routes: list[Any] = [
        Route("/", file),
        Route("/api/state", told(state)),
        Route("/api/episodes", told(episodes)),
        Route("/api/episodes/{index:int}", told(episode)),
        Route("/api/timeline", told(timeline)),
        Route("/metrics", told(figures)),
        Route("/static/{name:path}", file),
    ]
    if control:
        routes.append(Route("/api/control/{name}", command, methods=["POST"]))
    return Guard(Router(routes), token, port)


def _order(query: QueryParams) -> str:
    order = query.get("order", "newest")
    if order not in ORDERS:
        raise ValueError(f"order = {order[:50]!r}: must be one of {', '.join(ORDERS)}")
    return order


def _whole(query: QueryParams, name: str) -> int | None:
    """A parameter; None where it is not given. Raises ValueError, in words for whoever asked."""
    value = query.get(name)
    if not value:
        return None
    if not re.fullmatch(r"-?[0-9]{1,18}", value):
        raise ValueError(f"{name} = {value[:50]!r}: must be a whole number")
    return int(value)


def _number(query: QueryParams, name: str) -> float | None:
    value = query.get(name)
    if not value:
        return None
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(value)):
            return number
    raise ValueError(f"{name} = {value[:50]!r}: must be a finite number")
