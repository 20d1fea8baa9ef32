"""``forge-async sft``: supervised fine-tuning on a dataset's own answers, until the model is right often enough."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path

from forge_async.config import SFTConfig
from forge_async.errors import RunFailed, prefix_errors
from forge_async.mesh import MeshRuntime, plan_placement
from forge_async.model_zoo import check_export_folder
from forge_async.prepare import ensure_model, load_tokenizer
from forge_async.rollout.datasets import PromptSource
from forge_async.trainer.actor import TrainerActor
from forge_async.trainer.sft import answer_sequences, expected_accuracy


async def warm_up(config: SFTConfig) -> None:
    """Train until ``target_accuracy``, and write the model to ``export_path``.

    Raises:
        ForgeError: a setting or a file is wrong, or the accuracy ended outside ``accuracy_limits``.
    """
    check_export_folder(Path(config.export_path))
    model_path = await ensure_model(config.model)
    tokenizer = load_tokenizer(model_path)
    with prefix_errors("dataset"):
        examples = answer_sequences(PromptSource(config.dataset, tokenizer, config.seed), tokenizer)
    held_out = list(islice(examples, config.eval_prompts))
    cores = plan_placement(config.placement, config.trainer.procs, policy_replicas=1).trainer
    started = time.monotonic()
    async with MeshRuntime():
        trainer = await TrainerActor.options(procs=config.trainer.procs, cores=cores).spawn(
            config.trainer, model_path, total_steps=config.steps, seed=config.seed
        )
        await trainer.call("setup")
        accuracy = 0.0
        for step in range(1, config.steps + 1):
            batch = list(islice(examples, config.batch_size))
            if not batch:
                break
            stats = (await trainer.call("sft_step", batch))[0]
            if step % config.eval_every == 0 or step == config.steps:
                logprobs = (await trainer.call("logprobs", held_out))[0]
                accuracy = expected_accuracy(held_out, logprobs)
                elapsed = time.monotonic() - started
                print(f"warm-up step {step}: loss {stats.loss:.3f}, right {accuracy:.1%}, {elapsed:.0f} s", flush=True)
                if accuracy >= config.target_accuracy:
                    break
        low, high = config.accuracy_limits
        if not low <= accuracy <= high:
            raise RunFailed(
                f"the warm-up ended at {accuracy:.1%} right answers, outside accuracy_limits [{low}, {high}]: "
                "raise steps or trainer.optimizer.lr if it is too low, lower eval_every if it is too high"
            )
        await trainer.call("export_hf", str(config.export_path))
    print(f"warm-up: the model is in {config.export_path}")
