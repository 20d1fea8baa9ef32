from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_samples import groups, masked, sequence

from forge_async.errors import DataError
from forge_async.trainer.packing import PackedRow, RowCosts, pack
from forge_async.trainer.segments import Segment, ancestors, attention_layout, seen_until

COSTS = RowCosts(pair=0.05, prediction=0.25)


def visible(row: PackedRow, index: int) -> list[int]:
    """Token ids that row token ``index`` attends to, in order, by the definition of a segment."""
    for number, segment in enumerate(row.segments):
        if segment.start <= index < segment.start + segment.length:
            stretches = [range(s.start, s.start + s.length) for s in ancestors(row.segments, number)]
            return [int(row.token_ids[i]) for r in [*stretches, range(segment.start, index + 1)] for i in r]
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
    ((row,),) = pack(same, 100, least_saved=1)
    assert row.token_ids.tolist() == [5, 6, 7, 9, 10]
    assert row.positions.tolist() == [0, 1, 2, 2, 3]
    assert row.segments == (Segment(0, 2), Segment(2, 1, 0), Segment(3, 2, 0))
    assert row.source.tolist() == [1, 2, 1, 3, 4]
    assert row.label.tolist() == [7, 8, 9, 10, 11]
    assert row.whole_tokens == 7


def test_forks_share_their_turns_and_each_keeps_its_own_predictions_of_them() -> None:
    """Two episodes of a prompt; the first forks after a turn that both of its sequences train."""
    prompt, turn, reply = [5] * 10, [6, 7], [8, 9]
    first = sequence("e/0", prompt, [*turn, *reply, 10, 11], advantage=1.0)
    second = sequence("e/1", prompt, [*turn, *reply, 12], advantage=1.0, logprobs=[-1.0] * 5)
    other = sequence("f", prompt, [13, 14], advantage=-2.0)
    ((row,),) = pack([first, other, second], 100, least_saved=1)
    assert row.token_ids.tolist() == [*prompt, *turn, *reply, 10, 13]
    assert row.segments == (Segment(0, 10), Segment(10, 4, 0), Segment(14, 1, 1), Segment(15, 1, 0))
    shared = [k for k in range(len(row.label)) if 9 <= row.source[k] < 13 and row.label[k] != 13]
    assert [int(row.label[k]) for k in shared] == [*turn, *reply] * 2, "once for each of the two"
    assert sorted(row.behaviour[shared].tolist()) == [-3.0] * 4 + [-1.0] * 4
    assert row.advantage[row.sequence_index == 1].tolist() == [-2.0, -2.0]


def test_a_sequence_that_ends_where_another_goes_on_and_one_that_is_the_same() -> None:
    given = [
        sequence("short", [5] * 9, [6, 7]),
        sequence("long", [5] * 9, [6, 7, 8]),
        sequence("same", [5] * 9, [6, 9]),
    ]
    ((row,),) = pack(given, 100, least_saved=1)
    assert row.token_ids.tolist() == [5] * 9 + [6, 7]
    assert row.source[row.sequence_index == 2].tolist() == [8, 9]
    assert row.label[row.sequence_index == 2].tolist() == [6, 9]


def test_what_follows_the_last_trained_token_is_left_out() -> None:
    given = sequence("a", [5, 6], [7, 8, 9, 10])
    given.loss_mask[-2:] = False
    ((row,),) = pack([given], 100)
    assert row.token_ids.tolist() == [5, 6, 7]


def test_a_group_larger_than_the_budget_repeats_its_prompt() -> None:
    rows = pack([sequence(str(i), [5] * 10, [6 + i] * 6) for i in range(4)], 20)[0]
    assert [row.tokens for row in rows] == [20, 20]


def test_a_stretch_that_saves_little_is_copied() -> None:
    given = [sequence("a", [5] * 4, [6, 7]), sequence("b", [5] * 4, [8, 9]), sequence("c", [5] * 4, [10, 11])]
    for count, tokens in ((2, 10), (3, 4 + 3)):  # sharing four tokens saves 4, then 8
        ((row,),) = pack(given[:count], 100)
        assert row.tokens == tokens


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


TEXTS = st.lists(
    st.tuples(st.lists(st.integers(4, 6), min_size=1, max_size=4), st.lists(st.integers(4, 6), min_size=1, max_size=5)),
    min_size=1,
    max_size=14,
)


