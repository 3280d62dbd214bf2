"""Small random clusters with everything that may go wrong, for property tests and long random searches."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf
from typing import Any

from polyrhythm.plugins.virtual.clustersim.costs import parse_cost, parse_count
from polyrhythm.plugins.virtual.clustersim.settings import (
    ClusterSettings,
    ConductorSection,
    FaultPlan,
    LinkSection,
    ScorerGroup,
)
from polyrhythm.scheduler.settings import ScoringRules

#: One chunk step in a hundred lasts longer than the episode deadline.
_STUCK = "mixture:0.99*constant:5ms+0.01*constant:30s"
_REDUNDANT = tuple(
    {"extra_groups": groups, "extra_members": members}
    for groups, members in ((0, 1), (0, 3), (1, 0), (1, 1), (3, 0), (3, 2), (8, 0), (8, 3))
)


def arbitrary_cluster(rng: random.Random, *, redundant: bool = False) -> ClusterSettings:
    """Any episode lengths, stations, delays, faults, groups, redundancy, filter, K, real α and segments.

    `rng` may be hypothesis' own. redundant: only clusters with more tickets in flight than are needed. Two of three
    have an evaluator, in either form, with background evaluations and some during which training pauses.
    """
    segment_steps = 0 if redundant else rng.choice((0, 0, 1, 3))
    simulators = [_simulators(rng, segment_steps) for _ in range(rng.randint(1, 2))]
    generators = [_generators(rng, rng.randint(1, 2)) for _ in range(rng.randint(1, 2))]
    evaluator = _evaluator(rng, simulators, generators, segment_steps)
    names = [f"simulator-{i}" for i in range(sum(group["count"] for group in simulators))]
    names += [f"generator-{i}" for i in range(sum(group["count"] for group in generators))]
    scheduler = _scheduler(rng, segments=segment_steps > 0, stuck=any(group["step"] == _STUCK for group in simulators))
    scheduler |= evaluator
    if redundant:
        scheduler |= {"order": "arrival", **rng.choice(_REDUNDANT)}
    if scheduler["streaming"] and scheduler["order"] == "arrival" and scheduler["batching"] != "lockstep":
        scheduler["parts"] = rng.random() < 0.6
    return ClusterSettings.model_validate(
        {
            "seed": rng.randint(0, 1000),
            "versions": rng.randint(2, 5),
            "scheduler": scheduler,
            "simulators": simulators,
            "generators": generators,
            "trainer": {
                "update": rng.choice(("0ms", "20ms", "lognormal:40ms:1.0", "2ms+1ms")),
                "streamed": rng.choice((0.0, 0.5, 1.0)),
                "publish": rng.choice(("0ms", "40ms", "lognormal:60ms:1.0")),
                "checkpoint_every": rng.choice((0, 1, 3)),
                "detected": "50ms",
                "restart": "50ms",
            },
            "faults": _faults(rng, [*names, "trainer", "trainer"]),
            "evaluations": _evaluations(rng, background=True) if evaluator else _evaluations(rng, background=False),
            "max_time": "100000s",
            "message_delay": rng.choice(("0ms", "0ms", "1ms", "lognormal:2ms:1.0")),
        }
    )


def arbitrary_streams(rng: random.Random) -> ClusterSettings:
    """Such a cluster, served by streams: any lengths of answers, numbers of places, costs of decoding."""
    base = arbitrary_cluster(rng, redundant=rng.random() < 0.3)
    scheduler = {
        "batching": "streams",
        "on_update": rng.choice(("drain", "continue", "abort")),
        "max_rows": rng.choice((1, 2, 5, 64)),
        "evaluation_priority": "turns",
    }
    tokens = tuple(parse_count(rng.choice((1, 30, "lognormal:20steps:1.0"))) for _ in base.simulators)
    costs = [
        {
            "prefill": parse_cost(rng.choice(("0ms", "3ms", "lognormal:2ms:0.8+1ms"))),
            "decode": parse_cost(rng.choice(("0ms", "1ms", "lognormal:1ms:0.8+0.1ms"))),
        }
        for _ in base.generators
    ]
    return base.model_copy(
        update={
            "scheduler": replace(base.scheduler, **scheduler),
            "simulators": tuple(
                group.model_copy(update={"tokens": count}) for group, count in zip(base.simulators, tokens, strict=True)
            ),
            "generators": tuple(
                group.model_copy(update=cost) for group, cost in zip(base.generators, costs, strict=True)
            ),
        }
    )


def arbitrary_scored(rng: random.Random) -> ClusterSettings:
    """Such a cluster, or one served by streams, whose samples are scored by scorers that raise, hang and die."""
    base = arbitrary_streams(rng) if rng.random() < 0.3 else arbitrary_cluster(rng, redundant=rng.random() < 0.4)
    if base.scheduler.segments:
        simulators = tuple(group.model_copy(update={"segment_steps": 0}) for group in base.simulators)
        scheduler = replace(base.scheduler, segments=False)
        base = base.model_copy(update={"simulators": simulators, "scheduler": scheduler})
    scorers = [_scorers(rng) for _ in range(rng.randint(1, 2))]
    names = [f"scorer-{i}" for i in range(sum(group["count"] for group in scorers))]
    faults = [FaultPlan.model_validate(_fault(rng, names)) for _ in range(rng.choice((0, 0, 1, 4)))]
    rules = ScoringRules(rng.choice((1, 2, 3)), rng.choice((1, 2, 64)))
    return base.model_copy(
        update={
            "scheduler": replace(base.scheduler, scoring=rules),
            "scorers": tuple(ScorerGroup.model_validate(group) for group in scorers),
            "faults": (*base.faults, *faults),
        }
    )


def arbitrary_hosts(rng: random.Random) -> ClusterSettings:
    """Such a cluster on several hosts with slow links, whose conductor takes time."""
    base = arbitrary_cluster(rng, redundant=rng.random() < 0.3)

    def placed() -> dict[str, Any]:
        return {"host": rng.choice(("a", "b")), "hosts": rng.randint(1, 3)}

    links = {
        "latency": rng.choice((0.0, 0.002)),
        "gb_per_s": rng.choice((0.1, 1.0)),
        "main": rng.choice(("", "a", "elsewhere")),
        "observation_mb": rng.choice((0.0, 1.0)),
        "sample_mb": rng.choice((0.0, 0.5)),
        "weights_gb": rng.choice((0.0, 0.005)),
    }
    conductor = {"event": rng.choice(("0ms", "0.1ms", "lognormal:1ms:1.0")), "serving": rng.choice(("main", "beside"))}
    return base.model_copy(
        update={
            "simulators": tuple(group.model_copy(update=placed()) for group in base.simulators),
            "generators": tuple(group.model_copy(update=placed()) for group in base.generators),
            "trainer": base.trainer.model_copy(update=placed()),
            "links": LinkSection.model_validate(links),
            "conductor": ConductorSection.model_validate(conductor) if rng.random() < 0.7 else None,
        }
    )


def _scorers(rng: random.Random) -> dict[str, Any]:
    return {
        "count": rng.randint(1, 2),
        "places": rng.choice((1, 1, 2, 5)),
        "score": rng.choice(("0ms", "5ms", "lognormal:20ms:1.5")),
        "raises": rng.choice((0.0, 0.0, 0.1)),
        "hangs": rng.choice((0.0, 0.0, 0.05)),
        "deadline": "200ms",
        "detected": rng.choice(("0ms", "50ms")),
        "restart": rng.choice(("0ms", "100ms")),
    }


def _simulators(rng: random.Random, segment_steps: int) -> dict[str, Any]:
    return {
        "count": rng.randint(1, 2),
        "env_batches": rng.randint(1, 2),
        "slots": rng.randint(1, 3),
        "rows": rng.randint(1, 3),
        "shared_thread": rng.choice((False, True)),
        "reset_rows": rng.choice((True, False)),
        "step": rng.choice(("5ms", "lognormal:10ms:1.0", "0ms", _STUCK)),
        "reset": rng.choice(("0ms", "20ms")),
        "steps": rng.choice((1, 5, "lognormal:5steps:1.2")),
        "chunk": rng.choice((1, 2)),
        "segment_steps": segment_steps,
        "raises": rng.choice((0.0, 0.0, 0.05)),
        "broken": rng.choice((0.0, 0.0, 0.2)),
        "solved": rng.choice((0.0, 0.3)),
        "hopeless": rng.choice((0.0, 0.3, 0.7)),
        "detected": rng.choice(("0ms", "50ms")),
        "restart": rng.choice(("0ms", "100ms")),
    }


def _generators(rng: random.Random, count: int) -> dict[str, Any]:
    return {
        "count": count,
        "depth": rng.choice((1, 2, 2)),
        "gather": rng.choice(("0ms", "0ms", "3ms", "lognormal:3ms:1.0+1ms")),
        "serve": rng.choice(("5ms", "lognormal:5ms:0.8+1ms", "0ms")),
        "apply": rng.choice(("0ms", "30ms", "lognormal:30ms:1.0")),
        "detected": rng.choice(("0ms", "50ms")),
        "restart": rng.choice(("0ms", "100ms")),
    }


def _evaluator(
    rng: random.Random, simulators: list[dict[str, Any]], generators: list[dict[str, Any]], segment_steps: int
) -> dict[str, Any]:
    """Reserve rows, in simulators of their own or in those of training, and say who answers them, or do neither.

    A generator of its own is one more.
    """
    form = rng.choice(("", "second_copy", "own_generator"))
    if not form:
        return {}
    priority = {
        "evaluation_priority": rng.choice(("turns", "turns", "first", "last")),
        "evaluation_max_wait_s": rng.choice((0.0, 0.02, 1.0)),
    }
    if rng.random() < 0.5:
        own = _simulators(rng, segment_steps)
        simulators.append({**own, "reserved": own["env_batches"]})
    else:
        shared = rng.choice(simulators)
        shared["reserved"] = rng.randint(1, 2)
        shared["env_batches"] += shared["reserved"]
    count: int = sum(group["count"] for group in generators)
    if form == "own_generator":
        generators.append(_generators(rng, 1))
        return {**priority, "evaluator": f"generator-{count}", "evaluator_only": True}
    return {**priority, "evaluator": f"generator-{rng.randrange(count)}"}


def _evaluations(rng: random.Random, *, background: bool) -> list[dict[str, Any]]:
    return [
        {
            "at": rng.choice((0.0, 0.03, 0.08, 0.15, 0.3, 0.6)) + rng.randint(0, 20) * 0.001,
            "episodes": rng.randint(1, 9),
            "background": background and rng.random() < 0.8,
        }
        for _ in range(rng.randint(1, 4) if background else rng.choice((0, 0, 1, 2)))
    ]


def _scheduler(rng: random.Random, *, segments: bool, stuck: bool) -> dict[str, Any]:
    group_size = 1 if segments else rng.choice((1, 1, 2, 3, 5))
    order = rng.choice(("arrival", "ticket"))
    return {
        "batch_size": group_size * rng.randint(1, 6),
        "sync_interval": rng.choice((1, 1, 2, 4)),
        "streaming": rng.random() < 0.75,
        "max_lag": rng.choice((0.0, 0.0, 0.3, 1.0, 1.5, 2.0, 4.0)),
        "bound": rng.choice(("sample", "sample", "mean")),
        "on_update": rng.choice(("drain", "continue")),
        "order": order,
        "group_size": group_size,
        "segments": segments,
        "batching": rng.choice(("dynamic", "lockstep", "auto")),
        "max_rows": rng.choice((1, 4, 64)),
        "max_requests": rng.choice((1, 3, 1_000_000)),
        "max_wait_s": rng.choice((0.0, 0.005, 0.05)),
        "routing": rng.choice(("least_loaded", "least_loaded", "round_robin", "fixed", "affinity")),
        "tasks": rng.choice((1, 3)),
        "seed": rng.randint(0, 1000),
        # A deadline would end every hang, so there is one only where a step may really get stuck.
        "episode_deadline_s": 20.0 if stuck else inf,
        "max_attempts": rng.choice((1, 3)),
        "quarantine_after": rng.choice((0, 1, 2, 5)),
        "max_dropped": 1_000_000,
        "fire_when_all_wait": rng.random() < 0.8,
        "evaluation_hedge": rng.random() < 0.5,
        **({} if segments else _filter(rng)),
        **({} if segments or order == "ticket" else _redundancy(rng)),
    }


def _filter(rng: random.Random) -> dict[str, Any]:
    low, high = rng.choice(((-inf, inf), (-inf, inf), (0.0, 0.9), (0.1, inf), (0.1, 0.9)))
    return {"min_return": low, "max_return": high, "max_filtered": rng.choice((1, 5, 50))}


def _redundancy(rng: random.Random) -> dict[str, Any]:
    return {"extra_groups": rng.choice((0, 0, 1, 3, 8)), "extra_members": rng.choice((0, 0, 1, 3))}


def _faults(rng: random.Random, names: list[str]) -> list[dict[str, Any]]:
    """Any number, at any times; in some clusters also several at one moment, noticed at once and back in any order."""
    faults = [_fault(rng, names) for _ in range(rng.choice((0, 0, 1, 4, 8)))]
    for first in faults[: rng.choice((0, 0, 1, 2))]:
        for _ in range(rng.randint(1, 3)):
            restart = rng.choice(("0ms", "20ms", "100ms"))
            faults.append({**_fault(rng, names), "at": first["at"], "detected": "0ms", "restart": restart})
    return faults


def _fault(rng: random.Random, names: list[str]) -> dict[str, Any]:
    return {
        "station": rng.choice(names),
        "at": rng.choice((0.01, 0.05, 0.1, 0.2, 0.35, 0.5, 0.8)) + rng.randint(0, 20) * 0.001,
        "kind": rng.choice(("dies", "hangs")),
        "after_reply": rng.choice((False, True)),
    }
