"""What shows itself as a table, and a run's metrics as a frame."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from forge_async.observability.frames import RunMetrics, metrics_frame
from forge_async.observability.seen import listing, of_groups
from forge_async.observability.tables import Listing
from forge_async.types import Completion, Episode, Group, Prompt, Turn


@dataclass
class Row:
    name: str
    value: float | None

    def cells(self) -> tuple[object, ...]:
        return self.name, self.value


def test_a_listing_is_a_list_that_shows_itself_in_three_ways() -> None:
    rows = Listing([Row("a <b> [bold]c", 1.23456), Row("d", None)], "rows", ("name", "value"))
    assert len(rows) == 2 and rows[1].name == "d" and rows == list(rows)
    text = repr(rows)
    assert text.splitlines()[0] == "rows (2)" and "a <b> [bold]c" in text and "1.235" in text and "-" in text
    page = rows._repr_html_()
    assert page.count("<tr>") == 3 and "a &lt;b&gt; [bold]c" in page and "<th" in page
    console = Console(file=io.StringIO(), width=60, force_terminal=True)
    console.print(rows)
    assert "1.235" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_last_record_of_a_step_counts_and_steps_are_in_order(tmp_path: Path) -> None:
    records = [{"step": 2, "a": 1.0}, {"step": 1, "a": 0.5}, {"step": 2, "a": 3.0, "histogram": [1, 2]}]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 3')
    frame = RunMetrics(tmp_path / "m.jsonl").frame()
    assert frame.index.tolist() == [1, 2] and frame.index.name == "step"
    assert frame["a"].tolist() == [0.5, 3.0] and frame.loc[2, "histogram"] == [1, 2]
    empty = metrics_frame(tmp_path / "none.jsonl")
    assert len(empty) == 0 and empty.index.name == "step"


def test_a_seen_episode_has_text_reward_and_versions_and_the_episode_itself() -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    ids, versions = np.array([7, 8, 9], np.int32), np.array([3, 3, 5], np.int32)
    completion = Completion(ids[:1], ids, np.zeros(3, np.float32), versions, versions, "length")
    episode = Episode("0-4.1", "0-4", (Turn(completion),), 0.5, {"exact": 0.5})
    prompt = Prompt("0-4", ({"role": "system", "content": "s"}, {"role": "user", "content": "u?"}), ids[:1], "42")
    (seen,) = of_groups(6, [Group(prompt, (episode,))], Tokenizer())
    assert (seen.prompt, seen.text, seen.reward, seen.versions) == ("u?", "7 8 9", 0.5, (3, 5))
    assert seen.episode is episode
    assert seen.cells() == (6, "0-4.1", "u?", "42", "7 8 9", 0.5, 3, "3-5", "length")
    assert repr(listing([seen])).startswith("episodes (1)")
