"""A journal that compares: every report of the loop with what was recorded, and stops at the first difference."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from forge_async.config import Config
from forge_async.errors import DataError
from forge_async.journal import Journal, Line, batch_line, completion_line, marks, plain_stats, token_ids
from forge_async.policy.turns import Diverged
from forge_async.replay.buffer import RecordedBuffer
from forge_async.replay.recorded import NotReplayable, Recorded
from forge_async.types import Completion, Group, StepStats, TrainingSequence

if TYPE_CHECKING:
    from forge_async.loop import AsyncLoop
    from forge_async.mesh import Service


class Replay(Journal):
    """Takes the loop's reports and compares each with what was recorded.

    Args:
        tell: gets one line per step.
    """

    def __init__(self, recorded: Recorded, tell: Callable[[str], None] = print) -> None:
        super().__init__()
        self.recorded, self.tell = recorded, tell
        by_kind: dict[str, list[Line]] = {}
        for line in recorded.lines:
            by_kind.setdefault(line["k"], []).append(line)
        self._done = {line["request"]: line for line in by_kind.get("done", [])}
        self._failed = {line["episode"] for line in by_kind.get("failed", [])}
        self._batches = {line["step"]: line for line in by_kind.get("batch", [])}
        self._stats = {line["step"]: line["stats"] for line in by_kind.get("step", [])}
        self._digests = {line["version"]: line["digest"] for line in by_kind.get("published", [])}
        self.compared = Counter[str]()
        """Tokens, completions, versions and steps that were as recorded."""
        self.batch_tokens = 0
        self._policy: Service | None = None

    def buffer(self, config: Config) -> RecordedBuffer:
        return RecordedBuffer(config, self.recorded.lines)

    def attach(self, loop: AsyncLoop, policy: Service) -> None:
        """Free the loop of what the schedule decides now."""
        loop.seats = asyncio.Semaphore(2**31)
        self._policy = policy
        for session, replica in self.recorded.sessions.items():
            policy.pin(session, replica)

    def started(self, device: str, threads: dict[str, float], config: str) -> None:
        recorded = self.recorded.lines[0]
        if device != recorded["device"] or threads != recorded["threads"]:
            raise NotReplayable(
                f"here the run would have {threads} threads per process on {device}, recorded were "
                f"{recorded['threads']} on {recorded['device']}: give it as many cores (taskset, or placement.*_cores)."
            )

    def asked(self, request_id: str) -> None:
        episode = request_id.rpartition("~")[0]
        if episode in self._failed and request_id not in self.recorded.requests:
            raise DataError(f"request {request_id}: its episode ended before it was sent when recorded")

    def completed(self, request_id: str, completion: Completion) -> None:
        line = self._done.get(request_id)
        if line is None:
            return
        here = completion_line(request_id, completion)
        if here != line:
            raise Diverged(f"request {request_id}: {_first_difference(here, line)}")
        self.compared["completions"] += 1
        self.compared["tokens"] += len(completion.token_ids)

    def failed(self, episode_id: str, reason: str, message: str) -> None:
        if episode_id not in self._failed:
            raise Diverged(f"episode {episode_id} failed here and not when recorded ({reason}): {message}")

    def batch(self, step: int, groups: Sequence[Group], sequences: Sequence[TrainingSequence]) -> None:
        line, here = self._batches[step], batch_line(step, groups, sequences)
        for (prompt, _, rewards), (_, _, recorded) in zip(here["groups"], line["groups"], strict=True):
            if rewards != recorded:
                raise Diverged(
                    f"step {step}, prompt {prompt}: its rewards are {rewards}, recorded were {recorded}. Is a reward "
                    "function random, or was it changed?"
                )
        for name, digest in here["digest"].items():
            if digest != line["digest"].get(name):
                raise Diverged(f"step {step}: the batch's {name} are not those recorded")
        self.batch_tokens = sum(len(sequence.token_ids) for sequence in sequences)

    def trained(self, step: int, stats: StepStats) -> None:
        here, recorded = plain_stats(stats), self._stats.get(step)
        if recorded is None:
            self.tell(f"step {step}: {here}; the recorded run ended in this step")
            return
        for name in recorded | here:
            if here.get(name) != recorded.get(name):
                raise Diverged(f"step {step}: {name} is {here.get(name)!r}, recorded was {recorded.get(name)!r}")
        self.compared["steps"] += 1
        self.tell(
            f"step {step}: {self.batch_tokens} tokens with prompts, version {stats.version}, loss {stats.loss:.6g}, "
            f"gradient norm {stats.grad_norm:.6g}: as recorded"
        )

    def published(self, version: int, digest: str) -> None:
        recorded = self._digests.get(version)
        if recorded is not None and digest != recorded:
            raise Diverged(f"version {version} has weights of digest {digest}, recorded was {recorded}")
        self.compared["versions"] += recorded is not None

    async def before_publish(self, version: int) -> None:
        assert self._policy is not None
        for report in await self._policy.fan_out("reached", version - 3):
            if isinstance(report, BaseException):
                raise report


def _first_difference(here: Line, recorded: Line) -> str:
    """Where two ``done`` lines part, in words."""
    ids, were = token_ids(here), token_ids(recorded)
    for position, (token, was) in enumerate(zip(ids, were, strict=False)):
        if token != was:
            return f"token {position} is {token}, recorded was {was} (of {len(ids)} and {len(were)} tokens)"
    if len(ids) != len(were):
        return f"it has {len(ids)} tokens, recorded were {len(were)}"
    for name in ("versions", "kv", "reason"):
        if here[name] != recorded[name]:
            return f"its {name} are {here[name]}, recorded were {recorded[name]}"
    position = int((marks(here) != marks(recorded)).argmax())
    return f"the log-prob of token {position} (id {ids[position]}) is another than recorded"
