"""Background evaluations: times worked out by hand, and conductors that break what the watch holds about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.oracles.guarantees import Violation
from tests.plugins.virtual.clustersim.clusters import run, settings, times
from tests.plugins.virtual.clustersim.test_guarantees import Careless, drive

from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.driver import ProtocolError
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler import records as r

ms = pytest.approx


def with_evaluation(*, own: bool = False, scheduler: dict[str, Any] | None = None, **rest: Any) -> ClusterSettings:
    """One row for training, two reserved ones in a slot of their own, three episodes of three steps at 10 ms.

    own: a second generator evaluates and does nothing else.
    """
    evaluator = {"evaluator": "generator-1", "evaluator_only": True} if own else {"evaluator": "generator-0"}
    base = settings(scheduler=scheduler, versions=rest.pop("versions", 2))
    (training,), (generator,) = base.simulators, base.generators
    reserved = training.model_copy(update={"rows": 2, "reserved": 1})
    return ClusterSettings.model_validate(
        {
            **{name: getattr(base, name) for name in ClusterSettings.model_fields},
            "scheduler": replace(base.scheduler, **evaluator),
            "simulators": (training, reserved),
            "generators": (generator.model_copy(update={"count": 1 + own}),),
            "evaluations": ({"at": "10ms", "episodes": 3},),
            **rest,
        }
    )


def ended(cluster: VirtualCluster) -> list[tuple[str, int, int]]:
    told = [c for step in cluster.driver.steps for c in step.commands if isinstance(c, r.EvaluationDone)]
    return [(command.name, command.finished, command.dropped) for command in told]


def asked(cluster: VirtualCluster, slot: str) -> list[float]:
    """When the slot's requests came."""
    steps = [step for step in cluster.driver.steps if isinstance(step.event, r.RequestArrived)]
    return [step.now for step in steps if step.event.slot == slot]


def test_a_generator_of_its_own_costs_training_no_time() -> None:
    cluster, summary = run(with_evaluation(own=True))
    # publish 30, apply 20, reset 50, then three times (serve 7, step 10); the third episode has the slot for itself:
    # reset 50, three times (serve 6, step 10).
    assert asked(cluster, "simulator-1/0/0") == ms([0.100, 0.117, 0.134, 0.201, 0.217, 0.233])
    assert times(cluster, r.UpdateDone) == ms([0.248, 0.496]), "as without"
    assert ended(cluster) == [("evaluation-0", 3, 0)]
    assert summary["evaluations"] == {"episodes": 3, "dropped": 0}
    assert summary["virtual_s"] == ms(0.546)


def test_a_second_copy_takes_turns_with_training() -> None:
    cluster, summary = run(with_evaluation())
    # Its weights come after those of training, at 70, so its rows ask at 120, while training's second pass (116 to 122)
    # is under way, and at 139, when the third (132 to 138) is over: 122 + 7 + 10.
    assert asked(cluster, "simulator-0/0/0")[:3] == ms([0.100, 0.116, 0.132])
    assert asked(cluster, "simulator-1/0/0") == ms([0.120, 0.139, 0.156, 0.223, 0.239, 0.255])
    assert times(cluster, r.UpdateDone) == ms([0.248, 0.496])
    assert ended(cluster) == [("evaluation-0", 3, 0)]
    assert summary["ledger"]["started"] == 2


def test_an_evaluation_under_way_at_the_end_is_finished() -> None:
    cluster, summary = run(with_evaluation(own=True, versions=1))
    assert cluster.driver.reached == 1
    assert ended(cluster) == [("evaluation-0", 3, 0)]
    assert summary["virtual_s"] > 0.298


def test_an_evaluation_is_given_up_with_its_weights_and_the_next_goes_on() -> None:
    dies = {"station": "generator-1", "at": "120ms", "detected": "40ms", "restart": "60ms"}
    evaluations = ({"at": "10ms", "episodes": 3}, {"at": "20ms", "episodes": 1})
    cluster, summary = run(with_evaluation(own=True, faults=(dies,), evaluations=evaluations))
    assert ended(cluster) == [("evaluation-0", 0, 3), ("evaluation-1", 1, 0)]
    assert times(cluster, r.UpdateDone) == ms([0.248, 0.496]), "as without"
    assert summary["evaluations"] == {"episodes": 1, "dropped": 3}


def test_reserved_rows_that_are_lost_repeat_their_episodes() -> None:
    dies = {"station": "simulator-1", "at": "180ms", "detected": "40ms", "restart": "60ms"}
    cluster, _ = run(with_evaluation(own=True, faults=(dies,)))
    assert ended(cluster) == [("evaluation-0", 3, 0)]


def test_rows_of_one_simulator_may_be_training_s_and_reserved() -> None:
    base = with_evaluation(scheduler={"batch_size": 2})
    both = base.simulators[0].model_copy(update={"env_batches": 3, "reserved": 1})
    cluster, _ = run(base.model_copy(update={"simulators": (both,)}))
    joined = next(step.event for step in cluster.driver.steps if isinstance(step.event, r.SimulatorJoined))
    assert [info.reserved for info in joined.batches] == [False, False, True]
    assert ended(cluster) == [("evaluation-0", 3, 0)]


