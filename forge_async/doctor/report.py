"""``forge-async doctor CONFIG``: starts the config's engines, checks, and prints a line for each check."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forge_async.checks import fresh_prompts
from forge_async.config import Config
from forge_async.doctor.at_rest import check_at_rest
from forge_async.doctor.finding import Finding
from forge_async.doctor.running import check_running
from forge_async.errors import ForgeError, RunFailed
from forge_async.prepare import ensure_model, load_tokenizer
from forge_async.rollout.datasets import PromptSource
from forge_async.rollout.environment import environment_maker, own_rows
from forge_async.run import launch

SAMPLES = 8
"""Prompts that are sampled for."""


async def examine(config: Config) -> AsyncIterator[Finding]:
    """Run all checks, cheap ones first; engines run in a temporary run folder and are stopped at the end.

    Raises:
        ForgeError: the config cannot be started at all.
    """
    await ensure_model(config.model)
    tokenizer = load_tokenizer(config.model.path)
    room = config.policy.max_model_len - config.policy.sampling.max_tokens
    environment = environment_maker(config.rollout)(tokenizer)
    rows = PromptSource(config.dataset, tokenizer, config.seed, room, own_rows(environment, config.dataset)).rows
    await environment.close()
    many = replace(config, checks=replace(config.checks, ratio_samples=SAMPLES))
    prompts = fresh_prompts(many, tokenizer, rows, room)
    if not prompts:
        figure = f"none of the first ones fits: each has more tokens than the {room} beside policy.sampling.max_tokens"
        yield Finding("prompts", False, figure, "Raise policy.max_model_len or dataset.max_prompt_tokens.")
        return
    for finding in check_at_rest(config, tokenizer, prompts):
        yield finding
    yield await check_gradient(config)
    with tempfile.TemporaryDirectory(prefix="forge-async-doctor-") as folder:
        quiet = replace(
            config,
            output_dir=folder,
            resume="",
            checks=replace(config.checks, ratio_samples=0),
            metrics=replace(config.metrics, console=False, tensorboard=False),
        )
        async with launch(quiet) as run:
            async for finding in check_running(run, prompts):
                yield finding


async def check_gradient(config: Config) -> Finding:
    """That the gradient does not depend on micro-batches, packing, order and rank count."""
    from forge_async.trainer.gradient_check import gradient_check

    check = "gradient: micro-batches, packing, order, ranks"
    try:
        result = await asyncio.to_thread(gradient_check, config.trainer.beside(config.policy.dtype), config.model.path)
    except (ForgeError, RunFailed) as error:
        return Finding(check, False, str(error), "See docs/losses.md.")
    worst = max(result.deviations, key=lambda name: result.deviations[name])
    figure = f"relative deviation at most {result.deviations[worst]:.1e} ({worst}) of {result.tolerance:.0e}"
    return Finding(check, result.passed, figure, "" if result.passed else f"The gradient depends on {worst}.")


async def diagnose(config: Config) -> bool:
    """Print the report as it comes; True if everything passed."""
    console, failed = Console(), 0
    console.print(Text(f"doctor of {config.name}: {config.model.path}, {config.dataset.name or config.dataset.path}"))
    async for finding in examine(config):
        failed += not finding.passed
        table = Table.grid(padding=(0, 1))
        table.add_column(width=6)
        table.add_column(width=46)
        table.add_column()
        mark = "[green]ok[/]" if finding.passed else "[red]FAILED[/]"
        # Figures quote answers and messages of users, where a "[/INST]" is no markup.
        table.add_row(mark, Text(finding.check), Text(finding.figure))
        if finding.remedy:
            table.add_row("", "", Text(finding.remedy, "yellow"))
        console.print(table)
    console.print(f"[red]{failed} checks failed[/]" if failed else "[green]all checks passed[/]")
    return not failed
