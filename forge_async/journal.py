"""The journal: a run's schedule and what came of it, one line each, so that a replay can repeat and compare.

``schedule/loop.jsonl`` in the run's folder holds the controller's part (the engines' is in ``policy/turns.py``):

=============  ======================================================================================================
``k``          fields
=============  ======================================================================================================
``run``        ``config`` (YAML), and what arithmetic depends on: ``device``, ``threads`` per process, ``machine``
``admit``      ``prompt``: admitted now, again where its work was lost; ``kept``: the episodes that it has from before
``done``       ``request``, ``reason``, and its tokens: ``ids``, ``versions``, ``kv``, ``marks``
``failed``     ``episode``, ``reason``
``batch``      ``step``, ``groups``: [prompt, [episodes], [rewards]] each, ``digest`` of what is trained
``step``       ``step``, ``stats``: all but times
``published``  ``version``, ``digest`` of the weights
``fault``      ``what``: nothing after this line can be replayed
``hand``       ``what`` was done by hand: the same
=============  ======================================================================================================
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import platform
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import numpy as np

from forge_async.observability.jsonl import to_plain, write_line
from forge_async.types import Completion, Episode, Group, StepStats, TrainingSequence

logger = logging.getLogger(__name__)

Line = dict[str, Any]

LOOP_FILE = "loop.jsonl"

FAULTS = ("requeued", "respawned", "replica_hung")
"""Events after which a run depends on more than its schedule."""


def turns_file(replica: int) -> str:
    """The name of a replica's file beside ``loop.jsonl``."""
    return f"replica-{replica}.jsonl"


def request_seed(run_seed: int, request_id: str) -> int:
    """The seed of a request's draws: of the run's seed and the request's name alone."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed} {request_id}".encode(), digest_size=7).digest(), "big")


class Journal:
    """Takes the loop's reports, and writes them down where ``folder`` is given.

    Args:
        warn: told that a line could not be written (a full disk): the schedule ends there, as what follows a gap cannot
            be replayed.
    """

    def __init__(self, folder: Path | None = None, warn: Callable[[str], None] = logger.warning) -> None:
        self.folder, self._warn = folder, warn
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / LOOP_FILE).open("ab", buffering=0)

    def started(self, device: str, threads: dict[str, float], config: str) -> None:
        """A run starts, or goes on after a resume."""
        self._note({"k": "run", "device": device, "threads": threads, "machine": machine(), "config": config})

    def admitted(self, prompt_id: str, kept: Sequence[Episode] = ()) -> None:
        self._note({"k": "admit", "prompt": prompt_id, "kept": [episode.episode_id for episode in kept]})

    def asked(self, request_id: str) -> None:
        """A request is about to wait for its seat. Raises what its episode is to fail by."""

    def completed(self, request_id: str, completion: Completion) -> None:
        if self._file is not None:
            self._note(completion_line(request_id, completion))

    def failed(self, episode_id: str, reason: str, message: str) -> None:
        """An episode has no reward; ``message`` is for whoever compares."""
        self._note({"k": "failed", "episode": episode_id, "reason": reason})

    def batch(self, step: int, groups: Sequence[Group], sequences: Sequence[TrainingSequence]) -> None:
        if self._file is not None:
            self._note(batch_line(step, groups, sequences))

    def trained(self, step: int, stats: StepStats) -> None:
        self._note({"k": "step", "step": step, "stats": plain_stats(stats)})

    def published(self, version: int, digest: str) -> None:
        self._note({"k": "published", "version": version, "digest": digest})

    def fault(self, what: str) -> None:
        self._note({"k": "fault", "what": what})

    def by_hand(self, what: str) -> None:
        """Something that no config says was done to the run, in words such as ``trainer.optimizer.lr was changed``."""
        self._note({"k": "hand", "what": what})

    async def before_publish(self, version: int) -> None:
        """Returns when ``version`` may be published."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _note(self, line: Line) -> None:
        if self._file is not None:
            try:
                write_line(self._file, json.dumps(line, separators=(",", ":")) + "\n")
            except OSError as error:
                self.close()
                self._warn(f"schedule/{LOOP_FILE} cannot be written, a replay will end here: {error}")


def machine() -> dict[str, str]:
    """What bits of results depend on, beside the code: processor features and packages."""
    import torch

    packages = {name: package_version(name) for name in ("torch", "torchtitan")}
    return {"cpu": torch.backends.cpu.get_cpu_capability(), "architecture": platform.machine(), **packages}


def completion_line(request_id: str, completion: Completion) -> Line:
    """Token ids (zlib of int32, base64), runs of versions, and one byte per log-prob: a hash of its 32 bits."""
    bits = completion.logprobs.astype(np.float32).view(np.uint32)
    marks = (bits * np.uint32(2654435761) >> np.uint32(24)).astype(np.uint8)  # Knuth's multiplicative hash
    return {
        "k": "done",
        "request": request_id,
        "reason": completion.finish_reason,
        "ids": base64.b64encode(zlib.compress(completion.token_ids.astype("<i4").tobytes(), 1)).decode(),
        "versions": runs(completion.policy_versions),
        "kv": runs(completion.kv_versions),
        "marks": base64.b64encode(marks.tobytes()).decode(),
    }


def runs(versions: np.ndarray) -> list[list[int]]:
    """Runs of equal versions as [version, length]."""
    if len(versions) and (versions == versions[0]).all():
        return [[int(versions[0]), len(versions)]]
    starts = np.flatnonzero(np.diff(versions, prepend=-1))
    lengths = np.diff(starts, append=len(versions))
    return [[int(versions[start]), int(length)] for start, length in zip(starts, lengths, strict=True)]


def token_ids(line: Line) -> np.ndarray:
    """int32 [R]: the ids of a ``done`` line."""
    return np.frombuffer(zlib.decompress(base64.b64decode(line["ids"])), "<i4")


def marks(line: Line) -> np.ndarray:
    """uint8 [R]: the log-probs' hashes of a ``done`` line."""
    return np.frombuffer(base64.b64decode(line["marks"]), np.uint8)


def batch_line(step: int, groups: Sequence[Group], sequences: Sequence[TrainingSequence]) -> Line:
    names = ("token_ids", "policy_versions", "logprobs", "advantages", "loss_mask")
    digest = {name: _digest([getattr(sequence, name) for sequence in sequences]) for name in names}
    masks = [sequence.sampling_mask for sequence in sequences if sequence.sampling_mask is not None]
    digest["sampling_mask"] = _digest([array for mask in masks for array in (mask.counts, mask.token_ids)])
    entries = [
        [
            group.prompt.prompt_id,
            [episode.episode_id for episode in group.episodes],
            [float(episode.reward) for episode in group.episodes],
        ]
        for group in groups
    ]
    return {"k": "batch", "step": step, "groups": entries, "digest": digest}


def _digest(arrays: Sequence[np.ndarray]) -> str:
    total = hashlib.blake2b(digest_size=8)
    for array in arrays:
        total.update(len(array).to_bytes(4, "little"))
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def plain_stats(stats: StepStats) -> dict[str, Any]:
    """All of a step's figures but its times (names that end in ``_s``); floats as JSON keeps them, exactly."""
    return {name: to_plain(value) for name, value in asdict(stats).items() if not name.endswith("_s")}
