"""Commands on their way from any thread to the engine's own, which takes them before each of its turns."""

from __future__ import annotations

import threading
import time
from typing import Any

from forge_async.errors import ForgeError
from forge_async.policy.lockstep import Command
from forge_async.policy.turns import UNASKED, Diverged, TurnLog, TurnSchedule


class EngineDied(ForgeError):
    """The engine thread ended by an error, which is the cause; every request it held has failed."""


class Inbox:
    """What was posted and not taken. Turns are counted, and written down (:attr:`log`) or forced (:attr:`schedule`)."""

    def __init__(self) -> None:
        self.log: TurnLog | None = None
        self.schedule: TurnSchedule | None = None
        self.turn = 0
        """The number of the next take."""
        self.stopped = False
        self.failure: BaseException | None = None
        self.idle_since: float | None = None
        """While :meth:`take` waits."""
        self.lacks = ""
        """What a forced turn waits for, in words."""
        self._posted: list[Command] = []
        self._wake = threading.Condition()

    def __len__(self) -> int:
        return len(self._posted)

    def submitted(self) -> int:
        """Requests among what was posted."""
        return sum(kind == "submit" for kind, _ in list(self._posted))

    def post(self, kind: str, payload: Any) -> None:
        """Add a command.

        Raises:
            EngineDied, Diverged: nobody will take it.
        """
        with self._wake:
            if isinstance(self.failure, Diverged):
                raise self.failure
            if self.failure is not None:
                raise EngineDied(f"the engine died earlier: {self.failure}") from self.failure
            if self.stopped:
                raise EngineDied("the engine was stopped")
            self._posted.append((kind, payload))
            self._wake.notify()

    def take(self, runnable: bool, sampled: int) -> list[Command] | None:
        """The commands of the next turn; None when stopped. Waits for one, unless ``runnable``.

        Args:
            runnable: there is something to do without a further command.
            sampled: checksum of all tokens sampled so far.
        Raises:
            Diverged: a forced turn cannot be repeated.
        """
        with self._wake:
            commands = None
            while not self.stopped and (commands := self._now(runnable, sampled)) is None:
                self.idle_since = self.idle_since or time.perf_counter()
                self._wake.wait()
            self.idle_since, self.lacks = None, ""
            if commands is None:
                return None
        if self.log is not None and commands:
            self.log.write(self.turn, sampled, commands)
        self.turn += 1
        return commands

    def _now(self, runnable: bool, sampled: int) -> list[Command] | None:
        """What the next turn takes, or None while it has to wait."""
        if self.schedule is not None and not self.schedule.ended(self.turn):
            self._posted = [command for command in self._posted if command[0] not in UNASKED]
            commands = self.schedule.take(self.turn, sampled, runnable, self._posted)
            if commands is None:
                self.lacks = f"turn {self.turn} waits for {self.schedule.missing(self.turn, self._posted)}"
            return commands
        if not self._posted and not runnable:
            return None
        commands, self._posted = self._posted, []
        return commands

    def take_one(self) -> Command | None:
        """The oldest command, once there is one; None when stopped."""
        with self._wake:
            self._wake.wait_for(lambda: bool(self._posted) or self.stopped)
            return self._posted.pop(0) if self._posted else None

    def stop(self) -> None:
        with self._wake:
            self.stopped = True
            self._wake.notify()

    def close(self, failure: BaseException) -> list[Command]:
        """Refuse further commands because of ``failure``; returns those that nobody took."""
        with self._wake:
            self.failure = failure
            posted, self._posted = self._posted, []
        if self.log is not None:
            self.log.close()
        return posted
