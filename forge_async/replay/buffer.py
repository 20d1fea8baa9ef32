"""The buffer of a replay: who is admitted and what is trained was decided when the run was recorded."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

from forge_async.buffer import PromptTooLong, RolloutBuffer
from forge_async.buffer.gate import Versions, gate
from forge_async.config import Config
from forge_async.journal import Line
from forge_async.policy.turns import Diverged
from forge_async.types import Episode, Group, Prompt


class RecordedBuffer(RolloutBuffer):
    """Admits and hands out what was recorded, in that order; decides nothing."""

    def __init__(self, config: Config, lines: Sequence[Line]) -> None:
        super().__init__(config.buffer)
        self._admissions: deque[tuple[str, int, list[str]]] = deque()
        """(prompt, batches that were taken before it was admitted, episodes that it had from its attempt before)."""
        self._recorded: list[tuple[list[list[Any]], dict[str, int]]] = []
        """Per batch: its groups, and how often each prompt had been admitted."""
        admitted: Counter[str] = Counter()
        for line in lines:
            if line["k"] == "admit":
                admitted[line["prompt"]] += 1
                self._admissions.append((line["prompt"], len(self._recorded), line["kept"]))
            elif line["k"] == "batch":
                self._recorded.append((line["groups"], {prompt: admitted[prompt] for prompt, _, _ in line["groups"]}))
        self._taken = 0
        self._prompts: dict[str, Prompt] = {}
        self._finished: dict[str, list[Group]] = {}
        """By prompt, the groups of its attempts."""
        self._attempts: Counter[str] = Counter()
        """By prompt, those that were admitted."""
        self._kept: dict[str, tuple[Episode, ...]] = {}

    async def admit(self, source: Any) -> Prompt | None:
        """The next recorded prompt, once as many batches were taken as before it and its attempt before has ended."""
        while self._ended is None and self._admissions:
            if self._failure is not None:
                raise self._failure
            prompt_id, batches, kept = self._admissions[0]
            attempts = self._finished.get(prompt_id, [])
            if batches > self._taken or len(attempts) < self._attempts[prompt_id]:
                await self._changed.wait()
                continue
            self._admissions.popleft()
            self._attempts[prompt_id] += 1
            self._kept[prompt_id] = tuple(e for e in attempts[-1].episodes if e.episode_id in kept) if attempts else ()
            if prompt_id not in self._prompts:
                self._prompts[prompt_id] = self._next(source, prompt_id)
            return self._prompts[prompt_id]
        return None

    def kept(self, prompt_id: str) -> tuple[Episode, ...]:
        return self._kept[prompt_id]

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
        finished = self._finished[prompt_id][attempt - 1]
        # What the gate decides follows from versions, not from time.
        versions = [Versions.of(episode) for episode in finished.episodes]
        group = gate(finished, versions, self.trainer_version, self.config).group
        if group is None:
            raise Diverged(f"step {self._taken + 1}: prompt {prompt_id} of the batch is too old here")
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
