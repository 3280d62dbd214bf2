"""Evaluation beside training: one version, rows of its own, and training goes on as if it were not there."""

from __future__ import annotations

import pytest
from tests.scheduler.test_conductor import Script
from tests.scheduler.test_detach import cut

from polyrhythm.scheduler import records as r
from polyrhythm.scheduler.samples.groups import SampleState
from polyrhythm.specs.hashing import mix


class Beside(Script):
    """Training's two slots, and two reserved rows in a slot of simulator `apart`. own: another generator evaluates."""

    def __init__(self, *, own: bool = False, **settings: object) -> None:
        self.evaluator = "own" if own else "g0"
        super().__init__(**{"max_lag": 9, "evaluator": self.evaluator, "evaluator_only": own, **settings})  # type: ignore[arg-type]
        self.join_reserved()
        if own:
            self.say(r.GeneratorJoined("own", 0))

    def join_reserved(self, incarnation: int = 0) -> list[r.Command]:
        infos = (r.SlotInfo("e/0", 0, 2),)
        return self.say(r.SimulatorJoined("apart", incarnation, (r.EnvBatchInfo("e", infos, reserved=True),)))

    def evaluate(self, name: str = "first", episodes: int = 3) -> list[r.Command]:
        wanted = tuple(r.Episode(0, 0, seed, greedy=True) for seed in range(episodes))
        return self.say(r.Evaluate(name, wanted, background=True))

    def pinned(self, version: int, incarnation: int = 0) -> list[r.Command]:
        return self.say(r.WeightsApplied(self.evaluator, incarnation, version, pinned=True))

    def ask_background(self, sequence: int, version: int, rows: int = 2) -> list[r.Command]:
        return self.say(r.RequestArrived("apart", 0, "e/0", sequence, rows, version, "h", evaluation=True))

    def end(self, number: int, version: int = 0) -> list[r.Command]:
        ticket = self.tickets[number]
        return self.say(
            r.SampleFinished(
                "apart", 0, number, ticket.attempt, "", r.SampleEnd.TERMINATED, 1, 1, version, version, True, 1.0
            )
        )


def granted(commands: list[r.Command]) -> list[int]:
    return [grant.ticket.number for c in commands if isinstance(c, r.StartRows) for grant in c.grants]


@pytest.mark.parametrize("own", [False, True])
def test_reserved_rows_wait_for_pinned_weights_and_are_served_by_the_evaluator_alone(own: bool) -> None:
    script = Beside(own=own, generators=2)
    assert granted(script.said) == [], "training gets no reserved row"
    assert script.evaluate() == [r.ApplyWeights(script.evaluator, 0, pinned=True)]
    said = script.pinned(0)
    assert granted(said) == [-1, -2]
    assert [c.simulator for c in said if isinstance(c, r.StartRows)] == ["apart"]
    assert {script.tickets[number].version for number in (-1, -2)} == {0}
    (serve,) = script.ask_background(1, 0)
    assert isinstance(serve, r.Serve)
    assert (serve.generator, serve.batch.pinned, serve.batch.requests[0].rows) == (script.evaluator, True, 2)


def test_training_is_served_by_the_others_as_ever_while_the_evaluator_works_apart() -> None:
    script = Beside(own=True, generators=1, max_rows=2)
    script.evaluate()
    script.pinned(0)
    script.ask_background(1, 0)
    assert script.ask("s0") == [], "a batch of two rows is not complete"
    (serve,) = script.ask("s1")
    assert isinstance(serve, r.Serve)
    assert (serve.generator, serve.batch.pinned) == ("g0", False)
    assert [request.slot for request in serve.batch.requests] == ["s0", "s1"]


def test_a_lockstep_batch_waits_for_training_slots_alone() -> None:
    script = Beside(batching="lockstep", own=True)
    script.evaluate()
    script.pinned(0)
    script.ask("s0")
    (serve,) = script.ask("s1")
    assert isinstance(serve, r.Serve)
    assert [request.slot for request in serve.batch.requests] == ["s0", "s1"]


def test_the_shared_evaluator_serves_one_pass_at_a_time_the_pinned_one_first() -> None:
    script = Beside(max_rows=1)
    script.evaluate()
    script.pinned(0)
    (serve,) = script.ask("s0")
    assert isinstance(serve, r.Serve)
    assert script.ask("s1") == []
    assert script.ask_background(1, 0) == []
    (serve,) = script.batch_done()
    assert isinstance(serve, r.Serve)
    assert serve.batch.pinned
    (serve,) = script.batch_done()
    assert isinstance(serve, r.Serve)
    assert [request.slot for request in serve.batch.requests] == ["s1"]


