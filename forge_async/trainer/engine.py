"""The trainer of one rank: a torchtitan model, its optimizer and the steps on it. No actor, no store.

Works alone in a process (``world_size`` 1, no process group needed) and, with the environment of torch elastic
(RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), as one of several ranks laid out by ``config.parallelism``. Methods marked
*collective* must be called on every rank with the same arguments.

Packed rows are dealt to the data-parallel ranks; the ranks of a tensor-parallel group get the same rows, and sums over
ranks count each of them once.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from forge_async.errors import DataError, RunFailed
from forge_async.store.layout import FullTensor, TensorShard
from forge_async.trainer import titan_compat as titan
from forge_async.trainer import weights
from forge_async.trainer.aggregation import LossWeights, loss_weights
from forge_async.trainer.build import ModelBuilder, trainer_device
from forge_async.trainer.checkpoint import load_checkpoint, save_checkpoint
from forge_async.trainer.config import TrainerConfig
from forge_async.trainer.logprobs import KeptIds, Predictions
from forge_async.trainer.loss import METRICS, LossFunction, LossSums, PolicyTokens, cross_entropy_loss, policy_loss
from forge_async.trainer.model import check_parallelism, check_reference, read_hf_config, row_costs
from forge_async.trainer.packing import PackedRow, pack, pad_row, plain_row
from forge_async.trainer.phases import Phases
from forge_async.trainer.segments import attention_layout, seen_until
from forge_async.trainer.step_stats import skipped_step, taken_step
from forge_async.types import StepStats, TrainingSequence

RowLoss = Callable[[PackedRow, LossWeights], LossSums]
"""Forward pass and loss of one row."""


class TrainerEngine:
    """One rank of the trainer.

    Args:
        total_steps: length of the run in optimizer steps; only learning rate decay needs it.
        seed: seeds torch; training itself draws nothing at random.

    Raises:
        ModelNotFoundError, ForgeError, ConfigError: the model folder or the settings are unusable.
    """

    def __init__(self, config: TrainerConfig, model_path: str | Path, total_steps: int = 1, seed: int = 0) -> None:
        self.config = config
        self.model_path = Path(model_path)
        self.total_steps = total_steps
        self.version = 0
        """Policy version: optimizer steps completed."""
        self._handed_out: tuple[list[int], list[TensorShard]] | None = None
        """Where parameters lay, and the shards that view them, which serve again while they lie there."""
        self.before_update: Callable[[], None] = lambda: None
        """Called before parameters change: whoever reads them beside training may hold the change up."""
        self.loss_function: LossFunction = policy_loss
        self._last_sequences: list[TrainingSequence] = []
        self._last_rows: list[tuple[PackedRow, torch.Tensor]] = []
        """This rank's rows of the last step with the log-probs [K] before it."""
        self.device = trainer_device(config)
        self.rank = int(os.environ.get("RANK", "0")) if config.procs > 1 else 0
        self.world_size = config.procs
        self.hf_config = read_hf_config(model_path)
        penalised = config.loss.kl.coefficient > 0
        reference_path = Path(config.loss.kl.reference or model_path)
        reference_config = read_hf_config(reference_path) if penalised else self.hf_config
        check_reference(self.hf_config, reference_config, reference_path)
        for each in (self.hf_config, reference_config):
            check_parallelism(each, config.parallelism)
        limits = [each.get("max_position_embeddings", math.inf) for each in (self.hf_config, reference_config)]
        self.max_sequence_tokens = min(config.max_sequence_tokens, *limits)
        self._row_costs = row_costs(self.hf_config)
        torch.manual_seed(seed)
        builder = ModelBuilder(config, self.device, self.max_sequence_tokens)
        self.data_rank, self.data_ranks, self._data_group = builder.data_rank, builder.data_ranks, builder.data_group
        self.phases = Phases(self.device)
        self.model, self.adapter = builder.build(self.hf_config, self.model_path)
        self.model.lm_head.register_forward_pre_hook(lambda *_: self.phases.enter("logprobs"))
        self.model.lm_head.register_forward_hook(lambda *_: self.phases.leave())
        self.reference: torch.nn.Module | None = None
        """The frozen model that a KL penalty refers to, laid out as the trained one."""
        if penalised:
            self.reference = builder.build(reference_config, reference_path)[0].requires_grad_(False)
        optimizer = config.optimizer
        adamw = titan.default_adamw(
            lr=optimizer.lr, betas=tuple(optimizer.betas), eps=optimizer.eps, weight_decay=optimizer.weight_decay
        )
        self.optimizers = adamw.build(model_parts=[self.model])
        self.schedulers = titan.LRSchedulersContainer(
            self.optimizers, lambda step: optimizer.factor(step, self.total_steps)
        )

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self, sequences: list[TrainingSequence]) -> StepStats:
        """One step of ``config.loss`` (:func:`policy_loss`) over all ``sequences``. Collective.

        Without a countable token nothing happens: no optimizer step, the version stays, the stats say ``skipped``.
        """
        return self._optimize(sequences, self.loss_weights(sequences), self._policy_sums(sequences))

    def sft_step(self, sequences: list[TrainingSequence]) -> StepStats:
        """One supervised step: mean cross entropy of the tokens under the loss mask. Collective."""
        count = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
        weighted = LossWeights(np.ones(len(sequences), np.float32), float(count), count)
        return self._optimize(sequences, weighted, lambda row, weighted: cross_entropy_loss(*self._forward(row)))

    def gradient(self, sequences: list[TrainingSequence]) -> dict[str, torch.Tensor]:
        """The gradient a :meth:`step` would apply, before clipping: whole tensors by parameter, on the CPU. Collective.

        Nothing changes. Empty where no token counts.
        """
        weighted = self.loss_weights(sequences)
        if not weighted.tokens:
            return {}
        self._accumulate(sequences, weighted, self._policy_sums(sequences))
        return self.take_gradient()

    def take_gradient(self) -> dict[str, torch.Tensor]:
        """What backward passes have added up, whole tensors on the CPU; the next ones begin at zero. Collective."""
        found = {}
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            if gradient is not None:
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                found[titan.plain_name(name)] = whole.detach().cpu().clone()
        self.optimizers.zero_grad()
        return found

    def loss_weights(self, sequences: list[TrainingSequence]) -> LossWeights:
        """How the losses of the tokens of ``sequences`` add up under ``config.loss``."""
        length = self.config.loss.constant_length or self.config.max_sequence_tokens
        return loss_weights(sequences, self.config.loss.resolved().aggregation, length)

    def _policy_sums(self, sequences: list[TrainingSequence]) -> RowLoss:
        parts = self.config.loss.resolved()
        starts = np.cumsum([0, *(len(sequence.token_ids) for sequence in sequences)])
        ages = [self.version - sequence.policy_versions for sequence in sequences]
        age = np.concatenate([np.zeros(0), *ages]).astype(np.float32)

        def loss(row: PackedRow, weighted: LossWeights) -> LossSums:
            reference_K = None
            if self.reference is not None:
                with torch.no_grad():
                    reference_K, _ = self._forward(row, self.reference)
            logprob_K, entropy_K = self._forward(row)
            self._last_rows.append((row, logprob_K.detach()))
            found, index = np.unique(row.sequence_index, return_inverse=True)
            tokens = PolicyTokens(
                logprob_K=logprob_K,
                entropy_K=entropy_K,
                behaviour_K=self._to_device(row.behaviour),
                advantage_K=self._to_device(row.advantage),
                weight_K=self._to_device(weighted.weight_S[row.sequence_index]),
                staleness_K=self._to_device(age[starts[row.sequence_index] + row.token_index]),
                index_K=self._to_device(index),
                sequences=len(found),
                reference_K=reference_K,
            )
            return self.loss_function(tokens, parts)

        return loss

    def _accumulate(
        self, sequences: list[TrainingSequence], weighted: LossWeights, loss: RowLoss
    ) -> tuple[dict[str, float], float]:
        """Add up the gradient of all rows; returns sums over all ranks, by metric, and the highest ratio."""
        self.optimizers.zero_grad()
        self._last_sequences, self._last_rows = sequences, []
        totals = torch.zeros(len(METRICS) + 2, dtype=torch.float64, device=self.device)
        ratio_max = torch.zeros((), device=self.device)
        with self.phases.phase("data"):
            rows = self._rows(sequences)
        for row in rows:
            sums = loss(row, weighted)
            with self.phases.phase("backward"):
                (sums.loss / weighted.denominator).backward()
            totals[:-2] += sums.totals
            ratio_max = torch.maximum(ratio_max, sums.ratio_max)
        totals[-2] = sum(row.tokens for row in rows if len(row.label))
        totals[-1] = sum(row.whole_tokens for row in rows)
        multiple = self.config.parallelism.tp
        width_R = torch.tensor([row.tokens + -row.tokens % multiple for row in rows], device=self.device)
        if self._data_group is not None:
            dist.all_reduce(totals, group=self._data_group)
            dist.all_reduce(ratio_max, op=dist.ReduceOp.MAX, group=self._data_group)
            dist.all_reduce(width_R, op=dist.ReduceOp.MAX, group=self._data_group)
        found = dict(zip((*METRICS, "row_tokens", "whole_tokens"), totals.tolist(), strict=True))
        return found | {"places": float(width_R.sum() * self.data_ranks)}, float(ratio_max)

    def _optimize(self, sequences: list[TrainingSequence], weighted: LossWeights, loss: RowLoss) -> StepStats:
        started = time.monotonic()
        learning_rate = float(self.schedulers.schedulers[0].get_last_lr()[0])
        if not weighted.tokens:
            return skipped_step(self.version, learning_rate, weighted.nonfinite, time.monotonic() - started)
        self.phases.begin()
        totals, ratio_max = self._accumulate(sequences, weighted, loss)
        with self.phases.phase("clip"):
            grad_norm = float(
                titan.distributed_utils.clip_grad_norm_(
                    list(self.model.parameters()),
                    self.config.max_grad_norm,
                    foreach=True,
                    ep_enabled=self.config.parallelism.ep > 1,
                )
            )
        if not np.isfinite(grad_norm):
            self.optimizers.zero_grad()
            raise RunFailed(
                f"trainer: the gradient norm at version {self.version} is {grad_norm}; the step was not applied. "
                "Lower trainer.optimizer.lr or look for a sequence with extreme log-probs or advantages."
            )
        with self.phases.phase("publish"):
            self.before_update()
        with self.phases.phase("optimizer"):
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
        self.version += 1
        phase_s = self.phases.end()
        return taken_step(
            totals,
            weighted,
            version=self.version,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            ratio_max=ratio_max,
            wall_s=time.monotonic() - started,
            phase_s=phase_s,
        )

    def token_logprobs(self, sequence_ids: Collection[str]) -> dict[str, np.ndarray]:
        """Of sequences of the last policy step: float32 [T] each, log-probs under the weights before it; NaN for tokens
        that were not trained, or were on another rank."""
        wanted = {i: s for i, s in enumerate(self._last_sequences) if s.sequence_id in sequence_ids}
        found = {s.sequence_id: np.full(len(s.token_ids), np.nan, np.float32) for s in wanted.values()}
        for row, logprob_K in self._last_rows:
            chosen = np.isin(row.sequence_index, list(wanted))
            if chosen.any():
                values = logprob_K.float().cpu().numpy()
                for k in np.flatnonzero(chosen):
                    found[wanted[int(row.sequence_index[k])].sequence_id][row.token_index[k]] = values[k]
        return found

    @torch.no_grad()
    def logprobs(self, sequences: list[TrainingSequence]) -> list[np.ndarray]:
        """Log-probs under the current weights, float32 [T] per sequence. Collective; every rank gets all of them.

        Entry t is the log-prob of token t given those before it, at the sequence's temperature; entry 0 is 0.
        """
        result = [np.zeros(len(sequence.token_ids), dtype=np.float32) for sequence in sequences]
        for row in self._rows(sequences, every_token=True):
            logprob_K, _ = self._forward(row)
            values = logprob_K.float().cpu().numpy()
            for position, (index, token) in enumerate(zip(row.sequence_index, row.token_index, strict=True)):
                result[index][token] = values[position]
        if self._data_group is not None:
            flat = torch.from_numpy(np.concatenate(result)).to(self.device)
            # Each entry was computed by one data-parallel rank and is 0 on the others.
            dist.all_reduce(flat, group=self._data_group)
            cuts = np.cumsum([len(values) for values in result])[:-1]
            result = np.split(flat.cpu().numpy(), cuts)
        return result

    def _rows(self, sequences: list[TrainingSequence], every_token: bool = False) -> list[PackedRow]:
        for sequence in sequences:
            if len(sequence.token_ids) > self.max_sequence_tokens:
                raise DataError(
                    f"{sequence.sequence_id}: {len(sequence.token_ids)} tokens; the trainer takes at most "
                    f"{self.max_sequence_tokens} (trainer.max_sequence_tokens, the model's max_position_embeddings)"
                )
        rows = pack(
            sequences,
            self.config.micro_batch_tokens,
            ranks=self.data_ranks,
            share_prefixes=self.config.share_prompts and self.config.attention != "varlen",
            every_token=every_token,
            costs=self._row_costs,
        )
        return rows[self.data_rank]

    def _forward(self, row: PackedRow, model: torch.nn.Module | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the row's predictions, float32 [K] each, by default of the trained model."""
        model = model or self.model
        with self.phases.phase("data"):
            tokens, positions, masks = self._inputs(row)
            model.lm_head.predictions = Predictions(
                source_K=self._to_device(row.source),
                label_K=self._to_device(row.label),
                inverse_temperature_K=self._to_device(row.inverse_temperature),
                kept=None if row.kept is None else KeptIds.on(self.device, row.kept),
                chunk_size=self.config.logprob_chunk,
            )
        try:
            with self.phases.phase("forward" if model is self.model else "reference"):
                output = model(tokens, positions=positions, attention_masks=masks)
        finally:
            model.lm_head.predictions = None
        return output[0], output[1]

    def _inputs(self, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Token ids [1, T], positions [1, T] and what the inner attention takes as its masks."""
        row = pad_row(row, self.config.parallelism.tp)  # sequence parallelism deals the tokens out in equal parts
        tokens = torch.from_numpy(row.token_ids).to(self.device)[None]
        positions = torch.from_numpy(row.positions).to(self.device)[None]
        attention = self.config.attention_on(self.device.type)
        if attention == "segments":
            return tokens, positions, attention_layout(row.segments).to(self.device)
        if attention == "flex":
            return tokens, positions, titan.tree_block_mask(self._to_device(seen_until(row.segments)))
        return tokens, positions, titan.create_varlen_metadata_for_document(positions)

    def logits(self, token_ids: np.ndarray, model: torch.nn.Module | None = None) -> torch.Tensor:
        """Logits [T, V] after each token of one text, with gradient; all at once, for short texts. Not with ``tp``."""
        tokens, positions, masks = self._inputs(plain_row([token_ids]))
        return (model or self.model)(tokens, positions=positions, attention_masks=masks)[0, : len(token_ids)]

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)

    # -- weights -------------------------------------------------------------------------------------------------

    def hf_shards(self) -> list[TensorShard]:
        """This rank's part of the current weights under Hugging Face names. Collective.

        Tensors share memory with live parameters: copy before the next step.
        """
        if self._handed_out is not None and self._handed_out[0] == weights.memory_of(self.model):
            shards = self._handed_out[1]
        else:
            shards = list(weights.hf_shards(self.model, self.adapter, self.rank, self.world_size))
            memory = weights.memory_of(self.model)
            views = {shard.tensor.untyped_storage().data_ptr() for shard in shards} <= set(memory)
            lasting = views and not weights.gathers(self.model, self.adapter)
            self._handed_out = (memory, shards) if lasting else None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the copies are made in another stream
        return shards

    @functools.cached_property
    def hf_layout(self) -> tuple[FullTensor, ...]:
        """Every tensor in full under its Hugging Face name, in the same order on every rank."""
        return weights.hf_layout(self.model, self.adapter)

    def export_hf(self, folder: str | Path) -> None:
        """Write a folder that transformers and vLLM load. Collective; rank 0 writes."""
        state = weights.full_hf_state(self.model, self.adapter)
        if self.rank == 0:
            weights.write_hf_folder(Path(folder), state, self.model_path, "float32")
        self._barrier()

    def save_checkpoint(self, folder: str | Path, extra: dict[str, Any]) -> None:
        """Write model, optimizer, schedule, version and ``extra`` (JSON) atomically to ``folder``. Collective."""
        save_checkpoint(Path(folder), self._checkpoint_state(), self.version, extra, self.rank)

    def load_checkpoint(self, folder: str | Path) -> dict[str, Any]:
        """Restore what :meth:`save_checkpoint` wrote, on any number of ranks; returns its ``extra``. Collective."""
        groups = [group for optimizer in self.optimizers.optimizers for group in optimizer.param_groups]
        settings = [{name: group[name] for name in ("betas", "eps", "weight_decay")} for group in groups]
        self.before_update()
        self.version, extra = load_checkpoint(Path(folder), self._checkpoint_state())
        # Moments are the checkpoint's, settings are this run's: loading has replaced both.
        groups = [group for optimizer in self.optimizers.optimizers for group in optimizer.param_groups]
        for group, own in zip(groups, settings, strict=True):
            group.update(own)
        self._apply_rates()
        return extra

    def set_learning_rate(self, peak: float) -> float:
        """Replace ``optimizer.lr`` from the next step on; warm-up and decay go on. The next step's rate. Every rank."""
        for scheduler in self.schedulers.schedulers:
            scheduler.base_lrs = [peak] * len(scheduler.base_lrs)
        self.schedulers.load_state_dict(self.schedulers.state_dict())  # which computes the rates from base_lrs
        return self._apply_rates()

    def _apply_rates(self) -> float:
        """Give the schedule's rates to the optimizers."""
        groups = [group for optimizer in self.optimizers.optimizers for group in optimizer.param_groups]
        rates = [rate for scheduler in self.schedulers.schedulers for rate in scheduler.get_last_lr()]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return float(rates[0])

    def _checkpoint_state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizers, "schedule": self.schedulers}

    def _barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()
