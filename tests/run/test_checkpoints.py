"""What a run's folder says of its checkpoints, whatever else lies there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_async.errors import ConfigError
from forge_async.observability import RunFolder
from forge_async.observability.run_folder import META_FILE
from forge_async.run.checkpoints import Checkpoints

WHOLE = json.dumps({"version": 7, "extra": {"source": {}, "ledger": {}}})


def write(folder: Path, name: str, text: str = WHOLE) -> None:
    (folder / "checkpoints" / name).mkdir(parents=True)
    (folder / "checkpoints" / name / META_FILE).write_text(text)


def test_the_newest_is_that_of_the_highest_version_among_other_things(tmp_path: Path) -> None:
    for name in ("version-999999", "version-1000000", "version-2000000.partial", "version-x9", "notes", "version-"):
        write(tmp_path, name)
    (tmp_path / "checkpoints/version-3000000").mkdir()  # without what makes it complete
    (tmp_path / "checkpoints/version-4000000").write_text("a file")
    checkpoints = Checkpoints(RunFolder(tmp_path))
    assert [path.name for path in checkpoints.complete()] == ["version-999999", "version-1000000"]
    assert checkpoints.read() == {"source": {}, "ledger": {}, "version": 7}
    checkpoints.delete_old()
    assert (tmp_path / "checkpoints/notes").is_dir() and not (tmp_path / "checkpoints/version-999999").exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", WHOLE[:-20], WHOLE.replace("ledger", "x"), WHOLE.replace("7", '"a"')]
)
def test_a_damaged_one_is_named_with_what_to_do(tmp_path: Path, text: str) -> None:
    write(tmp_path, "version-000007", text)
    with pytest.raises(ConfigError, match=r"resume = .*forge\.json is damaged .*Remove .*version-000007"):
        Checkpoints(RunFolder(tmp_path)).read()
