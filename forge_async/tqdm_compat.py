"""A warning of tqdm 4 that is none here.

In a notebook without ``ipywidgets`` the first import of ``tqdm.auto`` (transformers and datasets do it) warns that
"IProgress not found". Its bars are text then, which is meant: nothing here draws any. Needed until those packages
import it only to draw one; ``tests/integration/test_notebooks.py::test_a_run_is_driven_by_hand`` reads the cells.
"""

from __future__ import annotations

import warnings


def quiet_tqdm() -> None:
    """Leave the warning out; call before anything imports ``tqdm.auto``."""
    warnings.filterwarnings("ignore", message="IProgress not found")
