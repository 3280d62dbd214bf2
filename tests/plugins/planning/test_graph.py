"""The workflow graph: of a run's stations, of a workflow's puts and gets, its cycles and its cuts."""

from __future__ import annotations

import pytest
from tests.plugins.planning.profiles import recipe
from tests.plugins.workflow.workers import Echo

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.planning.graph import Flow, WorkflowGraph, graph_of_run, graph_of_workflow
from polyrhythm.plugins.workflow import Workflow


def test_simulators_and_generators_are_one_node_before_the_trainer() -> None:
    graph = graph_of_run(recipe())
    assert graph.components() == (("simulator", "generator"), ("trainer",))
    assert list(graph.cuts(graph.components())) == [((("simulator", "generator"),), (("trainer",),))]


def test_scorers_come_between() -> None:
    graph = graph_of_run(recipe("scoring={function: builtins:len}"))
    assert graph.components() == (("simulator", "generator"), ("scorer",), ("trainer",))
    assert len(list(graph.cuts(graph.components()))) == 2


def test_cuts_follow_the_data() -> None:
    """A diamond: a before b and c, these before d."""
    flows = [Flow("", *ends) for ends in ("ab", "ac", "bd", "cd")]
    graph = WorkflowGraph(("a", "b", "c", "d"), tuple(flows))
    firsts = {"".join(name for part in first for name in part) for first, _ in graph.cuts(graph.components())}
    assert {frozenset(first) for first in firsts} == {frozenset(own) for own in ("a", "ab", "ac", "abc")}


def test_longer_cycles_are_one_node() -> None:
    flows = [Flow("", *ends) for ends in ("ab", "bc", "ca", "cd", "de")]
    assert WorkflowGraph(tuple("abcde"), tuple(flows)).components() == (("a", "b", "c"), ("d",), ("e",))


def test_an_isolated_worker_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"worker 'judge' sends and receives nothing.*give it a channel"):
        WorkflowGraph(("a", "b", "judge"), (Flow("items", "a", "b"),))
    assert WorkflowGraph(("alone",), ()).components() == (("alone",),)


def test_what_the_driver_passes_on_flows_between_workers() -> None:
    traffic = {
        "games": ({"rollout"}, {"driver"}),
        "batches": ({"driver"}, {"learner"}),
        "prompts": ({"driver"}, {"rollout"}),
    }
    graph = graph_of_workflow(["rollout", "learner"], traffic, {("games", "batches")})
    assert graph.components() == (("rollout",), ("learner",))


def test_a_workflow_is_traced_by_its_first_items() -> None:
    with Workflow("inline") as work:
        first, second = work.group("first", Echo, 2), work.group("second", Echo)
        numbers, sums = work.channel("numbers", 4), work.channel("sums", 4)
        numbers.put(1)
        first.on(0).take(numbers).wait()
        first.on(1).give(sums, 1).wait()
        second.take(sums).wait()
        second.give(numbers, 1).wait()
        traffic, passed = work.traffic(), work.passed()
    assert not passed
    assert traffic["numbers"] == ({"driver", "second"}, {"first"})
    assert traffic["sums"] == ({"first"}, {"second"})
    graph = graph_of_workflow(["first", "second"], traffic, passed)
    assert graph.components() == (("first", "second"),)


@pytest.mark.parametrize("passes", [False, True])
def test_the_driver_passes_on_only_what_it_had_before(passes: bool) -> None:
    """It puts a number in, and gets the sum; with `passes` the sum goes in again."""
    with Workflow("inline") as work:
        first = work.group("first", Echo)
        numbers, sums = work.channel("numbers", 4), work.channel("sums", 4)
        numbers.put(1)
        first.take(numbers).wait()
        first.give(sums, 1).wait()
        found = sums.get()
        if passes:
            numbers.put(found)
        assert work.passed() == ({("sums", "numbers")} if passes else set())
