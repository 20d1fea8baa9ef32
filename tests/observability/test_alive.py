"""Whether the process of a run is still there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from forge_async.observability.alive import has_ended, this_process


def test_a_process_is_there_until_it_ends_and_a_later_one_of_its_number_is_another() -> None:
    code = "import json; from forge_async.observability.alive import this_process; print(json.dumps(this_process()))"
    process = subprocess.Popen(
        [sys.executable, "-c", code + "; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    told = json.loads(process.stdout.readline())
    assert told["pid"] == process.pid and not has_ended(told)
    assert has_ended(told | {"started": told["started"] - 1}), "that one's number was given again"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(told), "a zombie"
    process.wait()
    assert has_ended(told)
    process.stdin.close()
    process.stdout.close()


def test_what_cannot_be_known_is_no_end() -> None:
    mine = this_process()
    assert not has_ended(mine)
    gone = mine | {"pid": 2**22 + 1}
    assert has_ended(gone)
    for strange in (None, 7, {}, gone | {"place": "elsewhere"}, gone | {"pid": "7"}, gone | {"started": None}):
        assert not has_ended(strange)
