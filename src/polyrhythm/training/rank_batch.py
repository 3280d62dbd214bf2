"""Until the learner calls `Share.minibatch`."""

from __future__ import annotations

from torch import Tensor

from polyrhythm.training.batch import TrainingBatch
from polyrhythm.training.micro_batches import MicroBatchLimits, MiniBatch, Share
from polyrhythm.training.ranks import Ranks, take_share

RankBatch = MiniBatch
__all__ = ["RankBatch", "rank_batch", "take_share"]


def rank_batch(batch: TrainingBatch, share: Share, index: Tensor, limits: MicroBatchLimits, ranks: Ranks) -> MiniBatch:  # noqa: ARG001
    return share.minibatch(batch, index, limits)
