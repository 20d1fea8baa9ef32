"""What the engines print that is no news is left out; what is news is not."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest

from forge_async.policy.vllm_compat import prepare_environment

NOTICE = "Triton is installed, but doesn't include CPU backend"


def test_vllms_notice_of_triton_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    spec = importlib.util.find_spec("vllm")  # finding it does not import it
    assert spec is not None and spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0], "triton_utils/importing.py").read_text()
    assert f'"{NOTICE}' in source, "it is gone: so may the filter be"
    prepare_environment()
    logger = logging.getLogger("vllm.triton_utils.importing")
    logger.warning(f"{NOTICE}. Disabling Triton.")
    logger.warning("An unexpected error occurred while checking Triton active drivers: %s.", "other")
    assert [record.getMessage()[:19] for record in caplog.records] == ["An unexpected error"]