@given(TEXTS, st.integers(1, 30), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(1, 6))
def test_each_token_is_predicted_once_from_its_own_history(texts, budget, ranks, share, every_token, least) -> None:
    sequences = [sequence(str(i), prompt, completion) for i, (prompt, completion) in enumerate(texts)]
    seen = set()
    by_rank = pack(
        sequences, budget, ranks=ranks, share_prefixes=share, every_token=every_token, least_saved=least, costs=COSTS
    )
    assert len({len(rows) for rows in by_rank}) == 1, "as many micro-batches on every rank"
    for rows in by_rank:
        for row in rows:
            assert row.tokens <= budget or len({int(i) for i in row.sequence_index}) == 1 or not share_of(row, budget)
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


def share_of(row: PackedRow, budget: int) -> bool:
    """Whether the row could have been cut: it holds more than one text."""
    lengths = {}
    for index, token in zip(row.sequence_index.tolist(), row.token_index.tolist(), strict=True):
        lengths[index] = max(lengths.get(index, 0), token)
    return row.tokens > max(lengths.values(), default=1)


@given(TEXTS)
def test_the_mask_that_flex_attention_gets_is_the_tree(texts) -> None:
    given = [sequence(str(i), prompt, completion) for i, (prompt, completion) in enumerate(texts)]
    ((row,),) = pack(given, 1000, least_saved=1)
    until = seen_until(row.segments)
    for query in range(row.tokens):
        keys = [k for k in range(query + 1) if query < until[k]]
        assert row.token_ids[keys].tolist() == visible(row, query)


@given(TEXTS, st.integers(4, 30), st.integers(1, 3), st.randoms(use_true_random=False))
def test_the_order_of_the_sequences_plays_no_part(texts, budget, ranks, random) -> None:
    sequences = [sequence(str(i), prompt, completion) for i, (prompt, completion) in enumerate(texts)]
    shuffled = random.sample(sequences, len(sequences))

    def content(given: list) -> list:
        packed = pack(given, budget, ranks=ranks, least_saved=1, costs=COSTS)
        return [
            [
                (
                    row.token_ids.tolist(),
                    row.segments,
                    sorted(zip(row.source.tolist(), row.label.tolist(), strict=True)),
                )
                for row in rows
            ]
            for rows in packed
        ]

    assert content(sequences) == content(shuffled)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(30, 90), st.integers(2, 4))
def test_ranks_wait_no_longer_than_with_rows_dealt_as_they_come(lengths, budget, ranks) -> None:
    given = [sequence(str(i), [4 + i], [5] * length) for i, length in enumerate(lengths)]
    by_rank = pack(given, budget, ranks=ranks)
    wall = sum(max(row.cost for row in side) for side in zip(*by_rank, strict=True))
    (unbalanced,) = pack(given, budget)
    plain = sum(max(row.cost for row in unbalanced[i : i + ranks]) for i in range(0, len(unbalanced), ranks))
    assert len(by_rank[0]) == -(-len(unbalanced) // ranks), "as few rows as the budget needs"
    assert sum(lengths) / ranks <= wall <= plain


def test_shares_are_nearly_equal() -> None:
    random = np.random.default_rng(0)
    given = [sequence(str(i), [4 + i], [5] * int(n)) for i, n in enumerate(random.integers(5, 200, 64))]
    by_rank = pack(given, 1024, ranks=4, costs=RowCosts(pair=0.01))
    wall = sum(max(row.cost for row in side) for side in zip(*by_rank, strict=True))
    assert wall < 1.03 * sum(row.cost for rows in by_rank for row in rows) / 4
    assert all(row.tokens <= 1024 for rows in by_rank for row in rows)


def test_one_group_is_cut_where_ranks_would_be_idle() -> None:
    group = [sequence(str(i), [5] * 20, [6 + i] * 20) for i in range(8)]
    by_rank = pack(group, 4096, ranks=2)
    assert [[row.tokens for row in rows] for rows in by_rank] == [[20 + 4 * 19], [20 + 4 * 19]]


def test_ranks_are_balanced_by_cost_with_attention() -> None:
    """A completion of 100 tokens attends to 5050 pairs, ten of 20 to 2100; of 300 tokens each rank gets about half."""
    given = [sequence("long", [5], [6] * 100), *(sequence(str(i), [7 + i], [8] * 20) for i in range(10))]
    for pair, beside in ((0.0, 7), (0.1, 10)):
        by_rank = pack(given, 4096, ranks=2, costs=RowCosts(pair=pair))
        (other,) = [row for rows in by_rank for row in rows if 0 not in row.sequence_index]
        assert len(set(other.sequence_index.tolist())) == beside


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
