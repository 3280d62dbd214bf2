"""Names the part that limits a run, and the setting to change, in one sentence from measured shares of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: Share of the time from which an idle side counts as waiting, and a working part as busy.
_WAITS, _BUSY = 0.15, 0.6


@dataclass(frozen=True, slots=True)
class Load:
    """Measured shares of training's time, 0..1, and the settings that the sentence names.

    busy: mean share of each kind of station (simulator, generator, scorer, trainer); count: stations of each kind.
    rows_idle: rows without a ticket; trainer_idle: the trainer neither trained nor published. one_thread: all stations
    share a thread (`launcher: inline`); one_slot: all rows step together; rows: of each env batch. batch_wait: a pass
    waited out batching.max_wait_ms; all_rows: of all env batches; below max_rows if no pass is ever full.
    """

    busy: Mapping[str, float]
    count: Mapping[str, int]
    rows_idle: float
    trainer_idle: float
    max_lag: float
    one_thread: bool = False
    one_slot: bool = False
    rows: int = 1
    batch_wait: float = 0.0
    max_wait_ms: float = 0.0
    fire_when_all_wait: bool = True
    max_rows: int = 0
    all_rows: int = 0


#: Setting that adds stations of a kind.
_MORE = {"simulator": "rollout.simulators", "generator": "rollout.generators", "scorer": "scoring.processes"}


def bottleneck(load: Load) -> str:
    """The sentence. Rules in order: passes wait for requests while no station is busy; one thread; both sides wait for
    each other; the trainer waits, so rollout limits; rows wait, so the trainer limits; neither waits."""
    if min(load.batch_wait, load.trainer_idle) >= _WAITS and max(load.busy.values()) < _BUSY:
        return _batches_wait(load)
    if load.one_thread:
        kind = max(load.busy, key=lambda kind: load.busy[kind])
        return (
            f"The {kind} takes {load.busy[kind]:.0%} of the one thread that all stations share: set "
            "launcher=local, so that they work side by side."
        )
    waits = f"rows without a ticket {load.rows_idle:.0%} and the trainer idle {load.trainer_idle:.0%}"
    if min(load.rows_idle, load.trainer_idle) >= _WAITS:
        remedy = f"raise freshness.max_lag (now {load.max_lag:g})"
        remedy += (
            " to 1"
            if load.max_lag < 1
            else " or training.mini_batch_samples, either of which lets more samples be under way"
        )
        return f"Rollout and training wait for each other in turn ({waits} of the time): {remedy}."
    if load.trainer_idle >= _WAITS:
        return _rollout_limits(load)
    if load.rows_idle >= _WAITS:
        return (
            f"The trainer limits the run (rows wait for it {load.rows_idle:.0%} of the time): lower "
            f"training.epochs, or raise placement.trainer.ranks (now {load.count['trainer']}), if devices or processor "
            "cores are free."
        )
    return f"Rollout and training keep pace ({waits} of the time): nothing to set."


def _batches_wait(load: Load) -> str:
    remedies = ["set batching.fire_when_all_wait=true"] * (not load.fire_when_all_wait)
    remedies.append(f"lower batching.max_wait_ms (now {load.max_wait_ms:g})")
    if load.max_rows > load.all_rows:
        remedies.append(f"lower batching.max_rows (now {load.max_rows}) to at most {load.all_rows}, all rows there are")
    return (
        f"Forward passes wait for batching.max_wait_ms {load.batch_wait:.0%} of the time, and no kind of station "
        f"is busy more than {max(load.busy.values()):.0%}: {', or '.join(remedies)}."
    )


def _rollout_limits(load: Load) -> str:
    own = {kind: load.busy[kind] for kind in _MORE if kind in load.busy}
    kind = max(own, key=lambda kind: own[kind])
    head = f"The trainer waits for samples {load.trainer_idle:.0%} of the time"
    if own[kind] >= _BUSY:
        what = f"the {kind}s limit the run, busy {own[kind]:.0%}"
        return f"{head}: {what}; raise {_MORE[kind]} (now {load.count[kind]}), if processor cores are free."
    what = f"simulators and generators wait for each other, busy {own[kind]:.0%} at most"
    # Where both are mostly idle, messages between them take the time, and two slots would send twice as many.
    if load.one_slot and own.get("simulator", 0.0) + own.get("generator", 0.0) >= _BUSY:
        return f"{head}: {what}; set rollout.sharding=even:2, so that half of the rows step while the others wait."
    return f"{head}: {what}; raise rollout.rows (now {load.rows}), so that a pass serves more of them."


def idle_shares(updates: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """`rows_idle`, `trainer_idle` and `batch_wait` over all lines of metrics.jsonl that have the first two, weighted by
    the seconds since the line before; empty if there are none."""
    rows = trainer = waits = total = before = 0.0
    for line in updates:
        if "rollouter/idle_ratio" in line and "trainer/idle_ratio" in line:
            seconds = max(0.0, line["time_s"] - before)
            rows += seconds * line["rollouter/idle_ratio"]
            trainer += seconds * line["trainer/idle_ratio"]
            waits += seconds * line.get("rollouter/batch_wait_ratio", 0.0)
            total += seconds
        before = line.get("time_s", before)
    return {"rows_idle": rows / total, "trainer_idle": trainer / total, "batch_wait": waits / total} if total else {}
