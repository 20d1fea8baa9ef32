"""Trainer, store and policy without the loop: train, publish by hand, see the version change under a request.

python apps/examples/publish_by_hand.py models/tiny_sft
"""

from __future__ import annotations

import asyncio
import sys
from itertools import islice

from forge_async.config import Config, load_config
from forge_async.mesh import MeshRuntime, plan_placement
from forge_async.observability.episodes import spans
from forge_async.policy.actor import PolicyActor
from forge_async.prepare import load_tokenizer
from forge_async.rollout.datasets import PromptSource
from forge_async.store import WeightStore
from forge_async.trainer.actor import TrainerActor
from forge_async.trainer.sft import answer_sequences

SETTINGS = ["policy.sampling.ignore_eos=true", "policy.sampling.max_tokens=400", "policy.kv_cache_gib=0.25"]


async def main(model: str, versions: int = 3) -> None:
    config: Config = load_config(None, SETTINGS)
    tokenizer = load_tokenizer(model)
    source = PromptSource(config.dataset, tokenizer, seed=0)
    prompt, examples = next(source).token_ids, answer_sequences(source, tokenizer)
    cores = plan_placement(config.placement, 1, 1)
    async with MeshRuntime():  # ends every process spawned inside, however it is left
        store = await WeightStore.create(config.store)
        trainer = await TrainerActor.options(cores=cores.trainer).spawn(config.trainer, model, store=store)
        policy = await PolicyActor.options(cores=cores.policy).as_service(config.policy, model, store=store)
        await asyncio.gather(trainer.call("setup"), policy.fan_out("setup"))
        request = asyncio.ensure_future(policy.call("generate", prompt))
        for _ in range(versions):
            await trainer.call("sft_step", list(islice(examples, 16)))
            (version,) = await trainer.call("publish")
            await trainer.call("published", version)
            (report,) = await policy.fan_out("sync", version)  # pulled beside generation, then swapped in
            print(f"version {version} is live, digest {report['digest'][:8]}, {report['in_flight']} requests went on")
        print(await store.versions())
        print(f"the request, [version, tokens]: {spans((await request).policy_versions)}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
