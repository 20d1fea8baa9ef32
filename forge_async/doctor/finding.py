"""What one check of the doctor says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report."""

    check: str
    """What was checked, in a few words."""
    passed: bool
    figure: str
    """What was measured, and the limit where there is one."""
    remedy: str = ""
    """What to do, where it did not pass."""

    def __str__(self) -> str:
        return f"{self.check}: {self.figure.removesuffix('.')}. {self.remedy}".strip()
