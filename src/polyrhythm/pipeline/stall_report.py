"""The text of a run that is stuck: who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.scheduler.conductor import Conductor


def describe_stall(conductor: Conductor, stall_s: float, slots: Sequence[str]) -> str:
    """One sentence. stall_s: seconds in which nothing happened; slots: what the stations have not finished."""
    generators = [
        f"{state.name} (weights {state.version}, {'busy' if state.busy else 'idle'})"
        for state in conductor.serving.generators.present.values()
    ]
    versions = conductor.versions
    parts = [
        f"nothing has happened for {stall_s:g} s",
        f"{len(conductor.serving.queue)} requests wait for generators {', '.join(generators) or '(none)'}",
        f"versions: trained {versions.trained}, published {versions.published}, applied {versions.applied}",
        f"trainer: {conductor.updates.trainer or 'none'}, {len(conductor.updates.in_training)} groups lent",
        f"samples: {conductor.ledger.as_dict()}",
        *_describe_scoring(conductor),
        *_describe_evaluations(conductor),
        *_describe_leases(conductor),
        f"slots: {'; '.join(slots) or 'none is live'}",
    ]
    return "; ".join(parts) + ". Please report this with the run folder"


def _describe_scoring(conductor: Conductor) -> list[str]:
    if conductor.settings.scoring is None:
        return []
    scoring = conductor.rollout.scoring
    scorers = ", ".join(f"{name} ({len(state.under_way)} samples)" for name, state in scoring.scorers.items())
    return [f"{len(scoring.waiting)} samples wait for scorers {scorers or '(none)'}"]


def _describe_leases(conductor: Conductor) -> list[str]:
    if conductor.delivery is None:
        return []
    leases = conductor.delivery.leases
    held = ", ".join(f"{device} by {name}" for device, name in sorted(leases.holders.items()))
    waiting = [f"{name} ({len(conductor.delivery.held_back[name])} commands)" for name in sorted(leases.waiting)]
    return [f"devices held: {held or 'none'}, waited for by {', '.join(waiting) or 'nobody'}"]


def _describe_evaluations(conductor: Conductor) -> list[str]:
    evaluations, evaluator = conductor.rollout.evaluations, conductor.serving.generators.evaluator
    found = [
        f"evaluation {e.name}: {len(e.waiting)} episodes wait, {e.running} run"
        for e in (evaluations.current, evaluations.current_background)
        if e is not None
    ]
    if evaluations.current_background is not None:
        state = "is not there" if evaluator is None else f"has weights {evaluator.pinned} for it"
        waiting = len(conductor.serving.background)
        found.append(f"{conductor.settings.evaluator} {state}, {waiting} requests wait for it")
    return found
