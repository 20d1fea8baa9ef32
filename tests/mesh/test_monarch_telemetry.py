"""Monarch's own lines and pages: its notice is left out, its dashboard is served to this machine alone."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

import cloudpickle
import pytest
from monarch.actor import concurrent_endpoint

from forge_async.dashboard.serve import bind
from forge_async.mesh import ForgeActor, MeshRuntime
from forge_async.mesh.monarch_telemetry_compat import MonarchDashboard

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import test modules


class Seen(ForgeActor):
    @concurrent_endpoint
    async def loaded(self) -> list[str]:
        return [name for name in ("flask", "werkzeug") if name in sys.modules]

    @concurrent_endpoint
    async def seen(self) -> str:
        return "seen"


def get(url: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
        return str(answer.read().decode())


async def test_monarchs_dashboard_shows_the_meshes_and_ends_with_the_run() -> None:
    async with MeshRuntime() as runtime:
        page = await MonarchDashboard.start(bind("127.0.0.1", 0))
        runtime.adopt(page)
        actor = await Seen.options(procs=2).spawn()
        for _ in range(5):
            assert await actor.call("seen") == ["seen", "seen"]
        assert await actor.call("loaded") == [[], []], "vLLM's start fails where Flask is loaded"
        assert "Monarch Dashboard" in await asyncio.to_thread(get, page.url)
        for _ in range(100):  # processes tell a moment later
            actors = json.loads(await asyncio.to_thread(get, page.url + "api/actors"))
            ranks = sorted(each["rank"] for each in actors if "Seen" in each["mesh_class"])
            if ranks == [0, 1]:
                break
            await asyncio.sleep(0.1)
        assert ranks == [0, 1]
        assert await asyncio.to_thread(os.path.exists, page._folder)
        with pytest.raises(urllib.error.HTTPError, match="421"):
            await asyncio.to_thread(get, page.url, Host="rebound.example")
    with pytest.raises(urllib.error.URLError, match="refused"):
        await asyncio.to_thread(get, page.url)
    assert await asyncio.to_thread(os.path.exists, page._folder) is False


def test_the_notice_of_monarchs_own_log_is_left_out() -> None:
    """And is there without: else the patch is no longer needed. Other lines come through."""
    start = "import os, sys; from forge_async.mesh.monarch_compat import "
    for code, lines in (
        ("this_host; this_host()", 1),
        (
            "without_log_notice as w, this_host as h\nwith w(): h(); os.write(2, b'mine\\n')\nos.write(2, b'after\\n')",
            2,
        ),
    ):
        result = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        assert len(result.stderr.splitlines()) == lines, result.stderr
        assert ("internal logs are being written" in result.stderr) == (lines == 1)
    assert result.stderr == "mine\nafter\n"
