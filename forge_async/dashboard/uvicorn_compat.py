"""What the dashboard changes in uvicorn 0.54.0.

``Server.main_loop`` looks ten times a second whether the server should end: most of what an idle dashboard costs,
beside a run that uses every core. No setting changes how often, and neither it nor ``on_tick``, which it calls, is
documented. Here it looks twice a second. Needed until uvicorn has a setting, or ends without looking;
``tests/dashboard/test_uvicorn_compat.py`` fails when either moves.
"""

from __future__ import annotations

import asyncio

import uvicorn

LOOK_S = 0.5
"""Seconds between two looks; an end takes as long."""


class SeldomServer(uvicorn.Server):
    """A server that looks seldom whether it should end."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # noqa: ASYNC110 (a signal's handler sets a flag); 0: renews the Date header
            await asyncio.sleep(LOOK_S)
