"""What a person asks of the policy and the trainer of a run: completions, and other settings from the next step on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_async.checks import completion_sequence, sampling_bias
from forge_async.config import Config, changed
from forge_async.errors import ConfigError, DataError, ForgeError, prefix_errors, require
from forge_async.journal import request_seed
from forge_async.mesh import ReplicaDied, Service
from forge_async.observability.episodes import spans
from forge_async.observability.tables import Listing
from forge_async.policy.config import PolicyConfig, SamplingConfig
from forge_async.rollout.config import DatasetConfig
from forge_async.rollout.rendering import build_messages, render_prompt
from forge_async.types import Completion, IdArray

if TYPE_CHECKING:
    from forge_async.run.handle import Run

ATTEMPTS = 3
"""Replicas that may die under one request made by hand."""
ABORT_S = 5.0
"""Seconds that a replica has to abort a request whose caller has left."""

Asked = str | Sequence[dict[str, str]] | Sequence[int] | np.ndarray
"""A prompt: the text of a user message, chat messages, or token ids, which are taken as they are."""


@dataclass(frozen=True)
class Answer:
    """A completion that was asked for by hand."""

    text: str
    """Without special tokens."""
    completion: Completion

    @property
    def token_ids(self) -> IdArray:
        """int32 [R]."""
        return self.completion.token_ids

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [R]: of each token under the distribution that it was sampled from."""
        return self.completion.logprobs

    @property
    def policy_versions(self) -> np.ndarray:
        """int32 [R]: a swap may come in the midst of a completion."""
        return self.completion.policy_versions

    def cells(self) -> tuple[Any, ...]:
        versions = [version for version, _ in spans(self.policy_versions)]
        return self.text, len(self.token_ids), float(self.logprobs.sum()), versions, self.completion.finish_reason


def prompt_ids(asked: Asked, tokenizer: Any, dataset: DatasetConfig) -> IdArray:
    """int32 [P]: the prompt as the run's own are rendered: text gets the dataset's system prompt and examples."""
    if isinstance(asked, str):
        return render_prompt(tokenizer, build_messages(asked, dataset.system_prompt, dataset.examples))
    if not hasattr(asked, "__len__"):
        raise DataError(f"the prompt is {asked!r}: give text, chat messages or token ids")
    if len(asked) and isinstance(asked[0], dict):
        return render_prompt(tokenizer, asked)  # type: ignore[arg-type]
    return np.asarray(asked, dtype=np.int32)


def sampling_of(config: PolicyConfig, settings: dict[str, Any]) -> SamplingConfig:
    """``policy.sampling`` with some settings replaced; errors name the full key."""
    with prefix_errors("policy"):
        return changed(config, {f"sampling.{name}": value for name, value in settings.items()}).sampling


async def generate(
    service: Service, ids: IdArray, sampling: SamplingConfig, n: int, tokenizer: Any, name: str, seed: int | None = None
) -> Listing[Answer]:
    """``n`` completions; ``name`` is new to the service. With ``seed`` the draws depend on it and their index alone.

    What a replica had under way when it died is asked again. When one cannot be answered, or this is cancelled, the
    others are aborted.
    """
    running: set[str] = set()

    async def one(index: int) -> Completion:
        own_seed = None if seed is None else request_seed(seed, str(index))
        for attempt in range(ATTEMPTS):
            request = f"{name}-{index}-{attempt}"
            running.add(request)
            try:  # one prompt, one prefix: all go to the same replica
                completion: Completion = await service.call("generate", ids, sampling, request, own_seed, session=name)
            except ReplicaDied as error:
                cause = error
                running.discard(request)
            else:
                running.discard(request)
                return completion
        raise ForgeError(f"the prompt was not answered: {cause}") from cause

    asked = [asyncio.ensure_future(one(index)) for index in range(n)]
    try:
        completions = await asyncio.gather(*asked)
    except BaseException:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        # The engines go on with requests whose caller has left.
        await asyncio.gather(*(service.fan_out("abort", request, timeout=ABORT_S) for request in running))
        raise
    answers = [Answer(tokenizer.decode(c.token_ids.tolist(), skip_special_tokens=True), c) for c in completions]
    return Listing(answers, "completions", ("text", "tokens", "log-prob", "versions", "ended by"))


