"""Drops without end: a run that drops every group must neither stall silently nor go on for ever."""

from __future__ import annotations

import logging
from collections import Counter

from forge_async.errors import RunFailed

logger = logging.getLogger(__name__)

REMEDIES = {
    "failed": "See the episode_failed events for the causes; a larger rollout.timeout_s gives slow episodes time.",
    "group_too_small": "See the episode_failed events for the causes; buffer.min_group_size is how many must succeed.",
    "uniform_reward": (
        "All episodes of a group got the same reward: the prompts are too easy or too hard for this model. Take "
        "others, grade the reward more finely, or raise rollout.group_size; buffer.drop_uniform_groups=false trains "
        "them as they are, with zero advantages."
    ),
    "stale": "Raise buffer.max_staleness or buffer.window, or train the fresh tokens alone with buffer.stale=mask.",
    "skipped_step": (
        "No token of a whole batch had a loss; with rollout.truncated=mask that happens when every answer is cut off: "
        "raise policy.sampling.max_tokens."
    ),
    "prompt_too_long": "Raise dataset.max_prompt_tokens or policy.max_model_len.",
}
"""What to do when most drops have this reason."""


class DropWatch:
    """Counts drops since a batch was last trained: a warning after a quarter of ``limit``, an error at ``limit``."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._reasons: Counter[str] = Counter()

    def trained(self) -> None:
        self._reasons.clear()

    def dropped(self, reason: str) -> RunFailed | None:
        """Count one; the error with which the run is to end, if it is."""
        self._reasons[reason] += 1
        count = self._reasons.total()
        if count < self.limit and count != max(1, self.limit // 4):
            return None
        shown = ", ".join(f"{name} {number}" for name, number in self._reasons.most_common())
        text = (
            f"{count} prompts in a row were dropped and none was trained between: {shown}. "
            f"{REMEDIES.get(self._reasons.most_common(1)[0][0], '')}"
        ).rstrip()
        if count >= self.limit:
            return RunFailed(f"{text} The run ends after {self.limit} of them (buffer.max_consecutive_drops).")
        logger.warning("%s The run ends after %d of them (buffer.max_consecutive_drops).", text, self.limit)
        return None
