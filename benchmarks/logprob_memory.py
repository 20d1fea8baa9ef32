"""Claim: the memory of a loss is bounded by what is kept of the softmax and a chunk, whatever the batch.

``python benchmarks/logprob_memory.py [--tokens 4096] [--vocabulary 49152] [--hidden 576] [--repeats 2] [--device cpu]``

Measures what forward pass, loss and backward pass over an output projection add to the peak of a process: log-probs and
entropies of the trained and of a reference model, every part of the loss (clip, sequence-level correction, KL), and the
gradients of hidden states and projection. Each case runs in a process of its own. What is there in any case is
subtracted: the gradients of projection and hidden states. The baseline computes all logits at once. On the CPU freed
memory goes back to the system at once (``MALLOC_MMAP_THRESHOLD_``), so that the peak is what is in use and not what
glibc keeps; ``--keep-freed`` measures with its defaults. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from forge_async.trainer.logprobs import Predictions, selected_logprobs
from forge_async.trainer.loss import PolicyTokens, policy_loss
from forge_async.trainer.loss_config import CorrectionConfig, KLConfig, LossConfig

MIB = 2**20
CONFIG = LossConfig(
    correction=CorrectionConfig(importance="mask", level="sequence", proximal="recompute"), kl=KLConfig(coefficient=0.1)
)


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def added(tokens: int, chunk: int, vocabulary: int, hidden: int, device: str) -> int:
    """Bytes by which one loss with its gradient raises the peak, once everything that is loaded lazily is there."""
    torch.manual_seed(0)
    loss_and_gradient(64, 16, 64, 8, device)()
    compute = loss_and_gradient(tokens, chunk, vocabulary, hidden, device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        compute()
        return torch.cuda.max_memory_allocated() - before
    before = resident()
    compute()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def loss_and_gradient(tokens: int, chunk: int, vocabulary: int, hidden: int, device: str) -> Callable[[], None]:
    """Allocates hidden states and projections; what is returned computes the loss and the gradients."""
    hidden_KD = torch.randn(tokens, hidden, device=device, requires_grad=True)
    weight_VD = (torch.randn(vocabulary, hidden, device=device) / hidden**0.5).requires_grad_()
    reference_VD = torch.randn(vocabulary, hidden, device=device) / hidden**0.5
    index_K = torch.arange(tokens, device=device)
    predictions = Predictions(index_K, index_K % vocabulary, torch.ones(tokens, device=device), chunk_size=chunk)

    def compute() -> None:
        with torch.no_grad():
            reference_K, _ = selected_logprobs(hidden_KD, reference_VD, predictions)
        logprob_K, entropy_K = selected_logprobs(hidden_KD, weight_VD, predictions)
        ones_K, behaviour_K = torch.ones_like(reference_K), logprob_K.detach() + 0.1
        row = PolicyTokens(
            logprob_K, entropy_K, behaviour_K, ones_K, ones_K, ones_K, index_K // 64, tokens // 64 + 1, reference_K
        )
        (policy_loss(row, CONFIG.resolved()).loss / tokens).backward()

    return compute


def measure(options: argparse.Namespace, tokens: int, chunk: int) -> float:
    """Median MiB over processes, without what is there in any case."""
    sizes = [str(value) for value in (tokens, chunk, options.vocabulary, options.hidden)]
    command = [sys.executable, __file__, "--one", *sizes, "--device", options.device]
    environment = os.environ | ({} if options.keep_freed else {"MALLOC_MMAP_THRESHOLD_": str(MIB)})
    runs = [
        int(subprocess.run(command, check=True, capture_output=True, env=environment).stdout)
        for _ in range(options.repeats)
    ]
    in_any_case = 4 * options.hidden * (options.vocabulary + tokens)
    return (statistics.median(runs) - in_any_case) / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--keep-freed", action="store_true", help="let glibc keep freed blocks below 32 MiB")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--one", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        tokens, chunk, vocabulary, hidden = options.one
        print(added(tokens, chunk, vocabulary, hidden, options.device))
        return
    batches = [options.tokens // 4, options.tokens]
    table: dict[int, list[float]] = {}
    print(f"MiB added to the peak beyond gradients; {options.vocabulary} tokens of vocabulary")
    print(f"{'chunk':>8}" + "".join(f"{tokens:>8} tok" for tokens in batches) + "   one chunk of logits")
    for chunk in options.chunks:
        table[chunk] = [measure(options, tokens, chunk) for tokens in batches]
        logits = 4 * chunk * options.vocabulary / MIB
        print(f"{chunk:>8}" + "".join(f"{value:>12.0f}" for value in table[chunk]) + f"{logits:>12.0f}", flush=True)
    full = [measure(options, tokens, tokens) for tokens in batches]
    print(f"{'all':>8}" + "".join(f"{value:>12.0f}" for value in full))
    first, last = options.chunks[0], options.chunks[-1]
    result = {
        "tokens": batches,
        "vocabulary": options.vocabulary,
        "repeats": options.repeats,
        "mib": {str(chunk): [round(value) for value in values] for chunk, values in table.items()},
        "mib_all_logits": [round(value) for value in full],
        "batch_4x_over_1x": {str(chunk): round(values[1] / values[0], 3) for chunk, values in table.items()},
        "all_logits_batch_4x_over_1x": round(full[1] / full[0], 3),
        f"chunk_{last}_over_{first}": round(table[last][1] / table[first][1], 3),
        f"all_logits_over_chunk_{first}": round(full[1] / table[first][1], 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