def saturated(**settings: object) -> Beside:
    """Two training slots and the reserved one all ask the one generator, whose pass goes to s0 first."""
    script = Beside(max_rows=1, **settings)
    script.evaluate()
    script.pinned(0)
    script.ask("s0")
    script.ask("s1")
    script.ask_background(1, 0)
    return script


def passes(script: Beside, count: int, seconds: float = 0.0) -> list[str]:
    """The slots of the next passes; every slot asks again as soon as it is answered."""
    found = []
    sequence = {"s0": 1, "s1": 1, "e/0": 1}
    for _ in range(count):
        batch = script.conductor.serving.generators.present["g0"].batch
        assert batch is not None
        slot = batch.requests[0].slot
        script.now += seconds
        (serve,) = script.batch_done()
        assert isinstance(serve, r.Serve)
        found.append(serve.batch.requests[0].slot)
        sequence[slot] += 1
        if slot == "e/0":
            script.ask_background(sequence[slot], 0)
        else:
            script.ask(slot, sequence[slot])
    return found


def test_turns_alternate_on_a_generator_that_never_rests() -> None:
    assert passes(saturated(), 6) == ["e/0", "s1", "e/0", "s0", "e/0", "s1"]


def test_evaluation_that_is_first_is_served_whenever_it_waits() -> None:
    script = saturated(evaluation_priority="first")
    assert passes(script, 1) == ["e/0"]
    script.ask_background(2, 0)
    (serve,) = script.batch_done()
    assert isinstance(serve, r.Serve)
    assert serve.batch.pinned, "again, although it was evaluation's turn before"


def test_evaluation_that_is_last_waits_for_a_pause_of_training_but_not_for_ever() -> None:
    script = saturated(evaluation_priority="last", evaluation_max_wait_s=1.0)
    assert passes(script, 10, seconds=0.2) == ["s1", "s0", "s1", "s0", "e/0", "s1", "s0", "s1", "s0", "s1"]


def test_evaluation_that_is_last_is_served_when_no_training_batch_is_due() -> None:
    script = Beside(max_rows=2, evaluation_priority="last")
    script.evaluate()
    script.pinned(0)
    assert script.ask("s0") == [], "it waits for s1"
    (serve,) = script.ask_background(1, 0)
    assert isinstance(serve, r.Serve)
    assert serve.batch.pinned


def test_the_version_stays_while_training_takes_newer_ones_and_the_next_evaluation_has_the_newest() -> None:
    script = Beside()
    script.evaluate("first", 2)
    script.evaluate("second", 1)
    script.pinned(0)
    script.say(r.Published("trainer", 0, 1))
    assert not [c for c in script.said if isinstance(c, r.ApplyWeights) and c.pinned]
    script.applied(1)
    assert script.conductor.versions.applied == 1
    assert script.end(-1) == [
        r.SampleEvaluated("first", 0, 0, True, True, 1.0, 0, seed=0, env_steps=1, noise=mix(0, 3)),
        r.ReleasePayloads(("",)),
    ]
    said = script.end(-2)
    assert r.EvaluationDone("first", 2, 0) in said
    assert r.ApplyWeights("g0", 1, pinned=True) in said
    assert granted(said) == []
    assert granted(script.pinned(1)) == [-3]
    assert script.tickets[-3].version == 1


def test_training_tickets_are_granted_and_lent_while_an_evaluation_runs() -> None:
    script = Beside(target=9)
    script.evaluate()
    script.pinned(0)
    script.finish(0)
    assert granted(script.said) == [2]
    script.finish(1)
    assert len(script.of(r.StartUpdate)) == 1
    assert script.conductor.ledger.running == 2, "evaluation is not in the ledger"


@pytest.mark.parametrize("own", [False, True])
def test_an_evaluator_that_is_lost_ends_the_evaluation_and_the_next_begins_when_it_is_back(own: bool) -> None:
    script = Beside(own=own)
    script.evaluate("first")
    script.pinned(0)
    script.ask_background(1, 0)
    script.end(-1)
    script.evaluate("second", 1)
    said = script.say(r.StationLost(script.evaluator, 0, "killed"))
    assert r.EvaluationDone("first", 1, 2) in said
    assert {c.ticket for c in said if isinstance(c, r.CancelRow)} == {-2, -3}
    for number in (-2, -3):
        script.say(r.SampleFailed("apart", 0, number, 1, r.DropReason.CANCELLED))
    assert r.RefuseRequest("apart", "e/0", 1, "its rows were cancelled") in script.said
    said = script.say(r.GeneratorJoined(script.evaluator, 1))
    assert r.ApplyWeights(script.evaluator, 0, pinned=True) in said
    assert granted(script.pinned(0, incarnation=1)) == [-4]


