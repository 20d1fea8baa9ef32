"""The trainer of one rank: a torchtitan model, its optimizer and the steps on it. No actor, no store.

Works alone in a process (``world_size`` 1, no process group needed) and, with the environment of torch elastic
(RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), as one of several ranks laid out by ``config.parallelism``. Methods marked
*collective* must be called on every rank with the same arguments.

Packed rows are dealt to the data-parallel ranks; the ranks of a tensor-parallel group get the same rows, and sums over
ranks count each of them once.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from forge_async.errors import ConfigError, DataError, RunFailed
from forge_async.trainer import titan_compat as titan
from forge_async.trainer import weights
from forge_async.trainer.checkpoint import load_checkpoint, save_checkpoint
from forge_async.trainer.config import TrainerConfig
from forge_async.trainer.logprobs import KeptIds, Predictions
from forge_async.trainer.loss import TokenSums, cross_entropy_loss, grpo_loss
from forge_async.trainer.model import check_parallelism, model_spec, read_hf_config
from forge_async.trainer.packing import PackedRow, pack, pad_row
from forge_async.trainer.segments import attention_layout
from forge_async.types import StepStats, TrainingSequence


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
        self._handed_out: tuple[list[int], list[weights.HfShard]] | None = None
        """Where parameters lay, and the shards that view them, which serve again while they lie there."""
        self.before_update: Callable[[], None] = lambda: None
        """Called before parameters change: whoever reads them beside training may hold the change up."""
        self.hf_config = read_hf_config(model_path)
        self.device = _device(config)
        self.rank = int(os.environ.get("RANK", "0")) if config.procs > 1 else 0
        self.world_size = config.procs
        self.data_rank, self.data_ranks = 0, 1
        """This rank's share of the rows, and how many shares there are."""
        self._data_group: dist.ProcessGroup | None = None
        titan.quiet_titan()
        titan.distributed_utils.set_spmd_backend("partial_dtensor")
        torch.manual_seed(seed)
        self.max_sequence_tokens = min(
            config.max_sequence_tokens, self.hf_config.get("max_position_embeddings", config.max_sequence_tokens)
        )
        self._attention = "varlen" if config.attention == "varlen" else "segments"
        check_parallelism(self.hf_config, config.parallelism)
        spec = model_spec(self.hf_config, max_sequence_tokens=self.max_sequence_tokens, attention=self._attention)
        self.model = self._build(spec)
        self.adapter = spec.state_dict_adapter(spec.model, None)
        weights.load_hf_weights(self.model, self.adapter, self.model_path)
        optimizer = config.optimizer
        builder = titan.default_adamw(
            lr=optimizer.lr, betas=tuple(optimizer.betas), eps=optimizer.eps, weight_decay=optimizer.weight_decay
        )
        self.optimizers = builder.build(model_parts=[self.model])
        self.schedulers = titan.LRSchedulersContainer(
            self.optimizers, lambda step: optimizer.factor(step, self.total_steps)
        )

    def _build(self, spec: Any) -> torch.nn.Module:
        """Meta device, shard, materialise: so that no rank ever holds the whole model."""
        sharded = self.world_size > 1 or self.config.dtype != "float32"
        if sharded:
            parallel, training = self._titan_settings()
            world = titan.distributed_utils.init_distributed(titan.CommConfig(trace_buf_size=0))
            if world != self.world_size:
                raise ConfigError("procs", self.world_size, f"the number of processes started, {world}")
            dimensions = titan.ParallelDims.from_config(parallel, world)
            data_mesh = dimensions.get_optional_mesh("batch")
            if data_mesh is not None:
                self.data_rank, self.data_ranks = data_mesh.get_local_rank(), data_mesh.size()
                self._data_group = data_mesh.get_group()
            settings = SimpleNamespace(parallelism=parallel, training=training, debug=titan.DebugConfig())
            spec.model.update_from_config(config=settings)
        with torch.device("meta"), titan.titan_utils.set_default_dtype(torch.float32):
            model = spec.model.build()
        if sharded:
            titan.keep_tied(model)
            model = spec.parallelize_fn(
                model,
                parallel_dims=dimensions,
                training=training,
                parallelism=parallel,
                compile_config=titan.CompileConfig(),
                ac_config=None,
                dump_folder="",
            )
            if dist.get_backend() == "gloo":
                titan.use_plain_sums(model)
        model.to_empty(device=self.device)
        with torch.no_grad():
            model.init_states(buffer_device=None)
        return model.train()

    def _titan_settings(self) -> tuple[Any, Any]:
        if self.world_size == 1:
            alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
            for name, value in alone.items():
                os.environ.setdefault(name, value)
        parallel = titan.ParallelismConfig(
            data_parallel_shard_degree=self.config.parallelism.dp_shard,
            data_parallel_replicate_degree=self.config.parallelism.dp_replicate,
            tensor_parallel_degree=self.config.parallelism.tp,
            expert_parallel_degree=self.config.parallelism.ep,
            spmd_backend="partial_dtensor",
        )
        training = titan.TrainingConfig(
            dtype="float32", mixed_precision_param=self.config.dtype, seq_len=self.max_sequence_tokens
        )
        return parallel, training

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self, sequences: list[TrainingSequence]) -> StepStats:
        """One GRPO step (:func:`grpo_loss`) over the number of countable tokens of all ``sequences``. Collective.

        Without a countable token nothing happens: no optimizer step, the version stays, the stats say ``skipped``.
        """
        counted, nonfinite = 0, 0
        for sequence in sequences:
            finite = np.isfinite(sequence.logprobs[sequence.loss_mask])
            counted += int(finite.sum())
            nonfinite += int((~finite).sum())

        def loss(row: PackedRow, logprob_K: torch.Tensor, entropy_K: torch.Tensor) -> TokenSums:
            behaviour_K = torch.from_numpy(row.behaviour).to(self.device)
            advantage_K = torch.from_numpy(row.advantage).to(self.device)
            return grpo_loss(logprob_K, entropy_K, behaviour_K, advantage_K, self.config.loss)

        return self._optimize(sequences, loss, counted, nonfinite)

    def sft_step(self, sequences: list[TrainingSequence]) -> StepStats:
        """One supervised step: mean cross entropy of the tokens under the loss mask. Collective."""

        def loss(row: PackedRow, logprob_K: torch.Tensor, entropy_K: torch.Tensor) -> TokenSums:
            return cross_entropy_loss(logprob_K, entropy_K)

        return self._optimize(sequences, loss, sum(int(sequence.loss_mask.sum()) for sequence in sequences), 0)

    def _optimize(self, sequences: list[TrainingSequence], loss: Any, counted: int, nonfinite: int) -> StepStats:
        started = time.monotonic()
        rows = self._rows(sequences) if counted else []
        learning_rate = float(self.schedulers.schedulers[0].get_last_lr()[0])
        if not counted:
            return _skipped(self.version, learning_rate, nonfinite, time.monotonic() - started)
        totals = dict.fromkeys(("loss", "ratio", "clipped", "entropy", "row_tokens"), 0.0)
        ratio_max = 0.0
        self.optimizers.zero_grad()
        for row in rows:
            logprob_K, entropy_K = self._forward(row)
            sums = loss(row, logprob_K, entropy_K)
            (sums.loss / counted).backward()
            totals["loss"] += float(sums.loss.detach())
            totals["ratio"] += sums.ratio
            totals["clipped"] += sums.clipped
            totals["entropy"] += sums.entropy
            totals["row_tokens"] += row.tokens if len(row.label) else 0
            ratio_max = max(ratio_max, sums.ratio_max)
        totals, ratio_max = self._reduce(totals, ratio_max)
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
        self.before_update()
        self.optimizers.step()
        self.schedulers.step()
        self.optimizers.zero_grad()
        self.version += 1
        return StepStats(
            version=self.version,
            loss=totals["loss"] / counted,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            ratio_mean=totals["ratio"] / counted,
            ratio_max=ratio_max,
            clip_fraction=totals["clipped"] / counted,
            entropy=totals["entropy"] / counted,
            trained_tokens=counted,
            total_tokens=int(totals["row_tokens"]),
            nonfinite_tokens=nonfinite,
            wall_s=time.monotonic() - started,
        )

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
            share_prefixes=self.config.share_prompts and self._attention == "segments",
            every_token=every_token,
        )
        return rows[self.data_rank]

    def _forward(self, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the row's predictions, float32 [K] each."""
        tokens, positions, masks = self._inputs(row)
        self.model.lm_head.predictions = Predictions(
            source_K=torch.from_numpy(row.source).to(self.device),
            label_K=torch.from_numpy(row.label).to(self.device),
            inverse_temperature_K=torch.from_numpy(row.inverse_temperature).to(self.device),
            kept=None if row.kept is None else KeptIds.on(self.device, row.kept),
            chunk_size=self.config.logprob_chunk,
        )
        try:
            output = self.model(tokens, positions=positions, attention_masks=masks)
        finally:
            self.model.lm_head.predictions = None
        return output[0], output[1]

    def _inputs(self, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Token ids [1, T], positions [1, T] and what the inner attention takes as its masks."""
        row = pad_row(row, self.config.parallelism.tp)  # sequence parallelism deals the tokens out in equal parts
        tokens = torch.from_numpy(row.token_ids).to(self.device)[None]
        positions = torch.from_numpy(row.positions).to(self.device)[None]
        if self._attention == "segments":
            return tokens, positions, attention_layout(row.segments).to(self.device)
        return tokens, positions, titan.create_varlen_metadata_for_document(positions)

    def _reduce(self, totals: dict[str, float], ratio_max: float) -> tuple[dict[str, float], float]:
        if self._data_group is None:
            return totals, ratio_max
        sums = torch.tensor(list(totals.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(sums, group=self._data_group)
        highest = torch.tensor(ratio_max, dtype=torch.float64, device=self.device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self._data_group)
        return dict(zip(totals, sums.tolist(), strict=True)), float(highest)

    # -- weights -------------------------------------------------------------------------------------------------

    def hf_shards(self) -> list[weights.HfShard]:
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
    def hf_layout(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """dtype and shape of every tensor in full under its Hugging Face name, in the same order on every rank."""
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
        self._barrier()

    def load_checkpoint(self, folder: str | Path) -> dict[str, Any]:
        """Restore what :meth:`save_checkpoint` wrote, on any number of ranks; returns its ``extra``. Collective."""
        groups = [group for optimizer in self.optimizers.optimizers for group in optimizer.param_groups]
        settings = [{name: group[name] for name in ("betas", "eps", "weight_decay")} for group in groups]
        self.before_update()
        self.version, extra = load_checkpoint(Path(folder), self._checkpoint_state())
        # Moments are the checkpoint's, settings are this run's: loading has replaced both.
        groups = [group for optimizer in self.optimizers.optimizers for group in optimizer.param_groups]
        rates = [rate for scheduler in self.schedulers.schedulers for rate in scheduler.get_last_lr()]
        for group, own, rate in zip(groups, settings, rates, strict=True):
            group.update(own, lr=rate)
        return extra

    def _checkpoint_state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizers, "schedule": self.schedulers}

    def _barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _device(config: TrainerConfig) -> torch.device:
    wanted = config.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("device", config.device, "cpu or auto on a machine without a CUDA device")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _skipped(version: int, learning_rate: float, nonfinite: int, wall_s: float) -> StepStats:
    zeros = {
        field.name: 0.0
        for field in dataclasses.fields(StepStats)
        if field.name in ("loss", "grad_norm", "ratio_mean", "ratio_max", "clip_fraction", "entropy")
    }
    return StepStats(
        version=version,
        learning_rate=learning_rate,
        trained_tokens=0,
        total_tokens=0,
        nonfinite_tokens=nonfinite,
        wall_s=wall_s,
        skipped=True,
        **zeros,
    )
