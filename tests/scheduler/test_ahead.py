"""A batch behind a pass: when it waits there, and what becomes of it.

Generators have depth 2, batches two rows, and slots one row each, unless a test says otherwise."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.long import tries
from tests.oracles.arbitrary import arbitrary_cluster
from tests.oracles.guarantees import GuaranteeChecker, check_target_reached
from tests.plugins.lease.test_simulated import leased
from tests.scheduler.test_background import Beside
from tests.scheduler.test_conductor import Script, slots_of
from tests.scheduler.test_detach import cut

from polyrhythm.conductors import build_conductor, restore_conductor
from polyrhythm.plugins.lease.conductor import LeasedConductor
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings, FaultPlan
from polyrhythm.scheduler import records as r
from polyrhythm.scheduler.inference.generators import GeneratorState
from polyrhythm.scheduler.settings import LeaseSettings, SchedulerSettings


def script_of(*, slots: int = 8, depth: int = 2, **more: object) -> Script:
    return Script(**{"max_rows": 2, "max_lag": 99, "slots": slots, "depth": depth, **more})  # type: ignore[arg-type]


def ask(script: Script, *numbers: int, sequence: int = 1) -> list[tuple[str, list[str]]]:
    """These slots ask, one after the other; the batches that begin or wait then."""
    said = [command for number in numbers for command in script.ask(f"s{number}", sequence)]
    return batches(said)


def batches(said: list[r.Command]) -> list[tuple[str, list[str]]]:
    return [(command.generator, slots_of(command)) for command in said if isinstance(command, r.Serve)]


def state(script: Script, name: str = "g0") -> GeneratorState:
    return script.conductor.serving.generators.present[name]


# ------------------------------------------------------------ when a batch waits


def test_a_full_batch_waits_behind_the_pass_and_a_third_does_not() -> None:
    script = script_of()
    assert ask(script, 0, 1) == [("g0", ["s0", "s1"])]
    assert ask(script, 2) == [], "it is not full"
    assert ask(script, 3) == [("g0", ["s2", "s3"])]
    assert ask(script, 4, 5) == [], "one batch waits there already"
    assert batches(script.batch_done()) == [("g0", ["s4", "s5"])]


def test_a_batch_that_is_due_but_not_full_does_not_wait_behind_a_pass() -> None:
    script = script_of(slots=3)
    ask(script, 0, 1, 2)
    script.now = 5.0
    assert script.say(r.Wake()) == [], "s2 has waited for longer than max_wait_s"
    assert batches(script.batch_done()) == [("g0", ["s2"])]


def test_so_many_requests_are_a_full_batch_too() -> None:
    script = script_of(max_rows=64, max_requests=2)
    assert ask(script, 0, 1, 2) == [("g0", ["s0", "s1"])]
    assert ask(script, 3) == [("g0", ["s2", "s3"])]


@pytest.mark.parametrize("more", [{"depth": 1}, {"batching": "auto"}, {"batching": "lockstep", "slots": 2}], ids=str)
def test_none_waits_at_depth_1_nor_under_another_rule(more: dict[str, object]) -> None:
    script = script_of(**{"max_requests": 1, **more})
    began = ask(script, *range(2 if more.get("batching") == "lockstep" else 8))
    assert len(began) == 1
    assert ask(script, 0, 1, sequence=2) == []
    assert len(batches(script.batch_done())) == 1


def test_an_idle_generator_comes_first() -> None:
    script = script_of(generators=2)
    assert ask(script, 0, 1, 2, 3) == [("g0", ["s0", "s1"]), ("g1", ["s2", "s3"])]
    assert ask(script, 4, 5) == [("g0", ["s4", "s5"])]


def test_of_several_the_one_whose_pass_began_first_is_given_it() -> None:
    script = script_of(generators=2, slots=10)
    ask(script, 0, 1, 2, 3)  # g0, then g1 at the same time
    script.now = 1.0
    ask(script, 4, 5)  # waits at g0
    script.now = 2.0
    script.batch_done(generator="g0")  # whose next pass has begun after that of g1
    assert ask(script, 6, 7) == [("g1", ["s6", "s7"])]
    assert ask(script, 8, 9) == [("g0", ["s8", "s9"])]


def test_bindings_hold_and_what_any_may_serve_is_left_to_an_idle_generator() -> None:
    script = script_of(generators=2, routing="fixed")
    assert ask(script, 0, 2) == [("g0", ["s0", "s2"])]
    assert ask(script, 1) == [], "one row of g1's"
    assert ask(script, 4, 6) == [("g0", ["s4", "s6"])], "g1 is idle, but these are not its slots"
    assert ask(script, 3, 5, 7) == [("g1", ["s1", "s3"]), ("g1", ["s5", "s7"])]
    mixed = script_of(generators=2, routing="fixed")
    ask(mixed, 0, 2)
    mixed.conductor.serving.router.rule = "least_loaded"
    assert ask(mixed, 3) == []
    mixed.conductor.serving.router.rule = "fixed"
    assert ask(mixed, 4) == [], "with s3 that would be a batch for g0, but g1 can begin with s3"


# ------------------------------------------------------------ what becomes of it


def test_the_batch_behind_becomes_the_pass_under_way() -> None:
    script = script_of()
    ask(script, 0, 1, 2, 3)
    first, second = state(script).batch, state(script).ahead
    assert first is not None
    script.now = 3.0
    assert script.batch_done() == []
    assert (state(script).batch, state(script).ahead, state(script).began) == (second, None, 3.0)
    answered = [name for name, slot in script.conductor.serving.slots.slots.items() if slot.answered_by]
    assert answered == ["s0", "s1"]
    assert state(script).served_rows == 4
    assert script.batch_done() == []
    assert list(script.conductor.serving.generators.idle) == ["g0"]


def test_a_slot_that_asks_again_before_its_pass_is_reported_can_be_in_both() -> None:
    script = script_of()
    ask(script, 0, 1)
    assert ask(script, 0, 1, sequence=2) == [("g0", ["s0", "s1"])]
    script.batch_done()
    assert {slot.answered_by for slot in script.conductor.serving.slots.slots.values()} == {""}
    again = batches(script.say(r.StationLost("g0", 0, "dies"))) + batches(script.say(r.GeneratorJoined("g0", 1, 0)))
    assert again == [("g0", ["s0", "s1"])]
    assert state(script).batch is not None
    assert [request.sequence for request in state(script).batch.requests] == [2, 2]  # type: ignore[union-attr]


def test_weights_are_taken_after_the_batch_that_waits_and_no_other_waits_meanwhile() -> None:
    script = script_of()
    ask(script, 0, 1, 2, 3)
    assert script.say(r.Published("trainer", 0, 1)) == []
    ask(script, 4, 5)
    assert script.batch_done() == [], "the batch behind has begun, and none waits behind it while weights do"
    assert script.batch_done() == [r.ApplyWeights("g0", 1)]
    assert batches(script.applied(1)) == [("g0", ["s4", "s5"])]
    assert ask(script, 6, 7) == [("g0", ["s6", "s7"])]


def test_no_batch_waits_behind_a_pass_with_weights_that_are_not_the_newest() -> None:
    script = script_of()
    ask(script, 0, 1)
    script.say(r.Published("trainer", 0, 1))
    assert ask(script, 2, 3) == []
    assert script.batch_done() == [r.ApplyWeights("g0", 1)]


@pytest.mark.parametrize("resumed", [False, True])
def test_the_requests_of_both_batches_of_a_lost_generator_wait_again_since_they_came(resumed: bool) -> None:
    script = script_of()
    for number in range(4):
        script.now = number / 10
        ask(script, number)
    if resumed:
        saved = json.loads(json.dumps(script.conductor.save()))
        script.conductor = restore_conductor(script.conductor.settings, saved)
    assert state(script).ahead is not None
    script.now = 0.5
    assert script.say(r.StationLost("g0", 0, "dies")) == []
    waiting = script.conductor.serving.queue.pools[""].waiting.values()
    assert [(request.slot, request.arrived) for request in waiting] == [(f"s{i}", i / 10) for i in range(4)]
    script.say(r.GeneratorJoined("g0", 1, depth=2))
    said = script.say(r.WeightsApplied("g0", 1, 0))
    assert batches(said) == [("g0", ["s0", "s1"]), ("g0", ["s2", "s3"])]


def test_a_request_that_waits_behind_a_pass_is_refused_with_its_generator_if_its_slot_stops() -> None:
    script = script_of(batch_size=8, max_lag=0)
    ask(script, 0, 1, 2, 3)
    script.finish(3)
    assert not script.conductor.serving.slots.slots["s3"].live
    (refusal,) = script.say(r.StationLost("g0", 0, "dies"))
    assert refusal == r.RefuseRequest("sim", "s3", 1, "its rows hold no tickets")


def test_a_run_that_goes_on_with_other_stations_forgets_both_batches() -> None:
    script = script_of()
    ask(script, 0, 1, 2, 3)
    conductor = cut(script).conductor
    assert conductor.serving.generators.present == {}
    assert conductor.serving.generators.room == {}
    assert len(conductor.serving.queue) == 0


# ------------------------------------------------------------ evaluations and leases


def evaluating(**more: object) -> Beside:
    script = Beside(**{"max_rows": 1, "slots": 4, "depth": 2, "max_lag": 99, **more})  # type: ignore[arg-type]
    script.evaluate()
    script.pinned(0)
    return script


def test_no_batch_waits_at_the_evaluator_while_an_evaluation_does() -> None:
    script = evaluating()
    assert ask(script, 0) == [("g0", ["s0"])]
    assert script.ask_background(1, 0) == []
    assert ask(script, 1, 2) == []
    (serve,) = script.batch_done()
    assert isinstance(serve, r.Serve)
    assert serve.batch.pinned
    assert ask(script, 3) == [], "nor behind the pass of an evaluation"
    assert batches(script.batch_done()) == [("g0", ["s1"]), ("g0", ["s2"])]


def test_an_evaluation_that_comes_later_waits_for_both_batches() -> None:
    script = evaluating(evaluation_priority="first")
    assert ask(script, 0, 1, 2) == [("g0", ["s0"]), ("g0", ["s1"])]
    assert script.ask_background(1, 0) == []
    assert script.batch_done() == []
    (serve,) = script.batch_done()
    assert isinstance(serve, r.Serve)
    assert serve.batch.pinned


def test_a_generator_gives_its_device_back_after_both_batches() -> None:
    lease = LeaseSettings({"g0": (0,), "trainer": (0,)}, min_hold_s=0.0)
    conductor = build_conductor(SchedulerSettings(batch_size=1, max_rows=1, max_lag=99, lease=lease))
    slots = tuple(r.SlotInfo(f"s{i}", i, 1) for i in range(4))
    for event in (
        r.SimulatorJoined("sim", 0, (r.EnvBatchInfo("b", slots),)),
        *(r.TrainerJoined("trainer", 0), r.GeneratorJoined("g0", 0, depth=2), r.TrainUntil(9)),
        *(r.DeviceTaken("trainer", 0, 0, 0.1), r.Published("trainer", 0, 0)),
        *(r.DeviceYielded("trainer", 0, 0, 8, 0.1), r.DeviceTaken("g0", 0, 0, 0.1), r.WeightsApplied("g0", 0, 0)),
    ):
        conductor.handle(event, 0.0)

    def hear(slot: int, now: float) -> list[tuple[str, list[str]]]:
        return batches(conductor.handle(r.RequestArrived("sim", 0, f"s{slot}", 1, 1, 0, "h"), now))

    assert hear(0, 1.0) + hear(1, 1.0) == [("g0", ["s0"]), ("g0", ["s1"])]
    ended = r.SampleFinished("sim", 0, 3, 1, "p", r.SampleEnd.TERMINATED, 1, 1, 0, 0, True, 1.0)
    assert not [c for c in conductor.handle(ended, 2.0) if isinstance(c, r.YieldDevice)], "it has two passes to do"
    assert isinstance(conductor, LeasedConductor)
    assert conductor.delivery.leases.present["g0"].under_way == 2
    assert conductor.handle(r.BatchDone("g0", 0, 1, 0), 3.0) == []
    assert hear(2, 3.5) == []
    found = conductor.serving.generators.present["g0"]
    assert found.ahead is None, "nothing waits behind the pass of a generator that has to go"
    assert conductor.handle(r.BatchDone("g0", 0, 2, 0), 4.0) == [r.YieldDevice("g0", 0)]


# ------------------------------------------------------------ any cluster


def loaded(rng: random.Random) -> ClusterSettings:
    """A cluster of generators of depth 2 and small batches, most of which die now and then; some lease devices."""
    base = arbitrary_cluster(rng)
    scheduler = replace(base.scheduler, batching="dynamic", max_rows=rng.choice((1, 2, 3)), max_lag=rng.choice((1, 4)))
    generators = tuple(group.model_copy(update={"depth": 2}) for group in base.generators)
    names = [name for name in base.station_names() if name.startswith("generator")]
    lost = [FaultPlan(station=rng.choice(names), at=rng.uniform(0.0, 0.4)) for _ in range(rng.choice((0, 2, 6)))]
    changes = {"scheduler": scheduler, "generators": generators, "faults": (*base.faults, *lost)}
    crowded = base.model_copy(update=changes)
    return leased(rng, crowded) if rng.random() < 0.3 else crowded


@settings(max_examples=tries(20, 60), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_guarantees_hold_and_weights_wait_for_two_passes_at_most(rng: random.Random) -> None:
    cluster_settings = loaded(rng)
    conductor = build_conductor(cluster_settings.scheduler)
    cluster = VirtualCluster(cluster_settings, conductor, record=True)
    watch = GuaranteeChecker(cluster, conductor)
    check_target_reached(cluster, conductor, watch)
    passes: dict[str, int] = {}
    published = cluster_settings.scheduler.on_update == "continue" and not cluster_settings.evaluations
    for step in cluster.driver.steps if published else ():
        if isinstance(step.event, r.Published):
            passes = {name: passes.get(name, 0) for name in conductor.serving.generators.present}
        elif isinstance(step.event, r.BatchDone) and step.event.generator in passes:
            passes[step.event.generator] += 1
            assert passes[step.event.generator] <= 2, step
        elif isinstance(step.event, r.StationLost | r.GeneratorJoined):
            passes.pop(step.event.station if isinstance(step.event, r.StationLost) else step.event.generator, None)
        for command in step.commands:
            if isinstance(command, r.ApplyWeights):
                passes.pop(command.generator, None)
