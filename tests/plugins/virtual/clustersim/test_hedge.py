"""Evaluations whose last episodes are copied to rows that would idle: what is reported, and when they end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.plugins.virtual.clustersim.clusters import run, settings

from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler import records as r


def with_a_slow_simulator(*, hedge: bool, background: bool, **slow: Any) -> ClusterSettings:
    """Four episodes of three steps of 10 ms on two rows each of two simulators, of which one takes 2 s for a step."""
    base = settings(versions=1)
    (one,), (generator,) = base.simulators, base.generators
    two = one.model_copy(update={"rows": 2, "reserved": int(background)})
    simulators = [two, two.model_copy(update={"step": settings(simulators={"step": "2s"}).simulators[0].step, **slow})]
    return ClusterSettings.model_validate(
        {
            **{name: getattr(base, name) for name in ClusterSettings.model_fields},
            "scheduler": replace(base.scheduler, evaluator="generator-0" if background else "", evaluation_hedge=hedge),
            "simulators": ([one] if background else []) + simulators,
            "generators": (generator,),
            "evaluations": ({"at": "10ms", "episodes": 4, "background": background},),
        }
    )


def reported(cluster: VirtualCluster) -> tuple[list[int], float]:
    """Seeds of the episodes that were reported, and seconds until the evaluation ended."""
    steps = cluster.driver.steps
    seeds = [c.seed for step in steps for c in step.commands if isinstance(c, r.SampleEvaluated)]
    end = next(step.now for step in steps for c in step.commands if isinstance(c, r.EvaluationDone))
    return seeds, end


@pytest.mark.parametrize("background", [True, False])
def test_each_episode_is_reported_once_and_a_slow_simulator_is_not_awaited(background: bool) -> None:
    seeds, late = reported(run(with_a_slow_simulator(hedge=False, background=background))[0])
    assert (sorted(seeds), late > 6.0) == ([0, 1, 2, 3], True)
    cluster, summary = run(with_a_slow_simulator(hedge=True, background=background))
    seeds, end = reported(cluster)
    assert sorted(seeds) == [0, 1, 2, 3]
    assert end < 0.5
    assert summary["evaluations"] == {"episodes": 4, "dropped": 0}
    tickets = [
        g.ticket for s in cluster.driver.steps for c in s.commands if isinstance(c, r.StartRows) for g in c.grants
    ]
    evaluated = [ticket for ticket in tickets if ticket.evaluation]
    copied = {ticket.seed for ticket in evaluated if ticket.number < -4}
    assert copied >= {ticket.seed for ticket in evaluated[2:4]}, "those of the slow simulator"
    for seed in range(4):
        assert len({(t.task, t.seed, t.noise, t.version, t.greedy) for t in evaluated if t.seed == seed}) == 1


def test_where_all_rows_have_episodes_none_is_copied() -> None:
    plan = with_a_slow_simulator(hedge=True, background=True)
    many = plan.model_copy(update={"evaluations": (plan.evaluations[0].model_copy(update={"episodes": 40}),)})
    cluster, _ = run(many)
    began = [
        (step.now, grant.ticket)
        for step in cluster.driver.steps
        for command in step.commands
        if isinstance(command, r.StartRows)
        for grant in command.grants
        if grant.ticket.evaluation
    ]
    first_copy = next(index for index, (_, ticket) in enumerate(began) if ticket.number < -40)
    assert {ticket.seed for _, ticket in began[:first_copy]} == set(range(40)), "all have begun before the first copy"
