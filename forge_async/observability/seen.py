"""Episodes to read: those trained last in a live run, or those sampled into ``episodes.jsonl``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_async.observability.episodes import describe
from forge_async.observability.jsonl import read
from forge_async.observability.pieces import Decoder, Pieces
from forge_async.observability.tables import Listing
from forge_async.types import Episode, Group

COLUMNS = ("step", "episode", "prompt", "answer", "completion", "reward", "tokens", "versions", "ended by")


@dataclass(frozen=True)
class SeenEpisode:
    """One trained episode as a person reads it."""

    step: int
    """Policy version after the step that trained it."""
    record: dict[str, Any]
    """As in ``episodes.jsonl``: see ``observability.episodes.describe``."""
    episode: Episode | None = field(default=None, repr=False, compare=False)
    """With its tokens, log-probs and versions; None for one that was read from a file."""

    @property
    def prompt(self) -> str:
        """Its last message."""
        messages = self.record["prompt"]
        return str(messages[-1]["content"]) if messages else ""

    @property
    def text(self) -> str:
        """What was sampled in all turns, special tokens included."""
        return "\n".join(turn["completion"] for turn in self.record["turns"])

    @property
    def reward(self) -> float:
        return float(self.record["reward"])

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest policy version among its tokens."""
        every = [version for turn in self.record["turns"] for version, _ in turn["versions"]]
        return min(every), max(every)

    def cells(self) -> tuple[Any, ...]:
        turns = self.record["turns"]
        oldest, newest = self.versions
        return (
            self.step,
            self.record["episode_id"],
            self.prompt,
            self.record["answer"],
            self.text,
            self.reward,
            sum(turn["tokens"] for turn in turns),
            str(oldest) if oldest == newest else f"{oldest}-{newest}",
            self.record.get("cut") or turns[-1]["finish_reason"],
        )


def listing(episodes: Iterable[SeenEpisode]) -> Listing[SeenEpisode]:
    return Listing(episodes, "episodes", COLUMNS)


def of_groups(step: int, groups: Iterable[Group], tokenizer: Decoder) -> list[SeenEpisode]:
    """The episodes of a live run's batch."""
    pieces = Pieces(tokenizer)
    return [
        SeenEpisode(step, describe(group, episode, tokenizer, pieces), episode)
        for group in groups
        for episode in group.episodes
    ]


def of_file(path: Path, last: int | None = None, step: int | None = None) -> Listing[SeenEpisode]:
    """The last episodes of ``episodes.jsonl`` (of one step), oldest first; None takes all."""
    found = [
        SeenEpisode(record["step"], {k: v for k, v in record.items() if k != "step"})
        for record in read(path)
        if step is None or record["step"] == step
    ]
    return listing(found if last is None else found[len(found) - min(last, len(found)) :])
