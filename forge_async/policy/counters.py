"""What an engine counts, and what one swap did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SwapReport:
    """What one swap did."""

    version: int
    previous_version: int
    pause_ms: float
    """Time between two forward passes that the swap took, milliseconds."""
    in_flight: int
    """Requests that were running when it came."""
    nbytes: int
    """Bytes of the version, as the model holds it."""


@dataclass
class EngineCounters:
    """Sums since the start or the last reset."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    finished: int = 0
    abort_requested: int = 0
    """Requests ended because somebody asked for it."""
    aborted: int = 0
    """Requests that ended as aborted although nobody asked."""
    swaps: int = 0
    swaps_in_flight: int = 0
    """Swaps with at least one request running."""
    discarded_tokens: int = 0
    """Generated tokens that a swap threw away (they count in ``generated_tokens`` too)."""
    recomputed_tokens: int = 0
    """Tokens of prompts and prefixes whose keys and values a swap threw away, to be computed anew."""
    steps: int = 0
    busy_s: float = 0.0
    """Seconds in forward passes and swaps."""
    idle_s: float = 0.0
    """Seconds without any request to run."""
    held_s: float = 0.0
    """The part of ``idle_s`` in which requests waited for a version."""
    swap_ms: list[float] = field(default_factory=list)
    """How long the last swap took, if there was one, milliseconds."""
