"""The seam of uvicorn is still needed, and still where it was."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import uvicorn

from forge_async.dashboard import uvicorn_compat
from forge_async.dashboard.uvicorn_compat import SeldomServer


def test_uvicorn_still_looks_ten_times_a_second_in_the_loop_that_is_replaced() -> None:
    assert "self.main_loop()" in inspect.getsource(uvicorn.Server._serve)
    source = inspect.getsource(uvicorn.Server.main_loop)
    assert "self.on_tick(" in source and "asyncio.sleep(0.1)" in source, "SeldomServer may not be needed any more"
    assert "if counter % 10 == 0" in inspect.getsource(uvicorn.Server.on_tick), "0 renews the Date header"


async def test_a_server_that_is_told_to_end_ends_at_its_next_look(monkeypatch: Any) -> None:
    monkeypatch.setattr(uvicorn_compat, "LOOK_S", 0.01)
    server = SeldomServer(uvicorn.Config(lambda *_: None))
    looks, look = [], server.on_tick

    async def on_tick(counter: int) -> bool:
        looks.append(counter)
        server.should_exit = len(looks) == 3
        return await look(counter)

    server.on_tick = on_tick  # type: ignore[method-assign]
    server.config.load()
    async with asyncio.timeout(5):
        await server.main_loop()
    assert looks == [0, 0, 0] and (b"date" in dict(server.server_state.default_headers))
