"""Lets the trainer's tests, and the processes they start, import ``trainer_samples``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
