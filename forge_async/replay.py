"""Repeating a recorded run: the same requests in the same forward passes, the same batches, and a comparison of all.

Nothing here looks at a clock. Every wait is for something that came earlier in the recorded run: a prompt is admitted
once as many batches were taken as before, an engine takes a turn once it has the commands of that turn, a batch leaves
once its groups are finished, and a version is published once the replicas hold those three before it (a replica had
them before, since the store was still writing the next ones). So a faithful schedule never deadlocks; one that was
edited may, which :func:`watch` notices.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_async.buffer import PromptTooLong, RolloutBuffer
from forge_async.config import Config, load_config
from forge_async.errors import ForgeError
from forge_async.journal import (
    LOOP_FILE,
    Journal,
    Line,
    batch_line,
    completion_line,
    machine,
    marks,
    plain_stats,
    token_ids,
    turns_file,
)
from forge_async.policy.turns import Diverged, read_turns
from forge_async.types import Completion, Group, Prompt, StepStats, TrainingSequence

if TYPE_CHECKING:
    from forge_async.loop import AsyncLoop
    from forge_async.mesh import Service
    from forge_async.run import Run

FOR_EVER_S = 1e9
"""Time limits of the recorded run are part of its schedule; the replay has none of its own."""


class NotReplayable(ForgeError):
    """Why a run cannot be repeated, or not as far as was asked for."""


@dataclass(frozen=True)
class Recorded:
    """A run's schedule, read from its folder."""

    folder: Path
    config: Config
    steps: int
    """How many are to be repeated."""
    lines: list[Line]
    sessions: dict[str, int]
    """Prompt (or ratio check) -> replica that got its requests."""
    warnings: list[str]

    @classmethod
    def read(cls, run: Path, steps: int | None = None) -> Recorded:
        """The first ``steps`` steps of a run (None: all).

        Raises:
            NotReplayable: nothing was recorded, what depends on more than the schedule, or fewer steps.
        """
        folder = run / "schedule"
        path = folder / LOOP_FILE
        if not path.is_file():
            raise NotReplayable(
                f"{run}: it has no schedule/{LOOP_FILE}. A run can be replayed if metrics.record_schedule was true."
            )
        lines = list(_lines(path))
        if not lines or lines[0].get("k") != "run":
            raise NotReplayable(f"{path} does not begin with a line of kind 'run': it is no schedule.")
        head, cut = lines[0], ""
        for index, line in enumerate(lines[1:], start=1):
            if line["k"] == "fault" or line["k"] == "run":
                cut = f"a replica was lost ({line['what']})" if line["k"] == "fault" else "the run was resumed"
                lines = lines[:index]
                break
        if head["device"] != "cpu":
            raise NotReplayable(f"{run} ran on {head['device']}: only runs on CPU can be repeated bit by bit.")
        done = sum(line["k"] == "step" for line in lines)
        if cut and steps is None:
            raise NotReplayable(
                f"{run}: after step {done} {cut}, and what follows depends on more than the schedule. "
                f"The part before can be replayed: --steps {done}."
                if done
                else f"{run}: {cut} before the first step ended; nothing can be replayed."
            )
        wanted = done if steps is None else steps
        if not 1 <= wanted <= done:
            raise NotReplayable(f"--steps {wanted}: {run} has {done} steps that can be replayed.")
        (folder / "config.yaml").write_text(head["config"], encoding="utf-8")
        config: Config = load_config(folder / "config.yaml")
        if config.resume:
            raise NotReplayable(f"{run} was resumed from a checkpoint: requests that were open then are not recorded.")
        return cls(folder, config, wanted, lines, _sessions(folder, config), list(_warnings(head)))

    def replay_config(self) -> Config:
        """The run's config, with a folder inside the run's own, and without time limits."""
        config = self.config
        update = replace(config.policy.update, timeout_s=FOR_EVER_S)
        return replace(
            config,
            name="replay",
            output_dir=str(self.folder.parent),
            policy=replace(config.policy, update=update),
            rollout=replace(config.rollout, timeout_s=FOR_EVER_S),
            store=replace(config.store, keep_versions=max(4, config.store.keep_versions)),
            metrics=replace(
                config.metrics,
                console=False,
                tensorboard=False,
                plot=False,
                record_schedule=False,
                episodes_per_step=config.buffer.groups_per_step * config.rollout.group_size,
            ),
        )


