"""Summarises a simulated run as JSON-able metrics.

Times are seconds of virtual time. Waiting times are by cause, summed over the slots (generators, the trainer); the
shares of each kind add up to 1.
"""

from __future__ import annotations

from typing import Any

from polyrhythm.plugins.virtual.clustersim.clock import Causes
from polyrhythm.plugins.virtual.clustersim.driver import VirtualDriver
from polyrhythm.plugins.virtual.clustersim.measures import Measures


def summarise(
    driver: VirtualDriver, ledger: dict[str, Any], gpus: float = 0.0, groups: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Summary of the run so far. ledger: the conductor's; groups: its `RolloutScheduler.summary`."""
    now, measures = driver.clock.now, driver.measures
    return {
        "virtual_s": now,
        "versions": driver.reached,
        "halted": driver.halted,
        "gpus": gpus,
        "events": driver.events,
        "throughput": _throughput(measures, now),
        "utilisation": {
            "simulator": measures.simulator.meter.value(now),
            "generator": measures.generator.meter.value(now),
            "trainer": measures.trainer.meter.value(now),
            **({"scorer": measures.scorer.meter.value(now)} if driver.scored else {}),
        },
        "time": {
            "slots": _shares(measures.slot_states),
            "generators": _shares(measures.generator_states),
            "trainer": _shares(measures.trainer_states),
        },
        "devices": {str(number): seconds / (now or 1.0) for number, seconds in measures.devices.items()},
        "switches": {"count": measures.switches, "s": measures.switching, "bytes": measures.switched_bytes},
        "publishing_s": measures.publishing,
        "down_s": dict(measures.down),
        "stations_lost": measures.lost,
        "requests": _requests(measures, now),
        "lag": _lag(measures),
        **({"links": driver.network.summary()} if driver.network else {}),
        **({"conductor": driver.cpu.summary()} if driver.cpu else {}),
        **({"scoring": {"scored": measures.scored, "failed": measures.scoring_failed}} if driver.scored else {}),
        "evaluations": {"episodes": measures.evaluated, "dropped": measures.evaluations_dropped},
        "ledger": ledger,
        "groups": groups or {},
    }


def _throughput(measures: Measures, now: float) -> dict[str, float]:
    """transitions: primitive env steps of active rows; trained_transitions: of completed updates. tokens: in answers
    that reached their slots; tokens_aborted: of aborted streams."""
    seconds = now or 1.0
    return {
        "transitions": measures.transitions,
        "transitions_per_s": measures.transitions / seconds,
        "chunk_steps": measures.chunk_steps,
        "chunk_steps_per_s": measures.chunk_steps / seconds,
        "tokens": measures.tokens,
        "tokens_per_s": measures.tokens / seconds,
        "tokens_aborted": measures.tokens_aborted,
        "samples": measures.samples,
        "trained_samples": measures.trained_samples,
        "trained_samples_per_s": measures.trained_samples / seconds,
        "trained_transitions": measures.trained_transitions,
        "trained_transitions_per_s": measures.trained_transitions / seconds,
        "updates": measures.updates,
    }


def _shares(causes: Causes) -> dict[str, dict[str, float]]:
    total = sum(causes.seconds.values()) or 1.0
    return {state: {"s": seconds, "share": seconds / total} for state, seconds in causes.seconds.items()}


def _requests(measures: Measures, now: float) -> dict[str, float]:
    """waiting_mean: mean number in the queue; wait_s: mean time from arrival to the batch. Little's law ties them.
    local: share of the rows that were served on their host."""
    return {
        "arrived": measures.requests,
        "served": measures.requests_served,
        "batches": measures.batches,
        "rows_per_batch": measures.rows_served / max(1, measures.batches),
        "waiting_mean": measures.waiting.integral(now) / (now or 1.0),
        "local": measures.rows_local / max(1, measures.rows_served),
        "wait_s": measures.waited / max(1, measures.requests_served),
    }


def _lag(measures: Measures) -> dict[str, Any]:
    """histogram: lag → samples trained on; updates_mean, updates_max: lag in updates."""
    count = sum(measures.lags.values())
    since = measures.updates_since
    return {
        "histogram": {str(lag): samples for lag, samples in sorted(measures.lags.items())},
        "mean": sum(lag * samples for lag, samples in measures.lags.items()) / max(1, count),
        "max": max(measures.lags, default=0),
        "updates_mean": sum(lag * samples for lag, samples in since.items()) / max(1, count),
        "updates_max": max(since, default=0),
    }
