"""A run's schedule, read from its folder; what of it can be repeated, and under which config."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from forge_async.config import Config, load_config
from forge_async.errors import ConfigError, ForgeError
from forge_async.journal import LOOP_FILE, Line, machine, turns_file
from forge_async.policy.turns import Diverged, read_turns

FOR_EVER_S = 1e9
"""Time limits of the recorded run are part of its schedule; the replay has none of its own."""

CUTS = {
    "fault": "a replica was lost ({what})",
    "hand": "{what} by hand",
    "run": "the run was resumed",
}
"""Kinds of lines after which nothing can be repeated, in words."""


FIELDS: dict[str, dict[str, type]] = {
    "run": {"config": str, "device": str, "threads": dict, "machine": dict},
    "admit": {"prompt": str, "kept": list},
    "done": {"request": str, "reason": str, "ids": str, "versions": list, "kv": list, "marks": str},
    "failed": {"episode": str, "reason": str},
    "batch": {"step": int, "groups": list, "digest": dict},
    "step": {"step": int, "stats": dict},
    "published": {"version": int, "digest": str},
    "fault": {"what": str},
    "hand": {"what": str},
}
"""What a line of each kind holds (``journal.py``): a file that was edited, or is another version's, may lack it."""


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
    requests: dict[str, int]
    """Request that was sent -> replica that got it."""
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
            if line["k"] in CUTS:
                cut = CUTS[line["k"]].format(what=line.get("what"))
                lines = lines[:index]
                break
        if head["device"] != "cpu":
            raise NotReplayable(f"{run} ran on {head['device']}: only runs on CPU can be repeated bit by bit.")
        done = sum(line["k"] == "batch" for line in lines)
        if cut and sum(line["k"] == "step" for line in lines) < done:
            done -= 1  # it may have come in the midst of this one
        if cut and steps is None:
            raise NotReplayable(
                f"{run}: {cut} after step {done}, and what follows depends on more than the schedule. "
                + (f"The part before can be replayed: --steps {done}." if done else "Nothing can be replayed.")
            )
        wanted = done if steps is None else steps
        if not 1 <= wanted <= done:
            raise NotReplayable(f"--steps {wanted}: {run} has {done} steps that can be replayed.")
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
            file.write(head["config"])
            file.flush()
            try:
                config: Config = load_config(file.name)
            except ConfigError as error:
                raise NotReplayable(
                    f"{path} holds a config that this version does not read: {error} Replay with the version that "
                    "recorded it."
                ) from error
        if config.resume:
            raise NotReplayable(f"{run} was resumed from a checkpoint: requests that were open then are not recorded.")
        requests = _requests(folder, config)
        for index, line in enumerate(lines):
            if line["k"] == "done" and line["request"] not in requests:
                whole = sum(earlier["k"] == "step" for earlier in lines[:index])
                if wanted > whole:
                    remedy = (
                        f"The part before can be replayed: --steps {whole}." if whole else "Nothing can be replayed."
                    )
                    raise NotReplayable(
                        f"{run}: the turns of an engine were not written to their end (was the disk full?). {remedy}"
                    )
                break
        return cls(folder, config, wanted, lines, requests, list(_warnings(head)))

    @property
    def sessions(self) -> dict[str, int]:
        """Prompt (or ratio check) -> replica that got its requests."""
        return {session_of(request): replica for request, replica in self.requests.items()}

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
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            return  # cut off when the run was killed
        try:
            content = json.loads(line)
        except ValueError as error:
            raise NotReplayable(f"{path}:{number} is not JSON: {error}") from error
        kind = content.get("k") if isinstance(content, dict) else None
        fields = FIELDS.get(kind) if isinstance(kind, str) else None
        if fields is None:
            raise NotReplayable(f"{path}:{number} is no line of a schedule: {line.strip()[:80]}")
        for name, type_ in fields.items():
            if not isinstance(content.get(name), type_):
                raise NotReplayable(
                    f"{path}:{number} is no line of kind {kind!r} of this version: {name} is {content.get(name)!r:.80}"
                )
        yield content


def _requests(folder: Path, config: Config) -> dict[str, int]:
    requests: dict[str, int] = {}
    for replica in range(config.policy.num_replicas):
        path = folder / turns_file(replica)
        if not path.is_file():
            raise NotReplayable(f"{path} is missing: the turns of replica {replica} were not recorded.")
        try:
            for _, _, entries in read_turns(path):
                requests.update((item[1], replica) for item in entries if item[0] == "submit")
        except Diverged as error:
            raise NotReplayable(str(error)) from error
    return requests


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
