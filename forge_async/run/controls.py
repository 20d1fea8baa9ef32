"""What a person asks of the policy and the trainer of a run: completions, and other settings from the next step on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

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

T = TypeVar("T")

ATTEMPTS = 3
"""Replicas that may die under one request made by hand."""
SHOWN_CHARACTERS = 200
"""Of an answer's text where it shows itself alone."""
ABORT_S = 5.0
"""Seconds that a replica has to abort a request whose caller has left."""

Asked = str | Sequence[dict[str, str]] | Sequence[int] | np.ndarray
"""A prompt: the text of a user message, chat messages, or token ids, which are taken as they are."""


@dataclass(frozen=True, repr=False)
class Answer:
    """A completion that was asked for by hand: ``text``, ``token_ids``, ``logprobs``, ``policy_versions``, and all else
    that is known of it in ``completion``."""

    text: str
    """Without special tokens."""
    completion: Completion

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= SHOWN_CHARACTERS else self.text[:SHOWN_CHARACTERS] + "…"
        versions = ", ".join(str(version) for version, _ in spans(self.policy_versions)) or "none"
        ended = f"versions {versions}, ended by {self.completion.finish_reason}"
        return f"Answer({text!r}, {len(self.token_ids)} tokens, {ended})"

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
    if not hasattr(asked, "__len__") or isinstance(asked, Mapping):
        raise DataError(f"the prompt is {asked!r}: give text, chat messages or token ids")
    if len(asked) and isinstance(asked[0], str):  # numpy would make ids of digits
        raise DataError(f"the prompt is a list of text, {asked!r}: give one prompt per call")
    if len(asked) and isinstance(asked[0], dict):
        return render_prompt(tokenizer, asked)  # type: ignore[arg-type]
    try:
        return np.asarray(asked, dtype=np.int32)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"the prompt is neither text nor chat messages nor token ids: {error}") from error


def sampling_of(config: PolicyConfig, settings: dict[str, Any]) -> SamplingConfig:
    """``policy.sampling`` with some settings replaced; errors name the full key."""
    with prefix_errors("policy"):
        return changed(config, {f"sampling.{name}": value for name, value in settings.items()}).sampling


async def surviving(call: Callable[[int], Awaitable[T]]) -> T:
    """What ``call``, given the number of its attempt, returns; made again where a replica died under it."""
    for attempt in range(ATTEMPTS):
        try:
            return await call(attempt)
        except ReplicaDied as error:
            cause = error
    raise ForgeError(f"the prompt was not answered: {cause}") from cause


