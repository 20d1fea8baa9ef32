"""``forge-async generate``: one prompt answered by a run's model, or by any other."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from forge_async.commands.export import export
from forge_async.commands.folders import config_of, run_folder
from forge_async.config import Config, load_config
from forge_async.errors import ModelNotFoundError
from forge_async.mesh import MeshRuntime, plan_placement
from forge_async.observability import RunFolder
from forge_async.observability.tables import Listing
from forge_async.policy.actor import PolicyActor
from forge_async.policy.config import SamplingConfig
from forge_async.prepare import check_model, load_tokenizer, model_positions
from forge_async.run.checkpoints import Checkpoints, exported_version, version_of
from forge_async.run.controls import Answer, generate, prompt_ids, sampling_of


async def answer(
    source: str, prompt: str, n: int = 1, seed: int | None = None, overrides: list[str] | None = None
) -> Listing[Answer]:
    """``n`` completions of ``prompt``.

    Args:
        source: a run's folder, whose newest weights are taken, exported or in a checkpoint; or a Hugging Face folder.
        overrides: settings (``key=value``) on top of the run's, or of the defaults.
    Raises:
        ForgeError: there is no model, or a setting is wrong.
    """
    folder = None if is_model(source) else run_folder(source)
    config, sampling = settings_of(folder, overrides or [])
    if folder is None:
        return await ask(config, sampling, Path(source), prompt, n, seed)
    newest, exported = Checkpoints(folder).newest(), exported_version(folder.model)
    version = -1 if newest is None else version_of(newest)
    if exported is not None and exported >= version:
        return await ask(config, sampling, folder.model, prompt, n, seed, exported)
    with tempfile.TemporaryDirectory(prefix="forge-async-generate-") as temporary:
        model = Path(temporary) / "model"
        export(folder, config, None, model)
        return await ask(config, sampling, model, prompt, n, seed, version)


def settings_of(folder: RunFolder | None, overrides: list[str]) -> tuple[Config, SamplingConfig]:
    """The run's config (None: the defaults) and its sampling, with ``overrides``; to be greedy, as training may not, is
    for the latter alone.

    Raises:
        ConfigError: a setting is wrong.
    """
    mine = "policy.sampling.temperature="
    others = [override for override in overrides if not override.startswith(mine)]
    config = load_config(None, others) if folder is None else config_of(folder, others)
    temperatures = [override.removeprefix(mine) for override in overrides if override.startswith(mine)]
    return config, sampling_of(config.policy, {"temperature": temperatures[-1]} if temperatures else {})


def is_model(source: str) -> bool:
    """Whether it is a Hugging Face folder rather than a run's.

    Raises:
        ModelNotFoundError: it is neither.
    """
    path = Path(source)
    found = (path / "config.json").is_file()
    if not found and not (path / "config.yaml").is_file():
        raise ModelNotFoundError(
            f"{source!r} is neither a run's folder (one that holds config.yaml) nor a Hugging Face one (config.json)."
        )
    return found


async def ask(
    config: Config, sampling: SamplingConfig, model: Path, prompt: str, n: int, seed: int | None, version: int = 0
) -> Listing[Answer]:
    """Start one replica on ``model``, whose weights are of ``version``, ask it, and end it."""
    check_model(model)
    tokenizer = load_tokenizer(model)
    longest = min(config.policy.max_model_len, model_positions(model) or config.policy.max_model_len)
    policy = replace(config.policy, num_replicas=1, max_model_len=longest)
    ids = prompt_ids(prompt, tokenizer, config.dataset)
    placement = plan_placement(config.placement, 1, 1, policy.tensor_parallel_size)
    async with MeshRuntime():
        builder = PolicyActor.options(procs=policy.tensor_parallel_size, cores=placement.policy)
        service = await builder.as_service(policy, model, version=version, num_replicas=1)
        for report in await service.fan_out("setup"):
            if isinstance(report, BaseException):
                raise report
        return await generate(service, ids, sampling, n, tokenizer, "asked", seed)
