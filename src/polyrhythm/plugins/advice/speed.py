"""What limits the throughput, and the settings to change: placement first, then rows, then lag, then approximations
(the order of RLinf's guide to asynchronous PPO, section 12.2).

Bounds: a trainer that waits a share t of the time gains at most 1/(1-t) when it never waits; rows likewise; a kind of
station whose number grows from n to m gains at most m/n.
"""

from __future__ import annotations

from collections.abc import Iterator

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import DynamicBatching
from polyrhythm.plugins.advice.findings import Change, Finding, at_most, without
from polyrhythm.plugins.advice.measures import Shares

#: Shares of the time: from which an idle side counts as waiting, a working part as busy, all cores as in use, and
#: recomputed log-probs as worth an approximation.
_WAITS, _BUSY, _FULL, _PROXIMAL = 0.15, 0.6, 0.9, 0.15
#: Setting that adds stations of a kind, the row of the table, and the cost.
_MORE = {
    "simulator": ("rollout.simulators", "simulation", "processor cores and memory"),
    "generator": ("rollout.generators", "inference", "the memory of another policy"),
    "scorer": ("scoring.processes", "scoring", "processor cores"),
}


def limit(shares: Shares, config: RunConfig) -> Finding:
    """What limits the run. In this order: passes wait for requests while no station is busy; all stations share one
    thread; rollout and training wait for each other; the trainer waits; rows wait; neither waits."""
    idle, busiest = shares.trainer_idle, max(shares.busy.values())
    batching = config.batching
    if isinstance(batching, DynamicBatching) and min(shares.batch_wait, idle) >= _WAITS and busiest < _BUSY:
        return _batches_wait(shares, batching, config.all_rows)
    if config.launcher == "inline":
        return _one_thread(shares, config)
    waits = f"rows without a ticket {shares.rows_idle:.0%} and the trainer idle {idle:.0%} of the time"
    if min(shares.rows_idle, idle) >= _WAITS:
        return Finding(
            "throughput", "in-turn", f"rollout and training wait for each other: {waits}", _lag(shares, config)
        )
    if idle >= _WAITS:
        return _rollout_limits(shares, config)
    if shares.rows_idle >= _WAITS:
        measured = f"the trainer limits the run: rows wait for it {shares.rows_idle:.0%} of the time"
        return Finding("throughput", "training", measured, tuple(_training(shares, config)), "trainer")
    return Finding("throughput", "balanced", f"rollout and training keep pace: {waits}", remedy="nothing to set")


def _batches_wait(shares: Shares, batching: DynamicBatching, rows: int) -> Finding:
    gain = at_most(without(shares.batch_wait), without(shares.trainer_idle))
    wait, changes = batching.max_wait_ms, []
    if not batching.fire_when_all_wait:
        changes.append(Change("batching.fire_when_all_wait", False, True, "", gain))
    if batching.max_rows > rows:
        changes.append(Change("batching.max_rows", batching.max_rows, rows, "", gain))
    changes.append(Change("batching.max_wait_ms", wait, round(wait / 4, 3), "smaller passes", gain))
    measured = (
        f"forward passes wait for batching.max_wait_ms {shares.batch_wait:.0%} of the time, and no kind of station is "
        f"busy more than {max(shares.busy.values()):.0%}"
    )
    return Finding("throughput", "batch-wait", measured, tuple(changes), "generator")


def _one_thread(shares: Shares, config: RunConfig) -> Finding:
    kind = max(shares.busy, key=lambda kind: shares.busy[kind])
    measured = f"the {kind} takes {shares.busy[kind]:.0%} of the one thread that all stations share"
    gain = at_most(without(1.0 - shares.busy[kind]))
    change = Change("launcher", config.launcher, "local", "a process for each station", gain)
    changes = (change,) * (shares.cores < _FULL)
    return Finding("throughput", "one-thread", measured, changes, kind, _cores(shares))


