from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_samples import groups, masked, sequence

from forge_async.errors import DataError
from forge_async.trainer.packing import PackedRow, pack
from forge_async.trainer.segments import Segment, attention_layout


def visible(row: PackedRow, index: int) -> list[int]:
    """Token ids that row token ``index`` attends to, in order, by the definition of a segment."""
    for segment in row.segments:
        if segment.start <= index < segment.start + segment.length:
            prefix = range(segment.prefix_start, segment.prefix_start + segment.prefix_length)
            return [int(row.token_ids[i]) for i in [*prefix, *range(segment.start, index + 1)]]
    raise AssertionError(f"token {index} is in no segment")


def test_exactly_the_sampled_tokens_are_predicted_each_from_the_one_before() -> None:
    # [P, R1, R2]: R1 is predicted at P, R2 at R1; R2 itself predicts nothing and is not in the row.
    ((row,),) = pack([sequence("a", [7], [8, 9], logprobs=[-0.5, -0.25], advantage=2.0)], 100)
    assert row.token_ids.tolist() == [7, 8]
    assert row.positions.tolist() == [0, 1]
    assert row.source.tolist() == [0, 1]
    assert row.label.tolist() == [8, 9]
    assert row.behaviour.tolist() == [-0.5, -0.25]
    assert row.advantage.tolist() == [2.0, 2.0]
    assert row.token_index.tolist() == [1, 2]


def test_completions_of_one_prompt_share_it() -> None:
    same = [sequence("a", [5, 6], [7, 8]), sequence("b", [5, 6], [9, 10, 11])]
    ((row,),) = pack(same, 100)
    assert row.token_ids.tolist() == [5, 6, 7, 9, 10]
    assert row.positions.tolist() == [0, 1, 2, 2, 3]
    assert row.segments == (Segment(0, 2), Segment(2, 1, 0, 2), Segment(3, 2, 0, 2))
    assert row.source.tolist() == [1, 2, 1, 3, 4]
    assert row.label.tolist() == [7, 8, 9, 10, 11]


def test_a_group_larger_than_the_budget_repeats_its_prompt() -> None:
    rows = pack([sequence(str(i), [5] * 10, [6] * 6) for i in range(4)], 20)[0]
    assert [row.tokens for row in rows] == [20, 20]


def test_rows_keep_to_the_budget_and_a_long_sequence_gets_its_own() -> None:
    rows = pack([sequence("long", [5] * 50, [6]), *groups()], 40)[0]
    assert sorted(row.tokens > 40 for row in rows)[-2:] == [False, True]


def test_every_rank_gets_the_same_number_of_rows() -> None:
    by_rank = pack([sequence("a", [5], [6] * 10), sequence("b", [7], [8] * 2)], 1000, ranks=2)
    assert [len(rows) for rows in by_rank] == [1, 1]
    assert sorted(len(row.label) for rows in by_rank for row in rows) == [2, 10]
    alone = pack([sequence("a", [5], [6])], 1000, ranks=2)
    assert [len(row.label) for rows in alone for row in rows] == [1, 0]


def test_sequences_without_a_trained_token_are_left_out() -> None:
    nothing = dataclasses.replace(sequence("a", [5], [6]), loss_mask=np.zeros(2, dtype=bool))
    ((row,),) = pack([nothing, sequence("b", [5], [6])], 100)
    assert row.sequence_index.tolist() == [1]


def test_an_unusable_sequence_is_named() -> None:
    with pytest.raises(DataError, match="first: its first token is trained"):
        pack([sequence("first", [], [5, 6])], 100)
    with pytest.raises(DataError, match="greedy: temperature is 0"):
        pack([sequence("greedy", [5], [6], temperature=0.0)], 100)


def test_a_segment_list_with_a_hole_is_refused() -> None:
    with pytest.raises((ValueError, IndexError)):
        attention_layout([Segment(0, 2), Segment(3, 1)])


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(4, 6), min_size=1, max_size=4), st.lists(st.integers(4, 9), min_size=1, max_size=5)
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 30),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_each_token_is_predicted_once_from_its_own_history(texts, budget, ranks, share, every_token) -> None:
    sequences = [sequence(str(i), prompt, completion) for i, (prompt, completion) in enumerate(texts)]
    seen = set()
    for rows in pack(sequences, budget, ranks=ranks, share_prefixes=share, every_token=every_token):
        for row in rows:
            for k in range(len(row.label)):
                index, token = int(row.sequence_index[k]), int(row.token_index[k])
                ids = sequences[index].token_ids.tolist()
                assert visible(row, int(row.source[k])) == ids[:token]
                assert row.positions[row.source[k]] == token - 1
                assert row.label[k] == ids[token]
                assert (index, token) not in seen
                seen.add((index, token))
    first = 1 if every_token else None
    expected = {
        (i, t) for i, (prompt, done) in enumerate(texts) for t in range(first or len(prompt), len(prompt) + len(done))
    }
    assert seen == expected


def test_each_prediction_has_the_kept_ids_of_its_token() -> None:
    sequences = masked(groups())
    assert [s.sampling_mask is None for s in sequences[:4]] == [False, False, False, True]
    for share in (True, False):
        for row in pack(sequences, 40, share_prefixes=share)[0]:
            ends = np.cumsum(row.kept.counts)
            for k, (index, token) in enumerate(zip(row.sequence_index, row.token_index, strict=True)):
                recorded, ids = (
                    sequences[index].sampling_mask,
                    row.kept.token_ids[ends[k] - row.kept.counts[k] : ends[k]],
                )
                expected = [] if recorded is None else recorded.token_ids[recorded.rows() == token].tolist()
                assert ids.tolist() == expected and (recorded is None or row.label[k] in ids)
    assert all(row.kept is None for row in pack(groups(), 40)[0])
