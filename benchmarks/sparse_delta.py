"""Question: would sending only the changed elements of bfloat16 weights beat copying them all, on one host?

``python benchmarks/sparse_delta.py [--model models/smollm2] [--steps 5] [--lr 5e-5]``

Takes AdamW steps on a small supervised task with the real trainer, casts the weights to bfloat16 after each as a
publish does, and measures, on one core: the share of elements that differ from the version before, the seconds to find
and pack them (index and value), to write them into the former version's copy, and to copy everything instead. The
result of the sparse way is compared bit by bit. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from forge_async.trainer.config import OptimizerConfig, TrainerConfig
from forge_async.trainer.engine import TrainerEngine
from forge_async.types import TrainingSequence


def sums(count: int, seed: int, tokenizer: object) -> list[TrainingSequence]:
    """Additions with their answers."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(count):
        a, b = random.integers(0, 100, 2)
        prompt, answer = f"Question: What is {a} + {b}?\nAnswer:", f" {a + b}\n"
        head, tail = (tokenizer.encode(text) for text in (prompt, answer))  # type: ignore[attr-defined]
        mask = np.arange(len(head) + len(tail)) >= len(head)
        made.append(
            TrainingSequence(
                sequence_id=f"{seed}.{index}",
                token_ids=np.asarray(head + tail, np.int32),
                loss_mask=mask,
                logprobs=np.zeros(len(mask), np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=mask.astype(np.float32),
                temperature=1.0,
            )
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2", help="Hugging Face folder")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    options = parser.parse_args()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
    torch.set_num_threads(1)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    config = TrainerConfig(max_sequence_tokens=128, device="cpu", optimizer=OptimizerConfig(lr=options.lr))
    engine = TrainerEngine(config, options.model)

    def published() -> torch.Tensor:
        """All weights in one bfloat16 tensor, as bits."""
        parts = [shard.tensor.detach().reshape(-1).bfloat16() for shard in engine.hf_shards()]
        return torch.cat(parts).view(torch.int16)

    former, received = published(), published()
    whole = torch.zeros_like(former)
    rows: list[tuple[float, float, float, float]] = []
    for step in range(options.steps):
        engine.sft_step(sums(options.batch, step, tokenizer))
        current = published()
        began = time.perf_counter()
        index = (current != former).nonzero()[:, 0].to(torch.int32)
        value = current[index]
        encoded = time.perf_counter()
        received[index] = value
        decoded = time.perf_counter()
        assert torch.equal(received, current), "the sparse way must be exact"
        copied = time.perf_counter()
        whole.copy_(current)
        whole_s = time.perf_counter() - copied
        rows.append((len(index) / len(current), encoded - began, decoded - encoded, whole_s))
        print(
            f"step {step + 1}: {rows[-1][0]:.1%} changed, {len(index) * 6 / 1e6:.1f} of {current.nbytes / 1e6:.1f} MB, "
            f"encode {rows[-1][1] * 1e3:6.1f} ms, decode {rows[-1][2] * 1e3:6.1f} ms, copy {whole_s * 1e3:6.1f} ms",
            flush=True,
        )
        former = current
    share, encode, decode, copy = (statistics.median(row[column] for row in rows) for column in range(4))
    print(
        json.dumps(
            {
                "model": Path(options.model).name,
                "lr": options.lr,
                "steps": options.steps,
                "changed": round(share, 4),
                "changed_each": [round(row[0], 4) for row in rows],
                "bytes_sparse_over_whole": round(share * 3, 3),  # int32 index and 2-byte value against 2 bytes
                "time_sparse_over_two_copies": round((encode + decode) / (2 * copy), 2),
                "ms": {name: round(s * 1e3, 1) for name, s in (("encode", encode), ("decode", decode), ("copy", copy))},
            }
        )
    )


if __name__ == "__main__":
    main()
