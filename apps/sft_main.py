"""Warm a model up by supervised fine-tuning on a dataset's own answers, until it is right often enough to learn from.

    python apps/sft_main.py --config configs/sft_tiny.yaml target_accuracy=0.25 ...

The loop is in ``forge_async/commands/warm_up.py``; ``apps/examples/train_on_episodes.py`` is a trainer by hand.
"""

from __future__ import annotations

import sys

from forge_async.cli import run_app
from forge_async.commands.warm_up import warm_up
from forge_async.config import SFTConfig

if __name__ == "__main__":
    sys.exit(run_app(warm_up, SFTConfig, "configs/sft_tiny.yaml", __doc__))
