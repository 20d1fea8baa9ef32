"""The five modes of ``policy.update.mode``: what a new version does to the requests that run, as data.

========================  ==================  ==========================================  ======================
mode                      the swap comes      a running request                           versions in a completion
========================  ==================  ==========================================  ======================
never_stop, kv: keep      at the next step    goes on with its old keys and values        mixed
never_stop, kv: recompute at the next step    goes on, keys and values computed anew      mixed
abort_resume              at the next step    is submitted again: prompt and prefix       mixed
abort_retry               at the next step    starts over                                 one
drain                     when nothing runs   ends first; new ones wait                   one
blocking                  when nothing runs   ends before the train step; new ones wait   one
                                              until the swap after it
========================  ==================  ==========================================  ======================

The engine loop (``engine.py``) obeys these rules; none of them depends on a clock, so that ranks which are given the
same commands at the same steps decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class UpdateRules:
    """What the engine loop does about a new version."""

    drains: bool = False
    """The swap waits until no request runs, and none starts meanwhile."""
    holds: bool = False
    """Generation is held from when the trainer takes a batch until the swap to the version made of it."""
    withdraws: bool = False
    """At the swap, running requests are taken out of vLLM and submitted again, with what they have generated."""
    restarts: bool = False
    """They forget what they have generated."""
    recomputes: bool = False
    """At the swap, running requests' keys and values are computed anew."""


RULES = {
    ("never_stop", "keep"): UpdateRules(),
    ("never_stop", "recompute"): UpdateRules(recomputes=True),
    ("abort_resume", "keep"): UpdateRules(withdraws=True),
    ("abort_retry", "keep"): UpdateRules(withdraws=True, restarts=True),
    ("drain", "keep"): UpdateRules(drains=True),
    ("blocking", "keep"): UpdateRules(drains=True, holds=True),
}
"""(``policy.update.mode``, ``policy.update.kv``) -> rules; ``kv`` can be set for never_stop only."""
MODES = tuple(dict.fromkeys(mode for mode, _ in RULES))
KV = tuple(dict.fromkeys(kv for _, kv in RULES))
