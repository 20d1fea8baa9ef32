"""The turns of an engine: which commands were taken before which forward pass. Written down, and forced again.

An engine does nothing by the clock: given the same commands before the same turns, it adds, ends and swaps the same
requests and weights between the same forward passes, so that every pass has the same rows. ``replica-<n>.jsonl`` holds
one line per turn that took a command::

    [turn, checksum of all tokens sampled before it, [[kind, ...], ...]]

    ["submit", request, seed, checksum of its prompt]      ["abort", request]      ["swap", version, packed layers?]
    ["hold", version]      ["release"]      ["mode", mode, kv]      ["announce", version]
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_async.errors import RunFailed
from forge_async.observability.jsonl import write_line

if TYPE_CHECKING:  # it imports torch, which the exit code of a command must not wait for
    from forge_async.policy.lockstep import Command

logger = logging.getLogger(__name__)

Entry = list[Any]
"""A command as it is written down: its kind, then what tells it from others."""

UNASKED = ("abort", "release")
"""Kinds that a replay carries out by itself: they depend on time limits or have no answer."""


LENGTHS = {"submit": 4, "abort": 2, "swap": 3, "hold": 2, "release": 1, "mode": 3, "announce": 2}
"""Of the entries, by kind."""


class Diverged(RunFailed):
    """A replay cannot go on as recorded; the message says where they part."""


def entry(command: Command) -> Entry:
    kind, payload = command
    if kind == "submit":
        return [kind, payload.request_id, payload.params.seed, zlib.crc32(payload.prompt.tobytes())]
    if kind == "swap":
        return [kind, payload[0], payload[1].packs]
    if kind == "hold":
        return [kind, payload[0]]
    if kind == "mode":
        return [kind, payload[0], payload[1]]
    return [kind] if payload is None else [kind, payload]


class TurnLog:
    """Writes the turns of one engine, as they come; where one cannot be written (a full disk) the log ends."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)

    def write(self, turn: int, sampled: int, commands: Sequence[Command]) -> None:
        if self._file.closed:
            return
        line = [turn, sampled, [entry(command) for command in commands]]
        try:
            write_line(self._file, json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            self.close()
            logger.warning("%s cannot be written, a replay will end there: %s", self._file.name, error)

    def close(self) -> None:
        self._file.close()


def read_turns(path: Path) -> Iterator[tuple[int, int, list[Entry]]]:
    """The turns of a file; what a killed process left of its last line is left out.

    Raises:
        Diverged: a line is none of a turn, or out of order.
    """
    last = -1
    text = path.read_text(encoding="utf-8", errors="replace")  # what is no text is no turn either
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            return
        try:
            turn, sampled, entries = json.loads(line)
            ordered = turn > last and all(map(_is_entry, entries))
        except (ValueError, TypeError, IndexError):
            ordered = False
        if not ordered:
            raise Diverged(f"{path}:{number} is not a turn after turn {last}: {line.strip()[:80]!r}")
        last = turn
        yield turn, sampled, entries


def _is_entry(item: Any) -> bool:
    kind = item[0]
    named = kind not in ("submit", "abort") or isinstance(item[1], str)
    return isinstance(item, list) and len(item) == LENGTHS.get(kind) and named


class TurnSchedule:
    """Recorded turns, which an engine has to repeat. Belongs to the engine's thread but for :attr:`swaps`."""

    def __init__(self, turns: Iterable[tuple[int, int, list[Entry]]]) -> None:
        self._turns = {turn: (sampled, entries) for turn, sampled, entries in turns}
        self._last = max(self._turns, default=-1)
        self.swaps = [(item[1], item[2]) for _, items in self._turns.values() for item in items if item[0] == "swap"]
        """(version, whether its layers are packed) of each swap, in order."""

    def ended(self, turn: int) -> bool:
        """Whether nothing is recorded of ``turn`` or later ones: the engine is free then."""
        return turn > self._last

    def take(self, turn: int, sampled: int, runnable: bool, inbox: list[Command]) -> list[Command] | None:
        """The commands of ``turn``, out of ``inbox``; None while some are missing there.

        Raises:
            Diverged: the tokens before it, or a request of it, are not those recorded, or nothing can happen in it.
        """
        if turn not in self._turns:
            if not runnable:
                raise Diverged(f"turn {turn}: no request runs, but when recorded some did")
            return []
        expected_sampled, entries = self._turns[turn]
        if sampled != expected_sampled:
            raise Diverged(f"turn {turn}: the tokens sampled before it are not those recorded")
        left, commands = [(entry(command), command) for command in inbox], []
        for item in entries:
            if item[0] in UNASKED:
                commands.append((item[0], item[1] if len(item) > 1 else None))
                continue
            place = next((place for place, (here, _) in enumerate(left) if here[:2] == item[:2]), None)
            if place is None:
                return None
            here, command = left.pop(place)
            if here != item:
                raise Diverged(f"turn {turn}: {item[0]} {item[1]} is {here[2:]}, recorded was {item[2:]}")
            commands.append(command)
        inbox[:] = [command for _, command in left]
        return commands

    def missing(self, turn: int, inbox: Sequence[Command]) -> str:
        """What ``turn`` waits for, in words."""
        have = {tuple(entry(command)[:2]) for command in inbox}
        _, entries = self._turns.get(turn, (0, []))
        wanted = [item for item in entries if item[0] not in UNASKED and tuple(item[:2]) not in have]
        return ", ".join(f"{item[0]} {item[1]}" for item in wanted[:3])
