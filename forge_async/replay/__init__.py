"""Repeating a recorded run: the same requests in the same forward passes, the same batches, and a comparison of all.

Nothing here looks at a clock. Every wait is for something that came earlier in the recorded run: a prompt is admitted
once as many batches were taken as before, an engine takes a turn once it has the commands of that turn, a batch leaves
once its groups are finished, and a version is published once the replicas hold those three before it (a replica had
them before, since the store was still writing the next ones). So a faithful schedule never deadlocks; one that was
edited may, which :func:`command.watch` notices.
"""

from forge_async.replay.command import replay
from forge_async.replay.compare import Replay
from forge_async.replay.recorded import NotReplayable, Recorded

__all__ = ["NotReplayable", "Recorded", "Replay", "replay"]
