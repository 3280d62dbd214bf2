"""Training as a generator, one optimizer step per `next()`, and an update's samples that come in parts.

Inside another generator: `metrics = yield from learner.update(...)`; all at once: `finish(learner.update(...))`.

The trainer processes each part of an update's samples as it arrives and adds up gradients of sums, not of means: the
normaliser is known with the last sample, and then scales them once (`config.streaming` says where that gives the
gradient of all samples together).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from polyrhythm.algorithms.metrics import explained_variance
from polyrhythm.specs import Trajectory
from polyrhythm.training.batch import Arrays, PackedBatch, TrainingBatch
from polyrhythm.training.pooled import PooledRows, join_pooled

if TYPE_CHECKING:
    from polyrhythm.config.sections.algorithm import AlgorithmSettings


Metrics = dict[str, float]
Steps = Generator[None, None, Metrics]


class PhaseTimes:
    """Seconds of an update by phase, on the host's clock. Measuring waits for no device, so a device's time counts in
    the phase that waits for its result."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def end(self, phase: str) -> None:
        """Attribute the time since the last call to this phase."""
        before, self._since = self._since, time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + self._since - before

    def skip(self) -> None:
        """Attribute the time since the last call to no phase."""
        self._since = time.monotonic()


def finish(steps: Steps, each: Callable[[int], None] = lambda _: None) -> Metrics:
    """Run the remaining `steps` and return their metrics. each: called after every step with the number done here."""
    done = 0
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            metrics: Metrics = stop.value
            return metrics
        done += 1
        each(done)


_KEPT = "train/actor/correction_weight"
_REJECTED = "train/actor/rejected_fraction"


class SampleFeed:
    """Samples of an update that have arrived and are not trained on yet. complete: no more follow. starved: the learner
    needs more to continue; stepped: it has changed the weights by some of them; taken: number of `take` calls."""

    def __init__(self) -> None:
        self._waiting: deque[Trajectory] = deque()
        self.complete = self.starved = self.stepped = False
        self.taken = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, samples: Sequence[Trajectory], *, more: bool) -> None:
        """Add whole groups, in their order in the update. more: others follow."""
        assert not self.complete, "samples for an update that has all of its own"
        self._waiting += samples
        self.complete, self.starved = not more, False

    def take(self, most: int | None = None) -> list[Trajectory]:
        """Remove and return all waiting samples, at most `most`."""
        self.taken += 1
        count = len(self) if most is None else min(most, len(self))
        return [self._waiting.popleft() for _ in range(count)]


class UpdatePart(NamedTuple):
    """Targets of a part. packed: including the output of the policy's frozen part."""

    packed: PackedBatch
    batch: TrainingBatch
    metrics: Metrics
    samples: int


def join_packed(parts: Sequence[PackedBatch]) -> PackedBatch:
    """One batch of all trajectories, in order."""
    first = [0]
    for part in parts:
        first.append(first[-1] + len(part.terminated))
    joined = _joined(parts)
    moved = torch.cat([part.trajectory + start for part, start in zip(parts, first, strict=False)])
    return PackedBatch(**{**joined, "trajectory": moved})


def join_batches(parts: Sequence[TrainingBatch], obs: Arrays, forward_inputs: Arrays, factor: float) -> TrainingBatch:
    """One training batch of all chunk steps, in order, with these inputs of the policy, which are joined already.
    factor: on the weights of entries (`weight_factor`)."""
    joined = _joined(parts, without=("obs", "forward_inputs")) | {"obs": obs, "forward_inputs": forward_inputs}
    scaled = {name: joined[name] * factor for name in ("weight", "value_weight") if joined[name] is not None}
    return TrainingBatch(**{**joined, **(scaled if factor != 1.0 else {})})


def weight_factor(algorithm: AlgorithmSettings, parts: Sequence[PackedBatch]) -> float:
    """Factor from weights made with `counts` of one chunk step and one trajectory to those of the update."""
    if algorithm.aggregation != "episode_mean":
        return 1.0
    return sum(part.chunk_steps for part in parts) / sum(len(part.terminated) for part in parts)


def target_metrics(algorithm: AlgorithmSettings, parts: Sequence[UpdatePart], batch: TrainingBatch) -> Metrics:
    """Metrics of the targets of all parts, for the joined `batch`. Each part's metrics are averaged by its entries,
    which is exact for shares of entries and of samples."""
    found: Metrics = {}
    for name in dict.fromkeys(name for part in parts for name in part.metrics):
        own = [part for part in parts if name in part.metrics]
        shares = [_share(name, part, by_chunk=algorithm.logprob_level == "chunk") for part in own]
        found[name] = sum(part.metrics[name] * x for part, x in zip(own, shares, strict=True)) / max(sum(shares), 1e-12)
    if algorithm.uses_value:
        explained = explained_variance(batch.old_value, batch.returns, batch.value_mask)
        found["train/critic/explained_variance"] = float(explained)
    return found


def _share(name: str, part: UpdatePart, *, by_chunk: bool) -> float:
    """Weight of a part in the mean of a metric: samples if groups are compared, else entries, without
    rejected ones if `_KEPT`."""
    if name.endswith("zero_advantage_fraction"):
        return part.samples
    entries = float(part.packed.valid.any(1).sum() if by_chunk else part.packed.valid.sum())
    return entries * (1.0 - part.metrics.get(_REJECTED, 0.0)) if name == _KEPT else entries


def _joined(parts: Sequence[Any], without: Sequence[str] = ()) -> dict[str, Any]:
    names = [field.name for field in fields(parts[0]) if field.name not in without]
    return {name: _cat([getattr(part, name) for part in parts]) for name in names}


def _cat(pieces: Sequence[Any]) -> Any:
    if pieces[0] is None:
        return None
    if isinstance(pieces[0], Mapping):
        return {name: _cat([piece[name] for piece in pieces]) for name in pieces[0]}
    if isinstance(pieces[0], PooledRows):
        return join_pooled(pieces)
    device = torch.device("cpu") if any(piece.is_cpu for piece in pieces) else pieces[0].device
    return torch.cat([piece.to(device) for piece in pieces])