async def generate(
    service: Service, ids: IdArray, sampling: SamplingConfig, n: int, tokenizer: Any, name: str, seed: int | None = None
) -> Listing[Answer]:
    """``n`` completions; ``name`` is new to the service. With ``seed`` the draws depend on it and their index alone.

    What a replica had under way when it died is asked again. When one cannot be answered, or this is cancelled, the
    others are aborted.

    Raises:
        ConfigError, DataError: an engine refuses the settings, or the prompt.
        ForgeError: no replica answered.
    """
    running: set[str] = set()

    async def one(index: int) -> Completion:
        own_seed = None if seed is None else request_seed(seed, str(index))

        async def once(attempt: int) -> Completion:
            request = f"{name}-{index}-{attempt}"
            running.add(request)
            try:  # one prompt, one prefix: all go to the same replica
                completion: Completion = await service.call("generate", ids, sampling, request, own_seed, session=name)
            except ReplicaDied:
                running.discard(request)
                raise
            running.discard(request)
            return completion

        return await surviving(once)

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
    """The policy of a run, ``run.policy``: :meth:`generate` asks it, :meth:`set_sampling` and :meth:`set_update_mode`
    change its settings while it runs."""

    __slots__ = ("_numbers", "_run")  # an attribute that is set by mistake is an error, and not without effect

    def __init__(self, run: Run) -> None:
        self._run = run
        self._numbers = itertools.count()

    def __repr__(self) -> str:
        run, policy = self._run, self._run.config.policy
        return (
            f"<policy of run {run.name}, {run.state}: temperature {policy.sampling.temperature:g}, at most "
            f"{policy.sampling.max_tokens} tokens, update mode {policy.update.mode}; "
            "generate(prompt), set_sampling(...), set_update_mode(mode)>"
        )

    @property
    def service(self) -> Service:
        """The replicas themselves; endpoints are those of ``PolicyActor``."""
        return self._run.engines.policy

    async def generate(self, prompt: Asked, n: int = 1, seed: int | None = None, **sampling: Any) -> Listing[Answer]:
        """``n`` completions by the live weights, while the run trains as well as while it is paused.

        Interrupted, it aborts them. Answered ones are an event (``by_hand``) of the run.

        Args:
            prompt: text becomes a user message, rendered as the dataset's own are; or chat messages, which go through
                the chat template as they are; or token ids.
            n: completions of this prompt.
            seed: repeats the draws on unchanged weights; None: others each time.
            sampling: settings of ``policy.sampling`` for this call alone, such as ``temperature=0``.
        Returns:
            A list of :class:`Answer` that shows itself as a table.
        Raises:
            RunStateError: the run is not up.
            ConfigError: a sampling setting is wrong.
            DataError: the prompt is too long, without a token, or no prompt at all.
            ForgeError: every replica that was asked died.
        """
        run = self._run
        run.require_up("generate")
        require(n >= 1, "n", n, "1 or more")
        settings = sampling_of(run.config.policy, sampling)
        ids = prompt_ids(prompt, run.parts.tokenizer, run.config.dataset)
        with prefix_errors("policy"):
            await surviving(lambda _: self.service.call("check", settings, ids))
        with run.parts.by_hand("a prompt was answered", tokens=len(ids), n=n):
            name = f"hand-{next(self._numbers)}"
            return await generate(self.service, ids, settings, n, run.parts.tokenizer, name, seed)

    async def set_sampling(self, **settings: Any) -> SamplingConfig:
        """Change ``policy.sampling`` for the prompts that are admitted from now on; returns what is set then.

        Completions under way keep their settings, and their temperature when they are trained.

        Args:
            settings: of ``policy.sampling``, such as ``temperature=0.8`` or ``max_tokens=64``.
        Raises:
            RunStateError: the run is not up.
            ConfigError: a setting is wrong, or cannot be changed in this run; nothing has changed then.
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
            await self.service.call("check", config.policy.sampling)
        run.parts.apply(config)
        if (bias := sampling_bias(config)) is not None:
            run.parts.recording.console.warn(bias)
        return config.policy.sampling

    async def set_update_mode(self, mode: str, kv: str = "keep") -> None:
        """Change how replicas take new weights, ``policy.update.mode``, in every one, between two forward passes.

        Args:
            mode: ``never_stop``, ``abort_resume``, ``abort_retry``, ``drain`` or ``blocking``.
            kv: with ``never_stop``, what becomes of the running requests' keys and values: ``keep`` or ``recompute``.
        Raises:
            RunStateError: the run is not up.
            ConfigError: there is no such mode, or it does not fit the run's other settings.
        """
        run = self._run
        config = run.changed({"policy.update.mode": mode, "policy.update.kv": kv})
        run.parts.apply(config)  # first: a replica that is respawned meanwhile takes it from there
        for report in await self.service.fan_out("set_mode", mode, kv):
            if isinstance(report, BaseException) and not isinstance(report, ReplicaDied):
                raise report


class TrainerControl:
    """The trainer of a run, ``run.trainer``: :meth:`set_lr` changes its learning rate, :meth:`logprobs` asks it."""

    __slots__ = ("_run",)

    def __init__(self, run: Run) -> None:
        self._run = run

    def __repr__(self) -> str:
        run = self._run
        rate = run.config.trainer.optimizer.lr
        return f"<trainer of run {run.name}, {run.state}: learning rate {rate:g}; set_lr(lr), logprobs(completions)>"

    @property
    def mesh(self) -> Any:
        """The trainer's ranks; endpoints are those of ``TrainerActor``."""
        return self._run.engines.trainer

    async def set_lr(self, lr: float) -> float:
        """Change ``trainer.optimizer.lr`` from the next step on; returns that step's rate.

        Warm-up and decay go on: they multiply the new value.

        Raises:
            RunStateError: the run is not up.
            ConfigError: ``lr`` is not a number above 0.
        """
        run = self._run
        config: Config = run.changed({"trainer.optimizer.lr": lr})
        rates = await run.parts.ask_trainer("set_learning_rate", float(lr))
        run.parts.apply(config)
        return float(rates[0])

    async def logprobs(self, completions: Sequence[Answer | Completion]) -> list[np.ndarray]:
        """Log-probs of the sampled tokens by the trainer's present weights.

        At the temperature, and over the tokens, that they were sampled from: exp of these less ``completion.logprobs``
        is the importance ratio.

        Args:
            completions: answers of ``run.policy.generate``, or completions of ``run.episodes()``.
        Returns:
            float32 [R] for each of them, R its sampled tokens.
        Raises:
            RunStateError: the run is not up.
            RunFailed: the trainer died.
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
        pace = self._run.require_up("stop")
        self._run.parts.end_early("The run was stopped from its page.")
        pace.put_off()