class PolicyControl:
    """``run.policy``."""

    __slots__ = ("_numbers", "_run")  # an attribute that is set by mistake is an error, and not without effect

    def __init__(self, run: Run) -> None:
        self._run = run
        self._numbers = itertools.count()

    @property
    def service(self) -> Service:
        """The replicas themselves; endpoints are those of ``PolicyActor``."""
        return self._run.engines.policy

    async def generate(self, prompt: Asked, n: int = 1, seed: int | None = None, **sampling: Any) -> Listing[Answer]:
        """``n`` completions by the live weights, while the run trains as well as while it is paused.

        Args:
            prompt: text becomes a user message, rendered as the dataset's own are; or chat messages; or token ids.
            seed: repeats the draws on unchanged weights; None: others each time.
            sampling: settings of ``policy.sampling`` for this call alone, such as ``temperature=0``.
        Raises:
            RunStateError: the run is not up.
            ConfigError: a sampling setting is wrong.
            DataError: the prompt is empty or too long.
        """
        run = self._run
        run.require_up("generate")
        require(n >= 1, "n", n, "1 or more")
        settings = sampling_of(run.config.policy, sampling)
        ids = prompt_ids(prompt, run.parts.tokenizer, run.config.dataset)
        run.parts.by_hand("a prompt was answered", tokens=len(ids), n=n)
        name = f"hand-{next(self._numbers)}"
        return await generate(self.service, ids, settings, n, run.parts.tokenizer, name, seed)

    async def set_sampling(self, **settings: Any) -> SamplingConfig:
        """Change ``policy.sampling`` for the prompts that are admitted from now on; returns what is set then.

        Completions under way keep their settings, and their temperature when they are trained.

        Raises:
            ConfigError: a setting is wrong, or cannot be changed in this run.
        """
        run = self._run
        config = run.changed({f"policy.sampling.{name}": value for name, value in settings.items()})
        if "max_tokens" in settings and config.trainer.loss.resolved().overlong_share:
            raise ConfigError(
                "policy.sampling.max_tokens",
                settings["max_tokens"],
                "left as it is with trainer.loss.overlong_share above 0",
                "The reward of completions under way would be shaped by another limit than they had.",
            )
        with prefix_errors("policy"):
            await self.service.call("check_sampling", config.policy.sampling)
        run.parts.apply(config)
        if (bias := sampling_bias(config)) is not None:
            run.parts.recording.console.warn(bias)
        return config.policy.sampling

    async def set_update_mode(self, mode: str, kv: str = "keep") -> None:
        """Change ``policy.update.mode`` (and ``kv``) in every replica, between two forward passes.

        Raises:
            ConfigError: there is no such mode, or it does not fit the run's other settings.
        """
        run = self._run
        config = run.changed({"policy.update.mode": mode, "policy.update.kv": kv})
        run.parts.apply(config)  # first: a replica that is respawned meanwhile takes it from there
        for report in await self.service.fan_out("set_mode", mode, kv):
            if isinstance(report, BaseException) and not isinstance(report, ReplicaDied):
                raise report


class TrainerControl:
    """``run.trainer``."""

    __slots__ = ("_run",)

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def mesh(self) -> Any:
        """The trainer's ranks; endpoints are those of ``TrainerActor``."""
        return self._run.engines.trainer

    async def set_lr(self, lr: float) -> float:
        """Change ``trainer.optimizer.lr`` from the next step on; returns that step's rate.

        Warm-up and decay go on: they multiply the new value.

        Raises:
            ConfigError: it is not a number above 0.
        """
        run = self._run
        config: Config = run.changed({"trainer.optimizer.lr": lr})
        rates = await run.parts.ask_trainer("set_learning_rate", float(lr))
        run.parts.apply(config)
        return float(rates[0])

    async def logprobs(self, completions: Sequence[Answer | Completion]) -> list[np.ndarray]:
        """Log-probs of the sampled tokens by the trainer's present weights, float32 [R] each.

        At the temperature, and over the tokens, that they were sampled from: exp of these less ``completion.logprobs``
        is the importance ratio.
        """
        run = self._run
        run.require_up("logprobs")
        sampled = [each.completion if isinstance(each, Answer) else each for each in completions]
        sequences = [completion_sequence(f"{i}", each, each.temperature) for i, each in enumerate(sampled)]
        (scored, *_) = await run.parts.ask_trainer("logprobs", sequences)
        return [row[sequence.loss_mask] for row, sequence in zip(scored, sequences, strict=True)]


class PageControl:
    """What a run's page may ask for, whoever takes the steps: a caller's loop, or the run by itself."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    def state(self) -> str:
        """``running``, ``paused``, ``ended``, ``failed`` or ``stopped``."""
        state = self._run.state
        if state == "paused" and (pace := self._run.require_up("state")).iterates and not pace.holds:
            return "running"  # its caller is busy between two steps
        return {"held": "paused", "pausing": "running", "starting": "running"}.get(state, state)

    def hold(self) -> None:
        """Whoever takes steps waits before the next one; the one being trained ends."""
        self._run.require_up("pause").hold()

    def let_go(self) -> None:
        """End :meth:`hold`; where nobody takes steps, take them in the background."""
        pace = self._run.require_up("resume")
        pace.let_go()
        if pace.state == "paused" and not pace.iterates:
            pace.resume()

    def end(self) -> None:
        """The step being trained is the last one, as if ``steps`` had been reached."""
        pace, parts = self._run.require_up("stop"), self._run.parts
        parts.loop.ended_early = "The run was stopped from its page."
        parts.recording.console.warn(parts.loop.ended_early)
        pace.put_off()
