"""Training sequences -> packed rows. Deterministic: the same sequences give the same rows on every rank.

A row is one forward pass: many sequences one after another, without padding. Sequences with an identical prompt (the
episodes of a group) share it: the prompt is computed once and each completion attends to it, which changes no number
and cuts the tokens of a group of n by up to n times.

The last token of a sequence predicts nothing, so it is not in the row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forge_async.errors import DataError
from forge_async.trainer.segments import Segment
from forge_async.types import SamplingMask, TrainingSequence


@dataclass(frozen=True)
class PackedRow:
    """One forward pass of T tokens with K predictions. The predicted token's own values are gathered per prediction."""

    token_ids: np.ndarray
    """int64 [T]."""
    positions: np.ndarray
    """int64 [T]: position of each token in its own sequence."""
    segments: tuple[Segment, ...]
    source: np.ndarray
    """int64 [K]: row index of the token before the predicted one."""
    label: np.ndarray
    """int64 [K]: id of the predicted token."""
    behaviour: np.ndarray
    """float32 [K]: behaviour log-prob."""
    advantage: np.ndarray
    """float32 [K]."""
    inverse_temperature: np.ndarray
    """float32 [K]."""
    sequence_index: np.ndarray
    """int64 [K]: which of the given sequences the predicted token belongs to."""
    token_index: np.ndarray
    """int64 [K]: and its index there."""
    kept: SamplingMask | None = None
    """Ids that the sampler kept for each of the K; None: all of them, for each."""

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class _Unit:
    """Sequences packed together: they share ``prefix_length`` first tokens. ``cost`` is their tokens in the row."""

    members: tuple[int, ...]
    prefix_length: int
    cost: int


