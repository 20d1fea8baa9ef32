"""How far generation may run ahead of training."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.errors import require


@dataclass(frozen=True)
class BufferConfig:
    """How far generation may run ahead of training."""

    max_staleness: int = 1
    """Largest allowed difference between the trainer's version and any trained token's, in optimizer steps. 0:
    synchronous."""
    max_open_groups: int | None = None
    """Most prompts admitted and not yet trained or dropped; null: (max_staleness + 1) x groups_per_step, the most that
    the bound allows. Where training is the slower side a lower cap keeps samples fresher, and with at most
    max_staleness x groups_per_step generation starts anew at every step, before the new weights arrive."""
    groups_per_step: int = 8
    """Groups (prompts) in one optimizer step."""
    min_group_size: int = 2
    """A group with fewer scored episodes than this is dropped (``group_too_small``): one episode alone has no
    baseline."""
    drop_uniform_groups: bool = False
    """Drop groups whose rewards are all equal (``uniform_reward``): their advantages are zero."""
    max_consecutive_drops: int = 256
    """The run fails after this many drops without a trained group between; it warns after a quarter of them."""
    train_partial_batch: bool = True
    """When the dataset ends with fewer than ``groups_per_step`` groups left, train them; otherwise drop them
    (``partial_batch``)."""

    def __post_init__(self) -> None:
        require(self.max_staleness >= 0, "max_staleness", self.max_staleness, "0 (synchronous) or more optimizer steps")
        require(self.groups_per_step >= 1, "groups_per_step", self.groups_per_step, "at least 1")
        cap = self.max_open_groups
        require(
            cap is None or cap >= self.groups_per_step,
            "max_open_groups",
            cap,
            f"null or at least groups_per_step ({self.groups_per_step})",
        )
        require(self.min_group_size >= 1, "min_group_size", self.min_group_size, "at least 1")
        require(self.max_consecutive_drops >= 1, "max_consecutive_drops", self.max_consecutive_drops, "at least 1")

    @property
    def capacity(self) -> int:
        """Most prompts that can be open at once: what producers need to keep the generators busy."""
        allowed = (self.max_staleness + 1) * self.groups_per_step
        return allowed if self.max_open_groups is None else min(allowed, self.max_open_groups)
