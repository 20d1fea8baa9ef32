"""Claim: publishing, pulling and swapping weights runs at the speed of memory.

``python benchmarks/weight_path.py [--model models/smollm2] [--procs 1] [--masters float32] [--repeats 20] ...``

A trainer publishes its weights as bfloat16, a policy replica pulls them and swaps them in. The trainer holds float32
masters, as every trainer of this project does, or (``--masters bfloat16``) what it publishes, so that nothing is cast.
Each is the real actor in its process, pinned to its own core (several trainer ranks share theirs; the store runs on the
replica's). One path is timed in the controller, from the call of ``publish`` to the swap's end: hand-over, cast into
shared memory and digests, commit, pull, swap. The pull, with digests of what is held then, begins while the version is
written; ``pull`` is the rest of it after the commit. ``attest`` compares the digests and is not part of the path.
Layers are live: packing them is no copy, and a replica does it only where updates are far apart.

In turns with it, on the same cores and the same bytes: the raw rate (one process copies into shared memory, another
copies out; the two copies' own times, no messages), the same with the cast from float32 as the first copy, which reads
twice the bytes, and torchstore's plain ``put_state_dict`` and ``get_state_dict``. Bounds: 0.7 of raw with one rank, 0.5
with two; 10 times plain. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from monarch.actor import concurrent_endpoint
from safetensors.torch import load_file
from torchstore.state_dict_utils import get_state_dict, put_state_dict

from forge_async.mesh import ForgeActor, MeshRuntime
from forge_async.policy.actor import PolicyActor
from forge_async.policy.config import PolicyConfig, SamplingConfig, UpdateConfig
from forge_async.store import StoreConfig, WeightStore, torchstore_compat
from forge_async.store.shared_memory import Segment, attach, create_segment
from forge_async.trainer.actor import TrainerActor
from forge_async.trainer.config import TrainerConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file


WARM_UP = 6
"""Versions before what counts: they make the pages of the store's places and of the replica's two sets."""


class Trainer(TrainerActor):
    """The trainer with a step that costs nothing, since steps are not what is measured."""

    @concurrent_endpoint
    async def hold_as(self, dtype: str) -> None:
        """Keep the weights in ``dtype`` from now on."""
        await self._run(lambda engine: engine.model.to(getattr(torch, dtype)), "hold")

    @concurrent_endpoint
    async def advance(self) -> None:
        """Change a weight, and the version with it."""

        def change(engine: Any) -> None:
            engine.before_update()
            with torch.no_grad():
                engine.model.norm.weight.mul_(1.01)
            engine.version += 1

        await self._run(change, "train")


class Peer(ForgeActor):
    """One side of the two baselines: raw copies, and plain torchstore."""

    def __init__(self, model: str) -> None:
        self.state = {name: tensor.bfloat16() for name, tensor in load_file(f"{model}/model.safetensors").items()}
        self.nbytes = sum(tensor.nbytes for tensor in self.state.values())
        self.flat = torch.zeros(self.nbytes, dtype=torch.uint8)
        self.memory = self.flat
        self.masters: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(Place in the segment, float32 values) of every tensor."""

    @concurrent_endpoint
    async def segment(self) -> Segment:
        segment = create_segment(self.nbytes)
        self.memory = attach(segment)
        return segment

    @concurrent_endpoint
    async def open(self, segment: Segment) -> None:
        self.memory = attach(segment)

    @concurrent_endpoint
    async def cast(self) -> float:
        """Seconds of casting all tensors from float32 into the segment."""
        if not self.masters:
            ends = itertools.accumulate(tensor.nbytes for tensor in self.state.values())
            pieces = zip(self.state.values(), ends, strict=True)
            self.masters = [
                (self.memory[end - tensor.nbytes : end].view(torch.bfloat16).view(tensor.shape), tensor.float())
                for tensor, end in pieces
            ]
        began = time.perf_counter()
        targets, sources = zip(*self.masters, strict=True)
        await asyncio.to_thread(torch._foreach_copy_, targets, sources)
        return time.perf_counter() - began

    @concurrent_endpoint
    async def copy(self, into_segment: bool) -> float:
        """Seconds of one copy between own memory and the segment."""
        target, source = (self.memory, self.flat) if into_segment else (self.flat, self.memory)
        began = time.perf_counter()
        await asyncio.to_thread(target.copy_, source)
        return time.perf_counter() - began

    @concurrent_endpoint
    async def put(self, store: WeightStore, key: str) -> None:
        await put_state_dict(await torchstore_compat.client(store.name), self.state, key)

    @concurrent_endpoint
    async def get(self, store: WeightStore, key: str) -> None:
        await get_state_dict(await torchstore_compat.client(store.name), key, self.state)

    @concurrent_endpoint
    async def drop(self, store: WeightStore, key: str) -> None:
        client = await torchstore_compat.client(store.name)
        for name in await client.keys(key):
            await client.delete(name)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    first, last = [cores[0]], [cores[-1]]
    async with MeshRuntime():
        store = await WeightStore.create(StoreConfig(dtype="bfloat16"), cores=last)
        writer = await Peer.options(cores=first).spawn(options.model)
        reader = await Peer.options(cores=last).spawn(options.model)
        await reader.call_one("open", await writer.call_one("segment"))
        config = TrainerConfig(procs=options.procs, max_sequence_tokens=256, device="cpu")
        trainer = await Trainer.options(procs=options.procs, cores=first).spawn(config, options.model, store=store)
        policy = await PolicyActor.options(cores=last).spawn(
            PolicyConfig(
                dtype="bfloat16",
                max_model_len=128,
                max_num_seqs=4,
                max_num_batched_tokens=128,
                kv_cache_gib=0.1,
                update=UpdateConfig(layers="live"),
                sampling=SamplingConfig(max_tokens=16),
            ),
            options.model,
            store=store,
        )
        await asyncio.gather(trainer.call("setup"), policy.call("setup"))
        await trainer.call("hold_as", options.masters)
        rows: list[dict[str, float]] = []
        for repeat in range(options.repeats + WARM_UP):
            cast, raw_in = await writer.call_one("cast"), await writer.call_one("copy", True)
            raw_out = await reader.call_one("copy", False)
            began = time.perf_counter()
            version = (await trainer.call("publish"))[0]
            live = asyncio.ensure_future(policy.call_one("sync", version))  # reads it while it is written
            published = (await trainer.call("published", version))[0]
            committed = time.perf_counter()
            report = await live
            wall = time.perf_counter() - began - report["attest_s"]
            assert report["digest"] == published["digest"] and report["version"] == version
            await trainer.call("advance")
            row = {
                "raw_s": raw_in + raw_out,
                "raw_cast_s": cast + raw_out,
                "path_s": wall,
                "publish_s": committed - began,
                "pull_s": report["pull_s"],
                "swap_s": report["pause_ms"] / 1e3,
                "attest_s": report["attest_s"],
            }
            if repeat >= WARM_UP:
                rows.append(row)
        plain: list[float] = []
        for repeat in range(options.plain_repeats):
            began = time.perf_counter()
            await writer.call_one("put", store, f"plain{repeat}")
            await reader.call_one("get", store, f"plain{repeat}")
            plain.append(time.perf_counter() - began)
            await writer.call_one("drop", store, f"plain{repeat}")
        await store.close()
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    plain_s = statistics.median(plain) if plain else float("nan")
    gigabytes = published["bytes"] / 1e9
    for name, seconds in [*medians.items(), ("plain_s", plain_s)]:
        print(f"{name[:-2]:>9} {seconds * 1e3:9.1f} ms {gigabytes / seconds:7.2f} GB/s")
    return {
        "model": Path(options.model).name,
        "bytes": published["bytes"],
        "masters": options.masters,
        "trainer_procs": options.procs,
        "repeats": len(rows),
        "path_over_raw": round(medians["raw_s"] / medians["path_s"], 3),
        "path_over_raw_cast": round(medians["raw_cast_s"] / medians["path_s"], 3),
        "path_over_plain": round(plain_s / medians["path_s"], 1),
        "bound": {"raw": 0.7 if options.procs == 1 else 0.5, "plain": 10},
        "medians_s": {name: round(seconds, 4) for name, seconds in medians.items()},
        "plain_s": [round(seconds, 2) for seconds in plain],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2", help="Hugging Face folder")
    parser.add_argument("--procs", type=int, default=1, help="trainer ranks; more than one: FSDP2")
    parser.add_argument("--masters", choices=["float32", "bfloat16"], default="float32", help="what the trainer holds")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--plain-repeats", type=int, default=3)
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
