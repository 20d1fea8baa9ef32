"""A policy service on its own: spawn two replicas, ask them, and read what comes with every token.

python apps/examples/generate.py models/tiny_sft 101101
"""

from __future__ import annotations

import asyncio
import sys

from forge_async.mesh import MeshRuntime
from forge_async.policy.actor import PolicyActor
from forge_async.policy.config import PolicyConfig, SamplingConfig
from forge_async.prepare import load_tokenizer
from forge_async.rollout.rendering import build_messages, render_prompt


async def main(model: str, text: str, replicas: int = 2) -> None:
    config = PolicyConfig(max_model_len=128, kv_cache_gib=0.25, sampling=SamplingConfig(max_tokens=8))
    tokenizer = load_tokenizer(model)
    prompt = render_prompt(tokenizer, build_messages(text, system_prompt=None))
    async with MeshRuntime():  # ends every process spawned inside, however it is left
        policy = await PolicyActor.as_service(config, model, num_replicas=replicas)
        await policy.fan_out("setup")
        completions = await asyncio.gather(*(policy.call("generate", prompt) for _ in range(4)))
        for completion in completions:  # the least loaded replica answered each
            print(f"{tokenizer.decode(completion.token_ids.tolist())!r}, ended by {completion.finish_reason}")
            print(f"  log-probs {completion.logprobs.round(2)}, versions {completion.policy_versions}")


if __name__ == "__main__":
    model, text = sys.argv[1:]
    asyncio.run(main(model, text))
