"""The text of a run that is stuck: who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.scheduler.conductor import AnyConductor


def describe_stall(conductor: AnyConductor, stall_s: float, slots: Sequence[str]) -> str:
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
        *_describe_evaluations(conductor),
        *conductor.pending(),
        f"slots: {'; '.join(slots) or 'none is live'}",
    ]
    return "; ".join(parts) + ". Please report this with the run folder"


def _describe_evaluations(conductor: AnyConductor) -> list[str]:
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