def _lag(shares: Shares, config: RunConfig) -> tuple[Change, ...]:
    lag, samples = config.freshness.max_lag, config.training.mini_batch_samples
    gain = at_most(without(shares.trainer_idle), without(shares.rows_idle))
    older = 1 if lag < 1 else lag + 1
    first = Change("freshness.max_lag", lag, older, f"samples up to {older:g} versions old", gain, unstable=True)
    if lag < 1:
        return (first,)
    return first, Change("training.mini_batch_samples", samples, 2 * samples, "longer updates", gain)


def _rollout_limits(shares: Shares, config: RunConfig) -> Finding:
    rollout = config.rollout
    own = {kind: shares.busy[kind] for kind in _MORE if kind in shares.busy}
    kind = max(own, key=lambda kind: own[kind])
    head, most = f"the trainer waits for samples {shares.trainer_idle:.0%} of the time", without(shares.trainer_idle)
    wider = Change("rollout.rows", rollout.rows, 2 * rollout.rows, "memory; more samples under way", at_most(2, most))
    if own[kind] >= _BUSY:
        setting, row, cost = _MORE[kind]
        count = shares.count[kind]
        more = Change(setting, count, 2 * count, cost, at_most(2, most))
        changes = [more, wider] if kind == "generator" else [more] * (shares.cores < _FULL)
        measured = f"{head}: the {kind}s limit the run, busy {own[kind]:.0%}"
        return Finding("throughput", row, measured, tuple(changes), kind, _cores(shares))
    measured = f"{head}: simulators and generators wait for each other, busy {own[kind]:.0%} at most"
    changes = [wider] * (shares.cores < _FULL)  # more rows are more work for the same cores
    # Where both are mostly idle, messages between them take the time, and two slots would send twice as many.
    both = own.get("simulator", 0.0) + own.get("generator", 0.0)
    one_slot = rollout.simulators * rollout.env_batches == 1 and rollout.sharding == "whole"
    if one_slot and rollout.rows > 1 and both >= _BUSY:
        halves = Change("rollout.sharding", "whole", "even:2", "smaller passes", at_most(2, most))
        changes.insert(0, halves)
    return Finding("throughput", "alternating", measured, tuple(changes), "simulator", _cores(shares))


def _training(shares: Shares, config: RunConfig) -> Iterator[Change]:
    """What makes updates shorter: more devices, then fewer passes over a sample, then an approximation."""
    training, ranks = config.training, config.placement.trainer.ranks or 1
    most = without(shares.rows_idle)
    if shares.cores < _FULL:
        yield Change("placement.trainer.ranks", ranks, 2 * ranks, "a device, or processor cores", at_most(2, most))
    if steps := training.micro_batch_steps:
        more_steps = min(2 * steps, training.minibatch_steps or 2 * steps)
        if more_steps > steps:
            gain = at_most(more_steps / steps, most)
            yield Change("training.micro_batch_steps", steps, more_steps, "memory", gain)
    if training.epochs > 1:
        fewer = training.epochs // 2
        gain = at_most(training.epochs / fewer, most)
        yield Change("training.epochs", training.epochs, fewer, "less learned from a sample", gain)
    if config.algorithm.proximal == "recompute" and shares.proximal >= _PROXIMAL:
        gain = at_most(without(shares.proximal), most)
        yield Change("algorithm.proximal", "recompute", "interpolate", "approximate log-probs", gain)


def more(config: RunConfig) -> Iterator[Change]:
    """Twice of what there is of each, in the order of the rules."""
    rollout, lag, samples = config.rollout, config.freshness.max_lag, config.training.mini_batch_samples
    for kind, count in (("simulator", rollout.simulators), ("generator", rollout.generators)):
        setting, _, cost = _MORE[kind]
        yield Change(setting, count, 2 * count, cost)
    yield Change("rollout.rows", rollout.rows, 2 * rollout.rows, "memory; more samples under way")
    yield Change("training.mini_batch_samples", samples, 2 * samples, "longer updates")
    yield Change("freshness.max_lag", lag, lag + 1, f"samples up to {lag + 1:g} versions old", unstable=True)


def _cores(shares: Shares) -> str:
    """What is said instead of more stations where all cores are in use; "" otherwise."""
    if shares.cores < _FULL:
        return ""
    return f"this run uses {shares.cores:.0%} of the machine's processor cores: more stations only share them"
