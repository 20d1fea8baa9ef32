"""``forge-async replay``: bring the run up again, let it repeat, and notice when it cannot go on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from forge_async.policy.turns import Diverged
from forge_async.replay.compare import Replay
from forge_async.replay.recorded import Recorded

if TYPE_CHECKING:
    from forge_async.run import Run


async def watch(run: Run, stall_s: float) -> None:
    """End ``run`` when nothing has moved for ``stall_s`` seconds; cancelled by whoever started it."""
    loop = asyncio.get_running_loop()
    last, since = None, loop.time()
    while True:
        await asyncio.sleep(1.0)
        replicas = await run.engines.policy.fan_out("status", timeout=30.0)
        trainer = (await run.engines.trainer.call("status"))[0]
        states = [(s["turn"], s["version"]) if isinstance(s, dict) else repr(s) for s in replicas]
        now = (states, trainer["version"], trainer["busy_s"])
        if now != last:
            last, since = now, loop.time()
        elif loop.time() - since >= stall_s:
            lacks = [
                f"replica {index}: {status['lacks']}"
                for index, status in enumerate(replicas)
                if isinstance(status, dict) and status["lacks"]
            ]
            run.fail(
                Diverged(
                    f"nothing has moved for {stall_s:g} s after version {trainer['version']}: the schedule cannot go "
                    f"on. {'; '.join(lacks) or 'No replica waits for a command.'}"
                )
            )
            return


async def replay(run_folder: str | Path, steps: int | None = None, stall_s: float = 60.0) -> None:
    """What ``forge-async replay`` does.

    Raises:
        NotReplayable: before anything is started.
        Diverged: at the first difference.
    """
    from forge_async.run import launch  # which imports this package

    recorded = Recorded.read(Path(run_folder), steps)
    for warning in recorded.warnings:
        print(f"warning: {warning}")
    compare = Replay(recorded)
    async with launch(recorded.replay_config(), compare) as run:
        watching = asyncio.ensure_future(watch(run, stall_s))
        try:
            async for step in run.steps():
                run.log(step)
                if step.index == recorded.steps:
                    break
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        where = run.folder.path
    counts = ", ".join(f"{count} {what}" for what, count in compare.compared.items())
    print(f"{counts}: as recorded. Episodes of every step: {where / 'episodes.jsonl'}")
