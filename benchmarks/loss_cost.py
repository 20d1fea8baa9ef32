"""Claim: composing a loss of parts, and reporting on each, costs next to nothing of a training step.

``python benchmarks/loss_cost.py [--tokens 1024] [--vocabulary 49152] [--hidden 576] [--repeats 20] [--device cpu]``

Times loss and backward pass down to the log-probs of one row, for some settings of the loss and for a plain clipped
loss with three metrics (the baseline), in turns after a warm-up; medians. Beside them stand the log-probs themselves:
the output projection of a model of SmolLM2-135M's width, forward and backward, the smallest part of a step that no loss
can do without. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from forge_async.trainer.logprobs import Predictions, selected_logprobs
from forge_async.trainer.loss import PolicyTokens, policy_loss
from forge_async.trainer.loss_config import CorrectionConfig, KLConfig, LossConfig

LOSSES = {
    "grpo": LossConfig(),
    "decoupled, truncated": LossConfig(correction=CorrectionConfig(proximal="recompute", importance="truncate")),
    "gspo, masked, KL": LossConfig(
        algorithm="gspo",
        correction=CorrectionConfig(importance="mask", level="sequence"),
        kl=KLConfig(coefficient=0.1),
    ),
}


@dataclass(frozen=True)
class Row:
    """K tokens' values, float32 [K]."""

    logprob_K: torch.Tensor
    behaviour_K: torch.Tensor
    advantage_K: torch.Tensor

    def policy(self, config: LossConfig) -> None:
        """The loss of the trainer and its gradient."""
        current_K = self.logprob_K.requires_grad_()
        like = self.logprob_K.detach()
        tokens = PolicyTokens(
            logprob_K=current_K,
            entropy_K=like,
            behaviour_K=self.behaviour_K,
            advantage_K=self.advantage_K,
            weight_K=torch.ones_like(like),
            staleness_K=torch.ones_like(like),
            index_K=torch.arange(len(like), device=like.device) // 64,
            sequences=len(like) // 64 + 1,
            reference_K=self.behaviour_K if config.kl.coefficient else None,
        )
        sums = policy_loss(tokens, config.resolved())
        sums.loss.backward()
        sums.totals.tolist()

    def plain(self) -> None:
        """The baseline: a clipped ratio, its mean, its maximum and how many are clipped."""
        current_K = self.logprob_K.requires_grad_()
        ratio_K = (current_K - self.behaviour_K).clamp(-20, 20).exp()
        gain_K = torch.minimum(ratio_K * self.advantage_K, ratio_K.clamp(0.8, 1.2) * self.advantage_K)
        (-gain_K.sum()).backward()
        with torch.no_grad():
            stopped_K = ((ratio_K > 1.2) & (self.advantage_K > 0)) | ((ratio_K < 0.8) & (self.advantage_K < 0))
            torch.stack([ratio_K.sum(), ratio_K.max(), stopped_K.sum()]).tolist()


def head(options: argparse.Namespace) -> Callable[[], None]:
    """Log-probs of one row and the gradient of the projection."""
    index_K = torch.arange(options.tokens, device=options.device)
    hidden_KD = torch.randn(options.tokens, options.hidden, device=options.device, requires_grad=True)
    weight_VD = torch.randn(options.vocabulary, options.hidden, device=options.device).mul(0.02).requires_grad_()
    predictions = Predictions(index_K, index_K % options.vocabulary, torch.ones_like(index_K, dtype=torch.float32))

    def compute() -> None:
        selected_logprobs(hidden_KD, weight_VD, predictions)[0].sum().backward()

    return compute


def timed(compute: Callable[[], None], device: str) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    compute()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    torch.manual_seed(0)
    logprob_K = torch.rand(options.tokens, device=options.device).log()
    noise_K, advantage_K = (torch.randn(options.tokens, device=options.device) for _ in range(2))
    row = Row(logprob_K, logprob_K + 0.2 * noise_K, advantage_K)
    cases: dict[str, Callable[[], None]] = {"plain": row.plain}
    cases |= {name: lambda config=config: row.policy(config) for name, config in LOSSES.items()}  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(options.repeats + 2):
        for name, compute in cases.items():
            value = timed(compute, options.device)
            if repeat >= 2:
                times[name].append(value)
    logprobs = head(options)
    times["log-probs"] = [timed(logprobs, options.device) for _ in range(4)][1:]
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{options.tokens} tokens, {os.environ.get('OMP_NUM_THREADS', 'all')} threads")
    print(f"{'':>22} {'ms':>9} {'of the log-probs':>17}")
    for name, value in medians.items():
        print(f"{name:>22} {value:9.2f} {value / medians['log-probs']:17.2%}")
    result = {"tokens": options.tokens, "vocabulary": options.vocabulary, "repeats": options.repeats}
    over = medians["log-probs"]
    print(
        json.dumps(
            result
            | {"ms": {name: round(value, 3) for name, value in medians.items()}}
            | {"grpo_over_plain": round(medians["grpo"] / medians["plain"], 2)}
            | {"over_logprobs": {name: round(medians[name] / over, 5) for name in cases}}
        )
    )


if __name__ == "__main__":
    main()
