"""How far generation may run ahead of training, and what becomes of what cannot be trained."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.errors import require

STALENESS_OF = ("oldest", "mean", "newest")
STALE = ("drop", "mask", "resume")


@dataclass(frozen=True)
class BufferConfig:
    """How far generation may run ahead of training."""

    max_staleness: int = 1
    """Largest allowed staleness, the trainer's version minus a token's, in optimizer steps. 0: synchronous."""
    staleness_of: str = "oldest"
    """Which token of an episode max_staleness bounds: its ``oldest``, hence every one; its ``newest``; or the ``mean``
    over them. With the last two, single tokens may be up to max_staleness + window old."""
    window: int = 0
    """Optimizer steps beyond max_staleness for which a group that is still generated may be passed over by finished
    ones, before training waits for it. 0: training waits as soon as going on would make it too old."""
    stale: str = "drop"
    """What happens to an episode that is too old: ``drop`` leaves it out of its group; ``mask`` leaves only its tokens
    older than max_staleness out of the loss, and its reward still counts in the baseline; ``resume`` gives the group
    back to the generators, which keep its fresh episodes and generate the others anew, up to ``retries`` times, and
    then leaves out what is too old."""
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
    """Drop groups whose rewards are all equal (``uniform_reward``), whose advantages are zero, and admit others in
    their place (dynamic sampling)."""
    retries: int = 1
    """How often a prompt is generated anew when its work was lost: too few episodes were scored, or too few are fresh
    enough (with ``stale: resume``: not all). Then it is dropped, unless enough are left."""
    max_consecutive_drops: int | None = None
    """The run fails after this many drops without a trained group between, and warns after a quarter of them; null:
    32 x groups_per_step."""
    train_partial_batch: bool = True
    """When the dataset ends with fewer than ``groups_per_step`` groups left, train them; otherwise drop them
    (``partial_batch``)."""

    def __post_init__(self) -> None:
        require(self.max_staleness >= 0, "max_staleness", self.max_staleness, "0 (synchronous) or more optimizer steps")
        require(
            self.staleness_of in STALENESS_OF, "staleness_of", self.staleness_of, f"one of {', '.join(STALENESS_OF)}"
        )
        require(self.stale in STALE, "stale", self.stale, f"one of {', '.join(STALE)}")
        require(self.window >= 0, "window", self.window, "0 or more optimizer steps")
        require(
            self.staleness_of == "oldest" or self.window > 0,
            "staleness_of",
            self.staleness_of,
            "'oldest' while window is 0",
            "Training waits for slow groups then, so that no token gets older than max_staleness.",
        )
        require(self.groups_per_step >= 1, "groups_per_step", self.groups_per_step, "at least 1")
        cap = self.max_open_groups
        require(
            cap is None or cap >= self.groups_per_step,
            "max_open_groups",
            cap,
            f"null or at least groups_per_step ({self.groups_per_step})",
        )
        require(self.min_group_size >= 1, "min_group_size", self.min_group_size, "at least 1")
        require(self.retries >= 0, "retries", self.retries, "0 or more")
        require(
            self.stale != "resume" or self.retries > 0,
            "retries",
            self.retries,
            "at least 1 with stale: resume",
            "A resumed group is a further attempt at its prompt; without one, use stale: drop.",
        )
        drops = self.max_consecutive_drops
        require(drops is None or drops >= 1, "max_consecutive_drops", drops, "null or at least 1")

    @property
    def capacity(self) -> int:
        """Most prompts that can be open at once: what producers need to keep the generators busy."""
        allowed = (self.max_staleness + 1) * self.groups_per_step
        return allowed if self.max_open_groups is None else min(allowed, self.max_open_groups)

    @property
    def drop_limit(self) -> int:
        """Drops without a trained group between after which the run fails."""
        return 32 * self.groups_per_step if self.max_consecutive_drops is None else self.max_consecutive_drops

    @property
    def horizon(self) -> int:
        """Staleness at which training has waited for every group, in optimizer steps: no token is ever trained beyond
        it."""
        return self.max_staleness + self.window

    @property
    def token_bound(self) -> int:
        """Largest staleness of any trained token that this config allows, in optimizer steps."""
        return self.max_staleness if self.staleness_of == "oldest" else self.horizon
