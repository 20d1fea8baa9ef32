"""Shows that a config's gradient does not depend on how its tokens are split up, packed, ordered and spread over ranks.

``python -m forge_async.trainer.gradient_check JOB`` is one rank of it, started by :func:`gradient_check`.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from forge_async.errors import ForgeError
from forge_async.trainer.config import ParallelismConfig, TrainerConfig
from forge_async.trainer.engine import TrainerEngine
from forge_async.trainer.loss import LossFunction, PolicyTokens, policy_loss
from forge_async.types import TrainingSequence

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest relative deviation that rounding explains, by ``trainer.dtype``; in bfloat16 it grows with depth: 0.007 for 2
layers, 0.009 for 12, 0.018 for 30."""
SMALL_GRADIENT = 1e-3
"""A parameter's deviation is relative to its own gradient, or to this share of the whole gradient if that is more."""


@dataclass(frozen=True)
class GradientCheck:
    """What :func:`gradient_check` found."""

    deviations: dict[str, float]
    """Variation -> largest relative deviation of any parameter's gradient from that of whole batches on one process."""
    worst: dict[str, str]
    """Variation -> the parameter that deviates most."""
    tolerance: float
    gradient_norm: float
    """Of the gradient compared with."""
    tokens: int
    """Trained tokens."""

    @property
    def passed(self) -> bool:
        return self.gradient_norm > 0 and all(value <= self.tolerance for value in self.deviations.values())

    def __str__(self) -> str:
        lines = [
            f"{'ok' if value <= self.tolerance else 'FAILED':6} {name}: {value:.1e} of at most {self.tolerance:.0e}"
            + ("" if value <= self.tolerance else f" ({self.worst[name]})")
            for name, value in self.deviations.items()
        ]
        return "\n".join(lines)