def pack(
    sequences: list[TrainingSequence],
    token_budget: int,
    *,
    ranks: int = 1,
    share_prefixes: bool = True,
    every_token: bool = False,
) -> list[list[PackedRow]]:
    """Rows for each rank; every rank gets the same number, filled up with rows that predict nothing.

    Args:
        token_budget: tokens per row; a sequence longer than it gets a row of its own.
        every_token: predict every token but the first, not only those of the loss mask.

    Raises:
        DataError: a sequence is unusable (a trained first token, a temperature that is not positive); it is named.
    """
    masks = [_prediction_mask(sequence, every_token) for sequence in sequences]
    units = _units(sequences, masks, token_budget, share_prefixes)
    total = sum(unit.cost for unit in units)
    budget = max(1, min(token_budget, -(-total // ranks))) if ranks > 1 else token_budget
    if budget < token_budget:
        units = _units(sequences, masks, budget, share_prefixes)
    bins = _first_fit(units, budget)
    by_rank = _spread(bins, ranks)
    rows = [[_row(sequences, masks, content) for content in contents] for contents in by_rank]
    longest = max(len(rank_rows) for rank_rows in rows)
    for rank_rows in rows:
        rank_rows.extend(_empty_row() for _ in range(longest - len(rank_rows)))
    return rows


def _prediction_mask(sequence: TrainingSequence, every_token: bool) -> np.ndarray:
    if not sequence.temperature > 0:
        raise DataError(
            f"{sequence.sequence_id}: temperature is {sequence.temperature}; "
            "log-probs need a temperature above 0 (greedy samples cannot be trained on)"
        )
    if len(sequence.token_ids) == 0:
        raise DataError(f"{sequence.sequence_id}: has no tokens")
    if every_token:
        mask = np.ones(len(sequence.token_ids), dtype=bool)
        mask[0] = False
        return mask
    mask = np.asarray(sequence.loss_mask, dtype=bool)
    if mask[0]:
        raise DataError(f"{sequence.sequence_id}: its first token is trained, but nothing before it predicts it")
    return mask


def _units(
    sequences: list[TrainingSequence], masks: list[np.ndarray], token_budget: int, share_prefixes: bool
) -> list[_Unit]:
    groups: dict[tuple[int, bytes], list[int]] = {}
    for index, (sequence, mask) in enumerate(zip(sequences, masks, strict=True)):
        if not mask.any():
            continue
        prompt = _prompt_length(sequence, mask)
        key = np.ascontiguousarray(sequence.token_ids[:prompt], dtype=np.int64).tobytes()
        groups.setdefault((prompt, key) if share_prefixes else (index, b""), []).append(index)
    units = []
    for members in groups.values():
        prefix = _prompt_length(sequences[members[0]], masks[members[0]])
        chosen: list[int] = []
        cost = prefix
        for index in members:
            own = len(sequences[index].token_ids) - 1 - prefix
            if chosen and cost + own > token_budget:
                units.append(_Unit(tuple(chosen), prefix, cost))
                chosen, cost = [], prefix
            chosen.append(index)
            cost += own
        units.append(_Unit(tuple(chosen), prefix, cost))
    return units


def _prompt_length(sequence: TrainingSequence, mask: np.ndarray) -> int:
    """Tokens before the first sampled one; before the last token where none is marked as sampled."""
    loss_mask = np.asarray(sequence.loss_mask, dtype=bool)
    if loss_mask.any() and not loss_mask[0]:
        return int(loss_mask.argmax())
    return max(1, len(mask) - 1)


def _first_fit(units: list[_Unit], budget: int) -> list[list[_Unit]]:
    order = sorted(range(len(units)), key=lambda index: (-units[index].cost, index))
    bins: list[list[_Unit]] = []
    free: list[int] = []
    for index in order:
        unit = units[index]
        for position, room in enumerate(free):
            if unit.cost <= room:
                bins[position].append(unit)
                free[position] -= unit.cost
                break
        else:
            bins.append([unit])
            free.append(budget - unit.cost)
    return bins


def _spread(bins: list[list[_Unit]], ranks: int) -> list[list[list[_Unit]]]:
    """Heaviest row first, each to the rank with the least tokens so far."""
    by_rank: list[list[list[_Unit]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    costs = [sum(unit.cost for unit in content) for content in bins]
    for index in sorted(range(len(bins)), key=lambda index: (-costs[index], index)):
        rank = load.index(min(load))
        by_rank[rank].append(bins[index])
        load[rank] += costs[index]
    return by_rank


def _row(sequences: list[TrainingSequence], masks: list[np.ndarray], units: list[_Unit]) -> PackedRow:
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    segments: list[Segment] = []
    predictions: dict[str, list[np.ndarray]] = {name: [] for name in _PREDICTION_FIELDS}
    kept: list[SamplingMask] = []
    cursor = 0
    for unit in units:
        prefix = unit.prefix_length
        prefix_start = cursor
        alone = len(unit.members) == 1
        if not alone:
            ids.append(np.asarray(sequences[unit.members[0]].token_ids[:prefix]))
            positions.append(np.arange(prefix))
            segments.append(Segment(cursor, prefix))
            cursor += prefix
        for index in unit.members:
            sequence, mask = sequences[index], masks[index]
            first = 0 if alone else prefix
            own = np.asarray(sequence.token_ids[first : len(sequence.token_ids) - 1])
            if len(own):
                ids.append(own)
                positions.append(np.arange(first, first + len(own)))
                segments.append(Segment(cursor, len(own), prefix_start, first))
            predicted = np.flatnonzero(mask)
            before = predicted - 1
            predictions["source"].append(np.where(before < first, prefix_start + before, cursor + before - first))
            predictions["label"].append(np.asarray(sequence.token_ids)[predicted])
            predictions["behaviour"].append(np.asarray(sequence.logprobs)[predicted])
            predictions["advantage"].append(np.asarray(sequence.advantages)[predicted])
            predictions["inverse_temperature"].append(np.full(len(predicted), 1.0 / sequence.temperature))
            predictions["sequence_index"].append(np.full(len(predicted), index))
            predictions["token_index"].append(predicted)
            recorded = sequence.sampling_mask
            kept.append(SamplingMask.whole(len(predicted)) if recorded is None else recorded.of(predicted))
            cursor += len(own)
    flat: dict[str, Any] = {
        name: np.concatenate(values).astype(_PREDICTION_FIELDS[name]) for name, values in predictions.items()
    }
    return PackedRow(
        token_ids=np.concatenate(ids).astype(np.int64),
        positions=np.concatenate(positions).astype(np.int64),
        segments=tuple(segments),
        kept=SamplingMask.join(kept) if any(len(mask.token_ids) for mask in kept) else None,
        **flat,
    )


def plain_row(texts: list[np.ndarray]) -> PackedRow:
    """Whole texts one after another, no predictions."""
    nothing: dict[str, Any] = {name: np.zeros(0, dtype=dtype) for name, dtype in _PREDICTION_FIELDS.items()}
    starts = np.cumsum([0, *(len(text) for text in texts[:-1])])
    segments = tuple(Segment(int(start), len(text)) for start, text in zip(starts, texts, strict=True))
    positions = np.concatenate([np.arange(len(text)) for text in texts])
    return PackedRow(np.concatenate(texts).astype(np.int64), positions, segments, **nothing)


def pad_row(row: PackedRow, multiple: int) -> PackedRow:
    """The row with tokens that nobody attends to at its end, up to a multiple of so many."""
    missing = -row.tokens % multiple
    if not missing:
        return row
    return replace(
        row,
        token_ids=np.concatenate([row.token_ids, np.zeros(missing, dtype=np.int64)]),
        positions=np.concatenate([row.positions, np.arange(missing)]),
        segments=(*row.segments, Segment(row.tokens, missing)),
    )


def _empty_row() -> PackedRow:
    """One token, no prediction: keeps a rank's collectives in step with the others'."""
    return plain_row([np.zeros(1, dtype=np.int64)])


_PREDICTION_FIELDS = {
    "source": np.int64,
    "label": np.int64,
    "behaviour": np.float32,
    "advantage": np.float32,
    "inverse_temperature": np.float32,
    "sequence_index": np.int64,
    "token_index": np.int64,
}
