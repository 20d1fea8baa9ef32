"""Training sequences -> packed rows. Deterministic: the same sequences give the same rows on every rank.

A row is one forward pass: many sequences one after another, without padding. What several sequences begin with (the
prompt of a group, the turns before a fork, the same first sampled tokens) stands in the row once, as a node of a prefix
tree, and each continuation attends to it; no number changes by it. Every sequence keeps predictions of its own, with
its own advantage, behaviour log-prob and version, also where several predict from one token of the row: what is shared
is the hidden state alone, and its gradient is the sum of theirs.

The last predicted token of a sequence predicts nothing, so neither it nor what follows it is in the row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forge_async.errors import DataError
from forge_async.trainer.placing import RowPlan, balanced, deal
from forge_async.trainer.prefix_tree import LEAST_SAVED, Node, prefix_tree, weigh
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
    whole_tokens: int = 0
    """What T would be if every sequence had tokens of its own."""
    cost: float = 0.0
    """By the :class:`RowCosts` it was packed with."""

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class RowCosts:
    """What a row costs beside its tokens' linear layers; the unit is those of one token."""

    pair: float = 0.0
    """One token attending to one."""
    prediction: float = 0.0
    """One prediction: a line of logits."""


def pack(
    sequences: list[TrainingSequence],
    token_budget: int,
    *,
    ranks: int = 1,
    share_prefixes: bool = True,
    every_token: bool = False,
    costs: RowCosts = RowCosts(),
    least_saved: int = LEAST_SAVED,
) -> list[list[PackedRow]]:
    """Rows for each rank; every rank gets the same number, filled up with rows that predict nothing.

    Args:
        token_budget: tokens per row; a sequence longer than it gets a row of its own.
        every_token: predict every token but the first, not only those of the loss mask.
        costs: by which ranks' shares are made alike.
        least_saved: tokens that a shared stretch must save.

    Raises:
        DataError: a sequence is unusable (a trained first token, a temperature that is not positive); it is named.
    """
    predicted = {
        index: found
        for index, sequence in enumerate(sequences)
        if len(found := np.flatnonzero(_prediction_mask(sequence, every_token)))
    }
    texts = {index: np.asarray(sequences[index].token_ids[: found[-1]]) for index, found in predicted.items()}
    roots = prefix_tree(texts, share_prefixes, least_saved)
    weigh(roots, costs.pair, {index: costs.prediction * len(found) for index, found in predicted.items()})
    by_rank = deal(balanced(roots, token_budget, ranks), ranks)
    rows = [[_row(sequences, predicted, plan) for plan in plans] for plans in by_rank]
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


def _row(sequences: list[TrainingSequence], predicted: dict[int, np.ndarray], plan: RowPlan) -> PackedRow:
    """The plan's nodes one after another, parents first, and the predictions of the sequences that end in them."""
    ids: list[np.ndarray] = []
    segments: list[Segment] = []
    places: dict[Node, tuple[int, np.ndarray]] = {}
    """Node -> its segment, and the row index of each token from its sequences' first to its own last."""
    predictions: dict[str, list[np.ndarray]] = {name: [] for name in _PREDICTION_FIELDS}
    kept: list[SamplingMask] = []
    cursor = 0
    nodes = sorted(plan.nodes, key=lambda node: node.order)
    for node in nodes:
        parent, place_T = places[node.parent] if node.parent is not None else (-1, np.zeros(0, dtype=np.int64))
        if node.length:
            ids.append(np.asarray(sequences[node.text].token_ids[node.start : node.stop]))
            segments.append(Segment(cursor, node.length, parent))
            place_T = np.concatenate([place_T, np.arange(cursor, cursor + node.length)])
            places[node] = (len(segments) - 1, place_T)
            cursor += node.length
        for index in node.ends:
            sequence, predicted_K = sequences[index], predicted[index]
            predictions["source"].append(place_T[predicted_K - 1])
            predictions["label"].append(np.asarray(sequence.token_ids)[predicted_K])
            predictions["behaviour"].append(np.asarray(sequence.logprobs)[predicted_K])
            predictions["advantage"].append(np.asarray(sequence.advantages)[predicted_K])
            predictions["inverse_temperature"].append(np.full(len(predicted_K), 1.0 / sequence.temperature))
            predictions["sequence_index"].append(np.full(len(predicted_K), index))
            predictions["token_index"].append(predicted_K)
            recorded = sequence.sampling_mask
            kept.append(SamplingMask.whole(len(predicted_K)) if recorded is None else recorded.of(predicted_K))
    flat: dict[str, Any] = {
        name: np.concatenate(values).astype(_PREDICTION_FIELDS[name]) for name, values in predictions.items()
    }
    return PackedRow(
        token_ids=np.concatenate(ids).astype(np.int64),
        positions=np.concatenate([np.arange(node.start, node.stop) for node in nodes]).astype(np.int64),
        segments=tuple(segments),
        kept=SamplingMask.join(kept) if any(len(mask.token_ids) for mask in kept) else None,
        whole_tokens=sum(int(predicted[index][-1]) for node in nodes for index in node.ends),
        cost=plan.cost,
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