def test_reserved_rows_that_are_lost_repeat_their_episodes() -> None:
    script = Beside()
    script.evaluate()
    script.pinned(0)
    script.end(-1)
    said = script.say(r.StationLost("apart", 0, "killed"))
    assert not [c for c in said if isinstance(c, r.EvaluationDone)]
    again = granted(script.join_reserved(incarnation=1))
    assert sorted(again) == [-3, -2]
    assert {script.tickets[number].attempt for number in again} == {2}


def test_a_training_evaluation_and_one_beside_it_do_not_meet() -> None:
    script = Beside(target=0)
    script.evaluate("beside", 2)
    script.say(r.Evaluate("pause", (r.Episode(0, 0, 7, greedy=True),)))
    assert granted(script.pinned(0)) == [-1, -2]
    assert script.tickets[-3].evaluation == "pause"
    script.end(-2)
    assert script.finish(-3, end=r.SampleEnd.TERMINATED)[-1] == r.EvaluationDone("pause", 1, 0)
    assert r.EvaluationDone("beside", 2, 0) in script.end(-1)


def test_a_pause_is_given_up_when_its_weights_are_nowhere_any_more() -> None:
    script = Script(max_lag=9)
    script.say(r.Evaluate("pause", tuple(r.Episode(0, 0, seed, greedy=True) for seed in range(3))))
    script.finish(0)
    script.finish(1)  # both rows evaluate now
    (lend,) = script.of(r.StartUpdate)
    script.say(r.UpdateDone("trainer", 0, lend.update))
    script.say(r.Published("trainer", 0, 1))
    assert not script.of(r.ApplyWeights), "the weights stay"
    script.say(r.StationLost("g0", 0, "killed"))
    assert script.say(r.GeneratorJoined("g0", 1)) == [r.ApplyWeights("g0", 0)]
    said = script.say(r.WeightsApplied("g0", 1, 1))
    assert [c for c in said if isinstance(c, r.EvaluationDone)] == [r.EvaluationDone("pause", 0, 3)]
    assert {c.ticket for c in said if isinstance(c, r.CancelRow)} == {-1, -2}
    for number in (-1, -2):
        script.say(r.SampleFailed("sim", 0, number, 1, r.DropReason.CANCELLED))
    assert granted(script.said) != [], "training goes on"
    assert script.tickets[3].version == 1


def test_a_run_that_is_resumed_at_its_target_hears_that_again() -> None:
    script = Script(target=1, max_lag=0)
    script.finish(0)
    script.finish(1)
    (lend,) = script.of(r.StartUpdate)
    script.say(r.UpdateDone("trainer", 0, lend.update))
    script.say(r.Published("trainer", 0, 1))
    assert r.TargetReached(1) in script.applied(1)
    assert cut(script).say(r.WeightsOffered(1)) == [r.TargetReached(1)]


def test_a_shared_evaluator_gives_training_every_other_pass() -> None:
    """Reserved slots that are always faster than a pass do not keep it for themselves."""
    script = Beside(max_rows=1, max_wait_s=0.0)
    infos = (r.SlotInfo("f/0", 0, 1),)
    script.say(r.SimulatorJoined("more", 0, (r.EnvBatchInfo("f", infos, reserved=True),)))
    script.evaluate(episodes=3)
    script.pinned(0)
    served = [script.ask_background(1, 0)[0]]
    assert script.ask("s0") == []
    assert script.say(r.RequestArrived("more", 0, "f/0", 1, 1, 0, "h", evaluation=True)) == []
    served += script.batch_done()
    script.ask_background(2, 0)
    served += script.batch_done()
    slots = [[request.slot for request in c.batch.requests] for c in served if isinstance(c, r.Serve)]
    assert slots == [["e/0"], ["s0"], ["f/0", "e/0"]]


def test_an_evaluator_that_was_busy_when_the_others_took_weights_takes_them_after_its_pass() -> None:
    script = Beside(generators=2, batch_size=1, max_lag=1.0, on_update="drain")
    script.finish(0)
    script.say(r.UpdateDone("trainer", 0, 0))
    script.say(r.StationLost("g0", 0, "killed"))
    script.say(r.Published("trainer", 0, 1))
    script.say(r.GeneratorJoined("g0", 1))
    script.evaluate(episodes=1)
    script.pinned(1, incarnation=1)
    (serve,) = script.ask_background(1, 1, rows=1)
    assert isinstance(serve, r.Serve)
    running = [n for n, s in script.conductor.rollout.samples.items() if n >= 0 and s.state is SampleState.RUNNING]
    for number in running:
        script.finish(number)
    assert r.ApplyWeights("g1", 1) in script.said
    script.applied(1, generator="g1")
    assert script.conductor.versions.applied == 1
    assert r.ApplyWeights("g0", 1) in script.say(r.BatchDone("g0", 1, serve.batch.number, 1))