def gradient_check(
    config: TrainerConfig,
    model_path: str | Path,
    sequences: Sequence[TrainingSequence] | None = None,
    *,
    loss: LossFunction = policy_loss,
    engine: type[TrainerEngine] = TrainerEngine,
    processes: int = 2,
    tolerance: float | None = None,
    timeout_s: float = 300.0,
) -> GradientCheck:
    """Compute one step's gradient in several ways that must agree, and compare.

    Compared with one process and whole rows are:

    - ``one_by_one``: each sequence alone, its full logits from a plain forward pass, each token's log-prob by its own
      index (this is what finds labels shifted by one);
    - ``micro_batches``: rows no longer than the longest sequence;
    - ``packing``: no shared prompts, and other chunks of log-probs;
    - ``row_order``: the sequences backwards;
    - ``processes``: the rows dealt to several processes, which the config's own layout spans if it has as many. They
      use CUDA devices where there is one for each, else the CPU.

    Args:
        config: the trainer's settings: loss, precision and the rest.
        model_path: Hugging Face folder.
        sequences: what to train on; by default :func:`sample_sequences`.
        loss: the loss over packed tokens, for a loss of one's own.
        engine: the trainer, for a trainer of one's own.
        processes: how many; below 2 the variation is left out.
        tolerance: largest deviation; by default :data:`TOLERANCES`.
        timeout_s: for the processes.

    Raises:
        ForgeError: a process failed or took too long; nothing of ``sequences`` counts.
    """
    had_group = dist.is_initialized()
    alone = dataclasses.replace(config, procs=1, parallelism=ParallelismConfig())
    trainer = engine(alone, model_path)
    trainer.loss_function = loss
    given = list(sequences) if sequences is not None else sample_sequences(trainer)
    longest = max(len(sequence.token_ids) for sequence in given)
    whole = dataclasses.replace(alone, micro_batch_tokens=sum(len(s.token_ids) for s in given))
    trainer.config = whole
    expected = trainer.gradient(given)
    if not expected:
        raise ForgeError("gradient_check: no token of the sequences has a loss mask and a finite behaviour log-prob")
    found = {"one_by_one": one_by_one(trainer, given)}
    chunk = max(1, alone.logprob_chunk // 3)
    for name, varied, order in (
        ("micro_batches", dataclasses.replace(whole, micro_batch_tokens=longest), 1),
        ("packing", dataclasses.replace(whole, share_prompts=False, logprob_chunk=chunk), 1),
        ("row_order", whole, -1),
    ):
        trainer.config = varied
        found[name] = trainer.gradient(given[::order])
    tokens = trainer.loss_weights(given).tokens
    if not had_group:
        trainer.close()  # mixed precision makes a group of one
    if processes > 1:
        spread = spread_over(config, processes, torch.cuda.device_count())
        found["processes"] = _by_processes(engine, spread, model_path, given, loss, timeout_s)
    compared = {name: deviation(expected, gradient) for name, gradient in found.items()}
    return GradientCheck(
        deviations={name: value for name, (value, _) in compared.items()},
        worst={name: parameter for name, (_, parameter) in compared.items()},
        tolerance=TOLERANCES[config.precision] if tolerance is None else tolerance,
        gradient_norm=_norm(expected.values()),
        tokens=tokens,
    )


def spread_over(config: TrainerConfig, processes: int, cuda_devices: int) -> TrainerConfig:
    """The config for so many processes; on the CPU, and by an attention that it has, unless each has a CUDA device."""
    layout = config.parallelism if config.procs == processes else ParallelismConfig()
    spread = dataclasses.replace(config, procs=processes, parallelism=layout)
    if config.device == "cpu" or cuda_devices >= processes:
        return spread
    return dataclasses.replace(spread, device="cpu", attention="auto")


def deviation(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> tuple[float, str]:
    """Largest relative deviation of a parameter's gradient, and the parameter."""
    floor = SMALL_GRADIENT * _norm(expected.values())
    if expected.keys() != found.keys():
        return float("inf"), ", ".join(sorted(expected.keys() ^ found.keys()))
    errors = {
        name: _norm([found[name].double() - wanted.double()]) / max(_norm([wanted]), floor)
        for name, wanted in expected.items()
    }
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return errors[worst], worst


def _norm(tensors: Any) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt())


def sample_sequences(trainer: TrainerEngine, seed: int = 0) -> list[TrainingSequence]:
    """Sequences with what makes gradients differ where a trainer is wrong.

    Groups of unequal size that share prompts; completions of 2 to 20 tokens; an episode in two sequences; a token
    without behaviour log-prob; log-probs near the model's own, so that some ratios are clipped and some are not.
    """
    random = np.random.default_rng(seed)
    vocabulary = trainer.hf_config["vocab_size"]
    room = max(1, min(20, trainer.max_sequence_tokens // 2))
    made: list[TrainingSequence] = []
    for group, size in enumerate((3, 2, 4, 1)):
        prompt = random.integers(0, vocabulary, min(3 + 4 * group, room))
        for index in range(size):
            completion = random.integers(0, vocabulary, int(random.integers(min(2, room), room + 1)))
            mask = np.arange(len(prompt) + len(completion)) >= len(prompt)
            made.append(
                TrainingSequence(
                    sequence_id=f"{group}.{index}",
                    token_ids=np.concatenate([prompt, completion]).astype(np.int32),
                    loss_mask=mask,
                    logprobs=np.zeros(len(mask), np.float32),
                    policy_versions=np.where(mask, trainer.version - index, -1).astype(np.int32),
                    advantages=np.where(mask, random.normal(0.3), 0).astype(np.float32),
                    episode_id="forked" if (group, index) in ((0, 0), (0, 1)) else "",
                )
            )
    given = []
    for sequence, values in zip(made, trainer.logprobs(made), strict=True):
        noisy = values + random.normal(0, 0.3, len(values))
        given.append(dataclasses.replace(sequence, logprobs=np.where(sequence.loss_mask, noisy, 0).astype(np.float32)))
    given[-1].logprobs[-1] = np.nan
    return given


def one_by_one(trainer: TrainerEngine, sequences: list[TrainingSequence]) -> dict[str, torch.Tensor]:
    """The gradient of ``trainer.gradient`` the slow way: a forward pass per sequence, and all of its logits."""
    weighted, parts = trainer.loss_weights(sequences), trainer.config.loss.resolved()

    def chosen(sequence: TrainingSequence, model: torch.nn.Module) -> torch.Tensor:
        """Log-prob of each trained token, under the logits after the token before it."""
        logits_TV = trainer.logits(sequence.token_ids, model) / sequence.temperature

        def logprob(t: int) -> torch.Tensor:
            kept = sequence.sampling_mask.of(np.array([t])).token_ids if sequence.sampling_mask is not None else ()
            among = logits_TV[t - 1] if not len(kept) else logits_TV[t - 1, torch.from_numpy(kept).long()]
            return logits_TV[t - 1, int(sequence.token_ids[t])] - torch.logsumexp(among, dim=-1)

        return torch.stack([logprob(int(t)) for t in np.flatnonzero(sequence.loss_mask)])

    for weight, sequence in zip(weighted.weight_S, sequences, strict=True):
        mask = sequence.loss_mask
        if not mask.any():
            continue
        logprob_K = chosen(sequence, trainer.model)
        reference_K = None
        if trainer.reference is not None:
            with torch.no_grad():
                reference_K = chosen(sequence, trainer.reference)
        like = logprob_K.detach()
        tokens = PolicyTokens(
            logprob_K=logprob_K,
            entropy_K=torch.zeros_like(like),
            behaviour_K=like.new_tensor(sequence.logprobs[mask].tolist()),
            advantage_K=like.new_tensor(sequence.advantages[mask].tolist()),
            weight_K=torch.full_like(like, float(weight)),
            staleness_K=like.new_tensor((trainer.version - sequence.policy_versions[mask]).tolist()),
            index_K=torch.zeros_like(like, dtype=torch.int64),
            sequences=1,
            reference_K=reference_K,
        )
        (trainer.loss_function(tokens, parts).loss / weighted.denominator).backward()
    return trainer.take_gradient()


def _by_processes(
    engine: type[TrainerEngine],
    config: TrainerConfig,
    model_path: str | Path,
    sequences: list[TrainingSequence],
    loss: LossFunction,
    timeout_s: float,
) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder) / "job", Path(folder) / "gradient.safetensors"
        job.write_bytes(cloudpickle.dumps((engine, config, str(model_path), sequences, loss, str(result))))
        command = [sys.executable, "-m", "forge_async.trainer.gradient_check", str(job)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(config.procs)}
        # Ranks with a thread for every core each would spend their time waiting for one.
        shared["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // config.procs))
        shared["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        ranks = [
            subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(config.procs)
        ]
        deadline = time.monotonic() + timeout_s
        try:
            while any(rank.poll() is None for rank in ranks):
                if any(rank.poll() for rank in ranks) or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        finally:
            codes = [rank.poll() for rank in ranks]
            for rank in ranks:
                rank.kill()
                rank.wait()
        if codes != [0] * config.procs:
            raise ForgeError(
                f"gradient_check: its {config.procs} processes ended with {codes} (None: none within {timeout_s:g} s); "
                "what they printed says why"
            )
        return load_file(result)


def _rank(job: Path) -> None:
    engine, config, model_path, sequences, loss, result = cloudpickle.loads(job.read_bytes())
    trainer = engine(config, model_path)
    trainer.loss_function = loss
    gradient = trainer.gradient(sequences)
    if trainer.rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in gradient.items()}, result)
    trainer.close()


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
