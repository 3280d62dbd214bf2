"""Settings of the scheduler, validated once; every count is in samples, every time in seconds."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """A batch is due when max_rows rows or max_requests requests wait, when the oldest has waited for max_wait_s, or,
    with fire_when_all_wait, when no live slot could add a request."""

    max_rows: int
    max_requests: int
    max_wait_s: float
    fire_when_all_wait: bool = True


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Stations that take turns on their devices (`lease`). devices: shared device numbers by station.

    min_hold_s: minimum seconds that a busy station keeps a contended device. switch_order: who gets a free device:
    `data_flow` (trainer, generators, simulators) or `arrival` (longest wait first).
    """

    devices: dict[str, tuple[int, ...]]
    min_hold_s: float = 1.0
    switch_order: Literal["data_flow", "arrival"] = "data_flow"

    def __post_init__(self) -> None:
        if not 0 <= self.min_hold_s < math.inf:
            raise ValueError(f"min_hold_s is {self.min_hold_s}; it must be finite and not negative")


@dataclass(frozen=True, slots=True)
class ScoringRules:
    """How finished samples are scored. max_attempts: tries of a sample before it is dropped and replaced.
    max_evaluations: limit of evaluation samples that run or wait for their score."""

    max_attempts: int = 3
    max_evaluations: int = 64

    def __post_init__(self) -> None:
        for name in ("max_attempts", "max_evaluations"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class MoveRules:
    """What the scheduler may change during a run (`placement.moves`). devices: numbers of those that each station
    computes on, where it has any. micro_batch: chunk steps of a training pass at the start, and micro_batches, the
    sizes that it may have, ascending; empty: they are not moved. together: stations that lease a device may be on it
    at once."""

    devices: dict[str, tuple[int, ...]]
    micro_batch: int = 0
    micro_batches: tuple[int, ...] = ()
    together: bool = False


_AT_LEAST_ONE = ("batch_size", "sync_interval", "group_size", "max_rows", "max_requests", "tasks", "max_attempts")
_AT_LEAST_ZERO = ("training_states", "quarantine_after", "extra_groups", "extra_members")
_FINITE = ("max_lag", "max_wait_s", "evaluation_max_wait_s")


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How the conductor decides. Synchronous is a setting: max_lag 0, `drain`, `lockstep`.

    batch_size: samples per update; sync_interval: updates per version (K); max_lag: α, real, ≥ 0. bound: what α binds,
    every `sample` or the `mean`; order: how samples are chosen for an update; streaming: an update begins with its own
    samples, else a version's first update waits for those of the whole version. parts: it begins with its first
    complete groups, and the others follow as they are complete. on_update: `drain`, `continue`, or `abort`, in which
    streams that run when weights change are resumed from their tokens with nothing kept of the older weights (to the
    scheduler, the same as `continue`). batching: `lockstep`, or `dynamic` with max_rows, max_requests, max_wait_s and
    fire_when_all_wait, or `auto`, which adapts max_rows (up to this one) and max_wait_s during the run
    (`plugins/autobatch`), or `streams`: no batches; each generator has max_rows places, and a request begins as soon as
    there are places for its rows. buckets: row counts, ascending, that generators pad their passes to. routing:
    `least_loaded` (any idle generator takes the next batch), `round_robin` (requests are dealt out in turn as they
    arrive), `fixed` (slot i belongs to generator i mod n), `affinity` (a slot stays with its first generator).
    queue_key: `module:function` of a request, lowest served first; empty for arrival time. tasks: number of tasks,
    dealt round robin over groups; training_states: of each task, dealt in shuffled epochs over its groups, 0 for none;
    segments: simulators cut episodes, which excludes groups. episode_deadline_s: a ticket that runs longer is cancelled
    and re-issued; after max_attempts tries it is dropped and replaced. quarantine_after: failures of one task and seed
    after which it is set aside (`quarantine`); 0 for never. max_dropped: samples dropped by faults since the run began,
    or was resumed, after which it halts; surplus and filtered ones do not count. min_return, max_return: a complete
    group whose mean return lies outside is dropped and replaced. After max_filtered such groups in one update, further
    ones are kept (`accept`) or the run halts (`stop`): on_max_filtered. extra_groups, extra_members: groups in flight,
    and members of each, beyond what admission counts (`redundancy`). evaluator: the generator with the copy of the
    weights that background evaluations use; evaluator_only: it serves nothing else. evaluation_priority: order of
    passes on an evaluator that serves training too: in `turns`, or evaluation goes `first`, or `last`: when no training
    batch is due, or it has waited for evaluation_max_wait_s. evaluation_hedge: rows that an evaluation has no episodes
    for run copies of its last ones (`rollout/evaluation`). lease: stations that are on their devices in turn; None for
    none. scoring: a finished sample is scored by a scorer before its group counts it; None: it has its rewards already.
    moves: what is changed between two versions (`plugins/moves`); None for nothing.
    """

    batch_size: int
    sync_interval: int = 1
    max_lag: float = 2.0
    bound: Literal["sample", "mean"] = "sample"
    on_update: Literal["drain", "continue", "abort"] = "continue"
    order: Literal["ticket", "arrival"] = "arrival"
    streaming: bool = True
    parts: bool = False
    group_size: int = 1
    segments: bool = False
    batching: Literal["lockstep", "dynamic", "auto", "streams"] = "dynamic"
    max_rows: int = 64
    max_requests: int = 1_000_000
    buckets: tuple[int, ...] = ()
    max_wait_s: float = 0.005
    fire_when_all_wait: bool = True
    routing: Literal["least_loaded", "round_robin", "fixed", "affinity"] = "least_loaded"
    queue_key: str = ""
    tasks: int = 1
    training_states: int = 0
    seed: int = 0
    episode_deadline_s: float = math.inf
    max_attempts: int = 3
    quarantine_after: int = 0
    max_dropped: int = 1000
    min_return: float = -math.inf
    max_return: float = math.inf
    max_filtered: int = 100
    on_max_filtered: Literal["accept", "stop"] = "accept"
    extra_groups: int = 0
    extra_members: int = 0
    evaluator: str = ""
    evaluator_only: bool = False
    evaluation_priority: Literal["turns", "first", "last"] = "turns"
    evaluation_max_wait_s: float = 1.0
    evaluation_hedge: bool = False
    lease: LeaseSettings | None = None
    scoring: ScoringRules | None = None
    moves: MoveRules | None = None

    def __post_init__(self) -> None:
        checks = [
            *((name, getattr(self, name) >= 1, "at least 1") for name in _AT_LEAST_ONE),
            *((name, getattr(self, name) >= 0, "at least 0") for name in _AT_LEAST_ZERO),
            *((name, 0 <= getattr(self, name) < math.inf, "finite and not negative") for name in _FINITE),
            (
                "buckets",
                list(self.buckets) == sorted(set(self.buckets)) and min(self.buckets, default=1) >= 1,
                "row counts of at least 1, smallest first",
            ),
            ("episode_deadline_s", self.episode_deadline_s > 0, "positive"),
            ("max_filtered", self.max_filtered >= 1, "at least 1"),
            ("min_return", self.min_return <= self.max_return, f"at most {self.max_return} (max_return)"),
        ]
        for name, good, remedy in checks:
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {remedy}")
        if self.batch_size % self.group_size:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of group_size {self.group_size}; "
                f"use {self.batch_size // self.group_size * self.group_size or self.group_size}"
            )
        if self.segments and self.scoring is not None:
            raise ValueError(
                "scoring is set but episodes are cut into segments, which have no score; set segment_steps to 0"
            )
        if self.segments and self.group_size > 1:
            raise ValueError("segments and groups exclude each other; set segment_steps to 0 or group_size to 1")
        self._check_redundancy()
        self._check_streams()
        whole = not self.streaming or self.order == "ticket" or self.batching == "lockstep" or self.lease is not None
        if self.parts and whole:  # `config.streaming.why_whole_updates` has the reasons
            raise ValueError(
                "parts is true but updates are lent whole where streaming is false, order is ticket, batching is "
                "lockstep or stations lease devices; make it false"
            )

    def _check_streams(self) -> None:
        if self.batching != "streams" and self.on_update == "abort":
            raise ValueError(
                f"on_update is abort but batching is {self.batching}: a pass cannot be cut in the middle; make "
                f"on_update continue, or batching streams"
            )
        shared = bool(self.evaluator) and not self.evaluator_only
        if self.batching == "streams" and shared and self.evaluation_priority != "turns":
            raise ValueError(
                f"evaluation_priority is {self.evaluation_priority} but batching is streams, whose decode steps for "
                f"training and evaluation take turns; make it turns, or evaluator_only true"
            )

    def _check_redundancy(self) -> None:
        name, value = "extra_groups" if self.extra_groups else "extra_members", self.extra_groups or self.extra_members
        if value and self.order == "ticket":
            raise ValueError(
                f"{name} is {value} but order is ticket: only the lowest tickets would be taken, whoever is first; "
                f"make order arrival, or {name} 0"
            )
        if value and self.segments:
            raise ValueError(
                f"{name} is {value} but episodes are cut into segments, which cannot be thrown away; make "
                f"segment_steps or {name} 0"
            )
        if self.filters and self.segments:
            raise ValueError(
                "min_return or max_return is set but episodes are cut into segments, whose return is not the "
                "episode's; set segment_steps to 0, or take the bounds away"
            )

    @property
    def filters(self) -> bool:
        return self.min_return > -math.inf or self.max_return < math.inf

    @property
    def group_tickets(self) -> int:
        """Maximum tickets of a group: `group_size` and the extra ones."""
        return self.group_size + self.extra_members

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(self.max_rows, self.max_requests, self.max_wait_s, self.fire_when_all_wait)

    @property
    def version_samples(self) -> int:
        """B, the samples consumed per version."""
        return self.batch_size * self.sync_interval

    def limit(self, version: int, max_lag: float | None = None) -> int:
        """floor((version + 1 + max_lag)·B): how many samples may be consumed or outstanding at `version`. max_lag: the
        setting's by default."""
        lag = self.max_lag if max_lag is None else max_lag
        return (version + 1) * self.version_samples + math.floor(lag * self.version_samples + 1e-9)


def load_function(path: str, what: str) -> Callable[..., object]:
    """The function that `module:function` names. Raises ValueError with what, value and remedy."""
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"{what} {path!r} cannot be loaded ({said}); name an importable module:function") from error
    if not callable(function):
        raise ValueError(f"{what} {path!r} is {type(function).__name__}, not a function")
    return cast(Callable[..., object], function)
