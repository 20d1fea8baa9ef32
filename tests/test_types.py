from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_async.types import SamplingMask, TrainingSequence


def mask_of(parts: list[list[int]]) -> SamplingMask:
    flat = [token for part in parts for token in part]
    return SamplingMask(np.array(flat, np.int32), np.array([len(part) for part in parts], np.int32))


def parts_of(mask: SamplingMask) -> list[list[int]]:
    return [part.tolist() for part in np.split(mask.token_ids, np.cumsum(mask.counts)[:-1])] if len(mask) else []


PARTS = st.lists(st.lists(st.integers(0, 9), max_size=4, unique=True), max_size=8)


@given(PARTS, PARTS, st.data())
def test_a_sampling_mask_is_a_list_of_lists_without_the_lists(first, second, data) -> None:
    joined = SamplingMask.join([mask_of(first), SamplingMask.whole(2), mask_of(second)])
    lists = [*first, [], [], *second]
    assert parts_of(joined) == lists and len(joined) == len(lists)
    chosen = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=6))
    assert parts_of(joined.of(np.array(chosen, dtype=np.int64))) == [lists[index] for index in chosen]
    own = data.draw(st.lists(st.integers(0, 9), min_size=len(lists), max_size=len(lists)))
    expected = [not part or token in part for token, part in zip(own, lists, strict=True)]
    assert joined.has(np.array(own, np.int32)).tolist() == expected
    assert joined.token_ids.dtype == joined.counts.dtype == np.int32


def test_masks_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="add up to 3, not 2"):
        SamplingMask(np.zeros(2, np.int32), np.array([3], np.int32))
    ones = np.ones(2, np.int32)
    with pytest.raises(ValueError, match="a: sampling_mask has 3 entries, token_ids has 2"):
        TrainingSequence("a", ones, ones > 0, ones, ones, ones, sampling_mask=SamplingMask.whole(3))
