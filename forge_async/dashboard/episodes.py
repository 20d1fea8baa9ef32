"""The list of recorded episodes: where each line is, and what a list shows of it, read no sooner than it is needed."""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from forge_async.dashboard.tables import NO_LINE, Table

NUMBER = rb'(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|"-?(?:nan|inf)")'
EPISODE_HEAD = re.compile(
    rb'\{"step": (\d{1,9}), "episode_id": "((?:[^"\\]|\\.)*)", "reward": '
    + NUMBER
    + rb', "tokens": (\d{1,9}), "oldest": (-?\d{1,9}), '
    rb'"newest": (-?\d{1,9}),'
)
"""What ``EpisodeRecorder`` writes first."""

ORDERS = ("newest", "oldest", "best", "worst")
HEAD_BYTES = 256
UNREADABLE = -1
"""In place of the step, of a line that is no episode."""

Row = list[Any]
"""[Index, step, id, reward, tokens, oldest, newest version]."""


class EpisodeTable(Table):
    """``episodes.jsonl``: the lines' offsets, columns to sort and filter by once that is asked for, and the file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.clear()

    def clear(self) -> None:
        self.offsets = array("q")
        self.steps, self.tokens, self.oldest, self.newest = array("i"), array("i"), array("i"), array("i")
        self.rewards = array("d")

    def update(self) -> None:
        """Take in where new lines begin."""
        for starts in self.file.new_starts():
            self._follow_restart()
            self.offsets.frombytes(starts.astype(np.int64).tobytes())
        self._follow_restart()

    def index(self, most: int | None = None) -> bool:
        """Fill the columns for lines that are not in them yet, ``most`` at a time; True when none is left."""
        if len(self.steps) == len(self.offsets):
            return True
        done = len(self.steps)
        with self.file.path.open("rb") as file:
            for offset in self.offsets[done : None if most is None else done + most]:
                step, _, reward, tokens, oldest, newest = self._head(file.fileno(), offset)
                self.broken += step == UNREADABLE
                self.steps.append(step)
                self.tokens.append(tokens)
                self.oldest.append(oldest)
                self.newest.append(newest)
                self.rewards.append(reward)
        return len(self.steps) == len(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets)

    def rows(self, indices: np.ndarray) -> list[Row]:
        """What a list shows of the episodes at ``indices``."""
        if not len(indices):
            return []
        found: list[Row] = []
        with self.file.path.open("rb") as file:
            for index in indices.tolist():
                step, identity, reward, *rest = self._head(file.fileno(), self.offsets[index])
                found.append([index, step, identity, reward if math.isfinite(reward) else None, *rest])
        return found

    def select(self, order: str, mixed: bool, step: int | None, of: int | None = None) -> np.ndarray:
        """int64 [N]: episodes in ``order`` (one of :data:`ORDERS`), of those with several versions (``mixed``), of one
        step, of the first ``of`` in the file (None: of all)."""
        of = len(self) if of is None else min(of, len(self))
        if order in ("newest", "oldest") and not mixed and step is None:
            everything = np.arange(of)
            return everything if order == "oldest" else everything[::-1]
        self.index()
        rewards, steps = np.frombuffer(self.rewards)[:of], np.frombuffer(self.steps, np.int32)[:of]
        keep = steps != UNREADABLE
        if mixed:
            keep &= (np.frombuffer(self.oldest, np.int32) != np.frombuffer(self.newest, np.int32))[:of]
        if step is not None:
            keep &= steps == step
        chosen = np.flatnonzero(keep)
        if order in ("best", "worst"):
            values = np.nan_to_num(rewards[chosen], nan=-np.inf)
            return chosen[np.argsort(-values if order == "best" else values, kind="stable")]
        return chosen if order == "oldest" else chosen[::-1]

    def record(self, index: int) -> dict[str, Any]:
        """One whole episode. Raises ValueError where its line is none."""
        try:
            record = json.loads(self.file.line_at(self.offsets[index]))
        except RecursionError:
            record = None
        if not isinstance(record, dict):
            raise ValueError("this line is not readable")
        return record

    def _head(self, descriptor: int, offset: int) -> tuple[int, str, float, int, int, int]:
        """(Step, id, reward, tokens, oldest, newest version) of the line at ``offset``."""
        found = EPISODE_HEAD.match(os.pread(descriptor, HEAD_BYTES, offset))
        if found is not None:
            step, identity, reward, tokens, oldest, newest = found.groups()
            name = identity.decode(errors="replace") if b"\\" not in identity else _text(identity)
            return int(step), name, float(reward.strip(b'"')), int(tokens), int(oldest), int(newest)
        try:  # a long or an odd one
            record = json.loads(self.file.line_at(offset))
            versions = [int(version) for turn in record["turns"] for version, _ in turn["versions"]] or [0]
            tokens = sum(int(turn["tokens"]) for turn in record["turns"])
            step, oldest, newest = int(record["step"]), min(versions), max(versions)
            if max(step, tokens, abs(oldest), abs(newest)) >= 2**31 or step < 0:
                raise ValueError("no such numbers")
            return step, str(record["episode_id"]), float(record["reward"]), tokens, oldest, newest
        except NO_LINE:
            return UNREADABLE, "this line is not readable", math.nan, 0, 0, 0


def _text(escaped: bytes) -> str:
    """A JSON string's text; as it stands where it is none."""
    try:
        return str(json.loads(b'"' + escaped + b'"'))
    except ValueError:
        return escaped.decode(errors="replace")
