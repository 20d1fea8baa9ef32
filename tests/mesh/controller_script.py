"""A controller for test_shutdown: prints its run id and pids, then sits in calls until a signal arrives.

Arguments: where to sit: ``start`` (before anything is spawned), ``calls``, ``store`` (publishing in a loop) or ``cell``
(in a task other than that which opened the runtime).
"""

import asyncio
import os
import sys
import time

from monarch.actor import concurrent_endpoint, endpoint

from forge_async.mesh import ForgeActor, MeshRuntime


class Busy(ForgeActor):
    @concurrent_endpoint
    async def sleep(self) -> None:
        await asyncio.sleep(600)

    @endpoint
    async def block(self) -> None:
        time.sleep(600)  # noqa: ASYNC251 - an actor that does not answer is the point

    @concurrent_endpoint
    async def publish_forever(self, store) -> None:
        import torch

        from forge_async.store import TensorShard

        version = 0
        while True:
            version += 1
            await store.publish(version, 0, 1, [TensorShard.whole("w", torch.ones(1 << 18))])

    @concurrent_endpoint
    async def die(self) -> None:
        os._exit(3)


async def main(where: str) -> None:
    async with MeshRuntime() as runtime:
        print("RUN", runtime.run_id, flush=True)
        if where == "start":
            print("READY", flush=True)
        first = await Busy.spawn()
        service = await Busy.options(num_replicas=2 if where == "calls" else 1).as_service()
        calls = [asyncio.ensure_future(call) for call in (first.call("block"), service.call("sleep"))]
        if where == "store":
            from forge_async.store import WeightStore

            store = await WeightStore.create()
            calls.append(asyncio.ensure_future(service.call("publish_forever", store)))
            await store.wait_for_newer(2)
        if where == "fail":
            await service.call("die")
        if where != "start":
            print("READY", flush=True)
        await asyncio.gather(*calls)


async def notebook() -> None:
    async def cell() -> None:
        runtime = await MeshRuntime().__aenter__()
        await Busy.spawn()
        print("RUN", runtime.run_id, flush=True)

    await asyncio.ensure_future(cell())
    print("READY", flush=True)
    await asyncio.sleep(600)


asyncio.run(notebook() if sys.argv[1] == "cell" else main(sys.argv[1]))