def _lines(path: Path) -> Iterator[Line]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            return  # cut off when the run was killed
        try:
            content = json.loads(line)
        except ValueError as error:
            raise NotReplayable(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(content, dict) or "k" not in content:
            raise NotReplayable(f"{path}:{number} is no line of a schedule: {line.strip()[:80]}")
        yield content


def _sessions(folder: Path, config: Config) -> dict[str, int]:
    sessions: dict[str, int] = {}
    for replica in range(config.policy.num_replicas):
        path = folder / turns_file(replica)
        if not path.is_file():
            raise NotReplayable(f"{path} is missing: the turns of replica {replica} were not recorded.")
        for _, _, entries in read_turns(path):
            sessions.update((session_of(item[1]), replica) for item in entries if item[0] == "submit")
    return sessions


def session_of(request_id: str) -> str:
    """``<prompt>.<episode>~<request>`` -> prompt; a ratio check is its own."""
    return request_id.rpartition("~")[0].rpartition(".")[0] or request_id


def _warnings(head: Line) -> Iterator[str]:
    for name, count in head["threads"].items():
        if count > 1:
            yield f"the {name} had {count:g} threads per process: sums may be in another order than recorded"
    here = machine()
    for name, recorded in head["machine"].items():
        if here.get(name) != recorded:
            yield f"{name} is {here.get(name)}, when recorded it was {recorded}: last bits may differ"


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
        if "Diverged" in message or episode_id not in self._failed:
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
        here, recorded = plain_stats(stats), self._stats[step]
        for name in recorded | here:
            if here.get(name) != recorded.get(name):
                raise Diverged(f"step {step}: {name} is {here.get(name)!r}, recorded was {recorded.get(name)!r}")
        self.compared["steps"] += 1
        self.tell(
            f"step {step}: {self.batch_tokens} tokens, version {stats.version}, loss {stats.loss:.6g}, "
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
                raise Diverged(str(report))


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


class RecordedBuffer(RolloutBuffer):
    """Admits and hands out what was recorded, in that order; decides nothing."""

    def __init__(self, config: Config, lines: Sequence[Line]) -> None:
        super().__init__(config.buffer)
        self._admissions: deque[tuple[str, int]] = deque()
        """(prompt, batches that were taken before it was admitted)."""
        self._recorded: list[tuple[list[list[Any]], dict[str, int]]] = []
        """Per batch: its groups, and how often each prompt had been admitted."""
        admitted: Counter[str] = Counter()
        for line in lines:
            if line["k"] == "admit":
                admitted[line["prompt"]] += 1
                self._admissions.append((line["prompt"], len(self._recorded)))
            elif line["k"] == "batch":
                self._recorded.append((line["groups"], {prompt: admitted[prompt] for prompt, _, _ in line["groups"]}))
        self._taken = 0
        self._prompts: dict[str, Prompt] = {}
        self._finished: dict[str, list[Group]] = {}

    async def admit(self, source: Any) -> Prompt | None:
        """The next recorded prompt, once as many batches were taken as before it."""
        while self._ended is None and self._admissions:
            if self._failure is not None:
                raise self._failure
            prompt_id, batches = self._admissions[0]
            if batches > self._taken:
                await self._changed.wait()
                continue
            self._admissions.popleft()
            if prompt_id not in self._prompts:
                self._prompts[prompt_id] = self._next(source, prompt_id)
            return self._prompts[prompt_id]
        return None

    def _next(self, source: Any, prompt_id: str) -> Prompt:
        while True:
            try:
                prompt: Prompt = next(source)
            except PromptTooLong:
                continue
            except StopIteration:
                raise Diverged(f"the dataset has ended, recorded was prompt {prompt_id}") from None
            if prompt.prompt_id != prompt_id:
                raise Diverged(f"the dataset's next prompt is {prompt.prompt_id}, recorded was {prompt_id}")
            return prompt

    def finish(self, group: Group) -> bool:
        self._finished.setdefault(group.prompt.prompt_id, []).append(group)
        self._wake()
        return True

    async def batches(self, version: Callable[[], int] | None = None) -> AsyncIterator[list[Group]]:
        """The recorded batches; waits for their groups."""
        while True:
            if self._failure is not None:
                raise self._failure
            if self._taken == len(self._recorded):
                return
            groups, attempts = self._recorded[self._taken]
            if all(len(self._finished.get(prompt_id, [])) >= count for prompt_id, count in attempts.items()):
                batch = [self._group(prompt_id, attempts[prompt_id], episodes) for prompt_id, episodes, _ in groups]
                self._taken += 1
                self._wake()
                yield batch
            else:
                await self._changed.wait()

    def _group(self, prompt_id: str, attempt: int, episode_ids: list[str]) -> Group:
        group = self._finished[prompt_id][attempt - 1]
        episodes = {episode.episode_id: episode for episode in group.episodes}
        for episode_id in episode_ids:
            if episode_id not in episodes:
                raise Diverged(f"step {self._taken + 1}: episode {episode_id} of the batch has failed here")
        chosen = tuple(episodes[episode_id] for episode_id in episode_ids)
        return replace(group, episodes=chosen, failed=group.failed + len(episodes) - len(chosen))

    def trained(self, batch: Sequence[Group], version: int) -> None:
        self.trainer_version = version
        for group in batch:
            self._finished.pop(group.prompt.prompt_id, None)
        self._wake()


async def watch(run: Run, stall_s: float) -> None:
    """End ``run`` when nothing has moved for ``stall_s`` seconds; cancelled by whoever started it."""
    loop = asyncio.get_running_loop()
    last, since = None, loop.time()
    while True:
        await asyncio.sleep(1.0)
        replicas = await run.policy.fan_out("status", timeout=30.0)
        trainer = (await run.trainer.call("status"))[0]
        states = [(s["turn"], s["version"]) if isinstance(s, dict) else repr(s) for s in replicas]
        now = (states, trainer["version"], trainer["busy_s"])
        if now != last:
            last, since = now, loop.time()
        elif loop.time() - since >= stall_s:
            lacks = [
                f"replica {index}: {status['lacks']}"
                for index, status in enumerate(replicas)
                if isinstance(status, dict) and status["lacks"]
            ]
            run.fail(
                Diverged(
                    f"nothing has moved for {stall_s:g} s after version {trainer['version']}: the schedule cannot go "
                    f"on. {'; '.join(lacks) or 'No replica waits for a command.'}"
                )
            )
            return


async def replay(run_folder: str | Path, steps: int | None = None, stall_s: float = 60.0) -> None:
    """What ``forge-async replay`` does.

    Raises:
        NotReplayable: before anything is started.
        Diverged: at the first difference.
    """
    from forge_async.run import launch

    recorded = Recorded.read(Path(run_folder), steps)
    for warning in recorded.warnings:
        print(f"warning: {warning}")
    compare = Replay(recorded)
    async with launch(recorded.replay_config(), compare) as run:
        watching = asyncio.ensure_future(watch(run, stall_s))
        try:
            async for step in run.steps():
                run.log(step)
                if step.index == recorded.steps:
                    break
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        where = run.folder.path
    counts = ", ".join(f"{count} {what}" for what, count in compare.compared.items())
    print(f"{counts}: as recorded. Episodes of every step: {where / 'episodes.jsonl'}")
