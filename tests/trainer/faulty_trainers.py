"""Trainers with a fault, for what must find it."""

from __future__ import annotations

import dataclasses
import sys

import cloudpickle
import numpy as np

from forge_async.trainer.aggregation import LossWeights
from forge_async.trainer.engine import TrainerEngine
from forge_async.trainer.packing import PackedRow
from forge_async.types import TrainingSequence

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import it


class PerRankDenominator(TrainerEngine):
    """Every rank divides by its own tokens, and the ranks' gradients are averaged: right only for equal shares."""

    def _accumulate(self, sequences: list[TrainingSequence], weighted: LossWeights, loss):  # type: ignore[no-untyped-def]
        own = sum(int(np.isfinite(row.behaviour).sum()) for row in self._rows(sequences))
        wrong = dataclasses.replace(weighted, denominator=float(max(own, 1) * self.data_ranks))
        return super()._accumulate(sequences, wrong, loss)


class ShiftedLabels(TrainerEngine):
    """Each prediction is compared with its row neighbour's label."""

    def _rows(self, sequences: list[TrainingSequence], every_token: bool = False) -> list[PackedRow]:
        rows = super()._rows(sequences, every_token)
        return rows if every_token else [dataclasses.replace(row, label=np.roll(row.label, 1)) for row in rows]


class NextLabels(TrainerEngine):
    """Each prediction is of the token after the next: the same in every packing, and wrong."""

    def _rows(self, sequences: list[TrainingSequence], every_token: bool = False) -> list[PackedRow]:
        rows = super()._rows(sequences, every_token)
        if every_token:
            return rows
        texts = [sequence.token_ids for sequence in sequences]
        return [
            dataclasses.replace(
                row,
                label=np.array(
                    [
                        texts[s][min(t + 1, len(texts[s]) - 1)]
                        for s, t in zip(row.sequence_index, row.token_index, strict=True)
                    ],
                    dtype=np.int64,
                ),
            )
            for row in rows
        ]