def test_an_evaluation_during_a_pause_uses_the_rows_of_training() -> None:
    cluster, _ = run(settings(evaluations=[{"at": "10ms", "episodes": 2, "background": False}]))
    assert ended(cluster) == [("evaluation-0", 2, 0)]
    assert times(cluster, r.SampleFinished)[:2] == ms([0.148, 0.246])


# ---------------------------------------------------------------- what the watch sees

Change = Callable[[r.Command], r.Command | None]


def broken(change: Change, *, own: bool = True, **rest: Any) -> None:
    """Drive a conductor each of whose commands is replaced by what `change` makes of it."""

    class Breaks(Careless):
        def change(self, commands: list[r.Command]) -> list[r.Command]:
            return [new for command in commands if (new := change(command)) is not None]

    cluster_settings = with_evaluation(own=own, **rest)
    drive(Breaks(cluster_settings.scheduler), cluster_settings)


def test_training_in_a_reserved_row_is_seen() -> None:
    def change(command: r.Command) -> r.Command:
        if isinstance(command, r.StartRows) and not command.grants[0].ticket.evaluation:
            return replace(command, simulator="simulator-1", slot="simulator-1/0/0")
        return command

    with pytest.raises(Violation, match="reserved slots are"):
        broken(change)


def test_an_evaluation_in_a_row_of_training_is_seen() -> None:
    def change(command: r.Command) -> r.Command:
        if isinstance(command, r.StartRows) and command.grants[0].ticket.evaluation:
            return replace(command, simulator="simulator-0", slot="simulator-0/0/0", grants=command.grants[:1])
        return command

    with pytest.raises((Violation, ProtocolError), match=r"reserved slots are|but works on"):
        broken(change, evaluations=({"at": "260ms"},))


def test_pinned_weights_for_another_generator_are_seen() -> None:
    def change(command: r.Command) -> r.Command:
        pinned = isinstance(command, r.ApplyWeights) and command.pinned
        return replace(command, generator="generator-0") if pinned else command

    with pytest.raises(Violation, match="alone is the evaluator"):
        broken(change)


def test_a_batch_of_the_evaluation_that_is_not_pinned_is_seen() -> None:
    def change(command: r.Command) -> r.Command:
        pinned = isinstance(command, r.Serve) and command.batch.pinned
        return replace(command, batch=replace(command.batch, pinned=False)) if pinned else command

    with pytest.raises(Violation, match="reserved slots are"):
        broken(change, own=False)


def test_two_versions_in_one_evaluation_are_seen() -> None:
    class Moves(Careless):
        moved = False

        def change(self, commands: list[r.Command]) -> list[r.Command]:
            newer = [c for c in commands if isinstance(c, r.ApplyWeights) and c.version == 1]
            if newer and not self.moved:
                self.moved = True
                self.conductor.serving.generators.present["generator-0"].pinning = True
                return [*commands, replace(newer[0], pinned=True)]
            return commands

    cluster_settings = with_evaluation(evaluations=({"at": "10ms", "episodes": 9},))
    with pytest.raises(Violation, match=r"is of the versions \[0, 1\]"):
        drive(Moves(cluster_settings.scheduler), cluster_settings)


def test_an_evaluation_whose_end_is_not_told_as_it_was_is_seen() -> None:
    def change(command: r.Command) -> r.Command:
        return replace(command, dropped=1) if isinstance(command, r.EvaluationDone) else command

    with pytest.raises(Violation, match="of 3 episodes 3 were told"):
        broken(change)


def test_an_episode_that_is_nowhere_is_seen() -> None:
    class Loses(Careless):
        def change(self, commands: list[r.Command]) -> list[r.Command]:
            evaluation = self.conductor.rollout.evaluations.current_background
            if evaluation is not None and evaluation.running and evaluation.waiting:
                evaluation.waiting.popleft()
            return commands

    cluster_settings = with_evaluation(own=True)
    with pytest.raises(Violation, match="episodes run and 0 were told of"):
        drive(Loses(cluster_settings.scheduler), cluster_settings)


def test_training_that_is_told_otherwise_because_of_an_evaluation_is_seen() -> None:
    class Waits(Careless):
        kept: list[r.Command]

        def change(self, commands: list[r.Command]) -> list[r.Command]:
            busy = self.conductor.rollout.evaluations.current_background is not None
            return [command for command in commands if not (busy and isinstance(command, r.StartUpdate))]

    cluster_settings = with_evaluation(own=True)
    with pytest.raises(Violation, match=r"without background evaluations, it would be \[StartUpdate"):
        drive(Waits(cluster_settings.scheduler), cluster_settings)


def test_a_free_reserved_row_that_is_kept_waiting_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyrhythm.scheduler.conductor.grant_background", lambda *_: [])
    cluster_settings = with_evaluation(own=True)
    with pytest.raises(Violation, match="waits although the rows"):
        drive(Careless(cluster_settings.scheduler), cluster_settings)
