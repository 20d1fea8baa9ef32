"""What is in the buffer, prompt by prompt, for a person."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from forge_async.types import Group

State = Literal["generating", "ready", "training"]
COLUMNS = ("prompt", "state", "stamp", "age", "attempt", "rewards")


@dataclass(frozen=True)
class OpenPrompt:
    """A prompt that is admitted and neither trained nor dropped."""

    prompt_id: str
    state: State
    """Its rollouts run, its group waits for the trainer, or it is in the batch at hand."""
    stamp: int
    """Policy version at its admission."""
    age: int
    """The trainer's version minus the stamp: no token of it is staler."""
    attempt: int
    rewards: tuple[float, ...] = ()
    """Of its scored episodes; empty while it is generated."""

    @classmethod
    def of(
        cls, prompt_id: str, stamp: int, version: int, attempt: int, group: Group | None, in_batch: bool
    ) -> OpenPrompt:
        """``group``: None while it is generated; ``version``: the trainer's."""
        state: State = "generating" if group is None else "training" if in_batch else "ready"
        rewards = () if group is None else tuple(episode.reward for episode in group.episodes)
        return cls(prompt_id, state, stamp, version - stamp, attempt, rewards)

    def cells(self) -> tuple[Any, ...]:
        rewards = [round(reward, 3) for reward in self.rewards]
        return self.prompt_id, self.state, self.stamp, self.age, self.attempt, rewards
