"""A rank's models, from Hugging Face folders, laid out over the trainer's processes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from forge_async.errors import ConfigError
from forge_async.trainer import titan_compat as titan
from forge_async.trainer import weights
from forge_async.trainer.config import TrainerConfig
from forge_async.trainer.model import model_spec


class ModelBuilder:
    """Builds models on the mesh that ``config`` describes; joins its process group at the start. Collective.

    Without several processes and without mixed precision there is no mesh, and none is needed. Whether a model can be
    laid out so is for the caller to check before.

    Attributes:
        data_rank, data_ranks: this rank's share of the rows, and how many shares there are.
        data_group: the ranks that get different rows; None where there is one share.
    """

    def __init__(self, config: TrainerConfig, device: torch.device, max_sequence_tokens: int) -> None:
        self.config, self.device, self.max_sequence_tokens = config, device, max_sequence_tokens
        self.data_rank, self.data_ranks = 0, 1
        self.data_group: dist.ProcessGroup | None = None
        self._dimensions: Any = None
        titan.quiet_titan()
        titan.distributed_utils.set_spmd_backend("partial_dtensor")
        if config.procs == 1 and config.precision == "float32":
            return
        self._parallel, self._training = self._titan_settings()
        world = titan.distributed_utils.init_distributed(titan.CommConfig(trace_buf_size=0))
        if world != config.procs:
            raise ConfigError("procs", config.procs, f"the number of processes started, {world}")
        self._dimensions = titan.ParallelDims.from_config(self._parallel, world)
        data_mesh = self._dimensions.get_optional_mesh("batch")
        if data_mesh is not None:
            self.data_rank, self.data_ranks = data_mesh.get_local_rank(), data_mesh.size()
            self.data_group = data_mesh.get_group()

    def build(self, hf_config: dict[str, Any], model_path: Path) -> tuple[torch.nn.Module, Any]:
        """The model of a folder with its weights, in training mode, and its state-dict adapter.

        Meta device, shard, materialise: so that no rank ever holds the whole model.
        """
        attention = self.config.attention_on(self.device.type)
        spec = model_spec(hf_config, max_sequence_tokens=self.max_sequence_tokens, attention=attention)
        sharded = self._dimensions is not None
        if sharded:
            settings = SimpleNamespace(parallelism=self._parallel, training=self._training, debug=titan.DebugConfig())
            spec.model.update_from_config(config=settings)
        with torch.device("meta"), titan.titan_utils.set_default_dtype(torch.float32):
            model = spec.model.build()
        checkpointing = titan.checkpointing(self.config.activation_checkpointing)
        if checkpointing is not None and not sharded:
            checkpointing.build(dump_folder="").apply(model)
        if sharded:
            titan.keep_tied(model)
            model = spec.parallelize_fn(
                model,
                parallel_dims=self._dimensions,
                training=self._training,
                parallelism=self._parallel,
                compile_config=titan.CompileConfig(),
                ac_config=checkpointing,
                dump_folder="",
            )
            if dist.get_backend() == "gloo":
                titan.use_plain_sums(model)
        if self.config.compile:
            titan.compile_layers(model)
        model.to_empty(device=self.device)
        with torch.no_grad():
            model.init_states(buffer_device=None)
        adapter = spec.state_dict_adapter(spec.model, None)
        weights.load_hf_weights(model, adapter, model_path)
        return model.train(), adapter

    def _titan_settings(self) -> tuple[Any, Any]:
        if self.config.procs == 1:
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
            dtype="float32", mixed_precision_param=self.config.precision, seq_len=self.max_sequence_tokens
        )
        return parallel, training


def trainer_device(config: TrainerConfig) -> torch.device:
    """This rank's device.

    Raises:
        ConfigError: a CUDA device is asked for and there is none.
    """
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
