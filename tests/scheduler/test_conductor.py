"""The conductor, event by event: each test is a short script whose commands were worked out by hand."""

from __future__ import annotations

import pytest

from polyrhythm.conductors import build_conductor, restore_conductor
from polyrhythm.scheduler import records as r
from polyrhythm.scheduler.settings import SchedulerSettings


class Script:
    """Feeds events to a conductor and keeps what it said last. Slots have one row each unless `rows` says otherwise.
    depth: of the generators."""

    def __init__(
        self, *, generators: int = 1, slots: int = 2, rows: int = 1, depth: int = 1, target: int = 9, **settings: object
    ) -> None:
        self.conductor = build_conductor(SchedulerSettings(**{"batch_size": 2, "max_wait_s": 1.0, **settings}))  # type: ignore[arg-type]
        self.now = 0.0
        self.said: list[r.Command] = []
        self.tickets: dict[int, r.Ticket] = {}
        self.join_simulator(slots, rows)
        self.say(r.TrainerJoined("trainer", 0))
        for index in range(generators):
            self.say(r.GeneratorJoined(f"g{index}", 0, depth=depth))
        self.say(r.Published("trainer", 0, 0))
        self.say(r.TrainUntil(target))
        for index in range(generators):
            self.applied(0, generator=f"g{index}")

    def join_simulator(
        self, slots: int, rows: int, incarnation: int = 0, *, reset_rows: bool = True
    ) -> list[r.Command]:
        infos = tuple(r.SlotInfo(f"s{index}", index * rows, rows) for index in range(slots))
        return self.say(r.SimulatorJoined("sim", incarnation, (r.EnvBatchInfo("b", infos, reset_rows),)))

    def say(self, event: r.Event) -> list[r.Command]:
        self.said = self.conductor.handle(event, self.now)
        for command in self.said:
            if isinstance(command, r.StartRows):
                self.tickets |= {grant.ticket.number: grant.ticket for grant in command.grants}
        assert self.conductor.ledger.imbalance == 0
        return self.said

    def of(self, kind: type) -> list:  # type: ignore[type-arg]
        return [command for command in self.said if isinstance(command, kind)]

    def applied(self, version: int, generator: str = "g0") -> list[r.Command]:
        return self.say(r.WeightsApplied(generator, 0, version))

    def ask(
        self, slot: str, sequence: int = 1, *, incarnation: int = 0, rows: int = 1, version: int = 0
    ) -> list[r.Command]:
        return self.say(r.RequestArrived("sim", incarnation, slot, sequence, rows, version, "h"))

    def finish(
        self, number: int, *, end: r.SampleEnd = r.SampleEnd.TERMINATED, oldest: int | None = None
    ) -> list[r.Command]:
        ticket = self.tickets[number]
        version = ticket.version if oldest is None else oldest
        event = r.SampleFinished("sim", 0, number, ticket.attempt, f"p{number}", end, 1, 1, version, version, True, 1.0)
        return self.say(event)

    def batch_done(self, version: int = 0, generator: str = "g0") -> list[r.Command]:
        batch = self.conductor.serving.generators.present[generator].batch
        assert batch is not None
        return self.say(r.BatchDone(generator, 0, batch.number, version))


def slots_of(command: r.Serve) -> list[str]:
    return [request.slot for request in command.batch.requests]


# ---------------------------------------------------------------- start


def test_no_ticket_before_the_first_weights_are_applied() -> None:
    conductor = build_conductor(SchedulerSettings(batch_size=2))
    conductor.handle(r.SimulatorJoined("sim", 0, (r.EnvBatchInfo("b", (r.SlotInfo("s0", 0, 1),)),)), 0.0)
    conductor.handle(r.TrainUntil(1), 0.0)
    assert conductor.handle(r.TrainerJoined("t", 0), 0.0) == [r.PublishWeights("t", 0)]
    assert conductor.handle(r.GeneratorJoined("g", 0), 0.0) == []
    assert conductor.handle(r.Published("t", 0, 0), 0.0) == [r.ApplyWeights("g", 0)]
    (start,) = conductor.handle(r.WeightsApplied("g", 0, 0), 0.0)
    assert isinstance(start, r.StartRows)


def test_rows_of_a_slot_start_together_with_increasing_tickets() -> None:
    script = Script(slots=2, rows=2, max_lag=1)
    starts = script.of(r.StartRows)
    assert [(s.slot, [(g.row, g.ticket.number) for g in s.grants]) for s in starts] == [
        ("s0", [(0, 0), (1, 1)]),
        ("s1", [(2, 2), (3, 3)]),
    ]


# ---------------------------------------------------------------- batches


def test_a_served_request_has_each_value_in_its_own_field() -> None:
    script = Script(slots=1, rows=3)
    script.now = 7.5
    arrived = r.RequestArrived(
        simulator="sim",
        incarnation=0,
        slot="s0",
        sequence=5,
        rows=3,
        version=0,
        reply_to="h",
        evaluation=True,
    )
    (serve,) = script.say(arrived)
    assert isinstance(serve, r.Serve)
    assert [request._asdict() for request in serve.batch.requests] == [
        {
            "slot": "s0",
            "simulator": "sim",
            "sequence": 5,
            "rows": 3,
            "version": 0,
            "reply_to": "h",
            "arrived": 7.5,
            "generator": None,
            "evaluation": True,
        }
    ]


def test_batch_clock_starts_at_the_oldest_request_not_when_the_generator_is_free() -> None:
    script = Script(slots=3, max_lag=9, max_wait_s=1.0)
    script.ask("s0")
    script.now = 1.0
    script.say(r.Wake())  # s0 alone, its clock ran out
    script.now = 1.2
    script.ask("s1")
    script.now = 1.5
    assert script.batch_done() == []
    assert script.conductor.deadline() == pytest.approx(2.2)  # 1.2 + 1.0, not 1.5 + 1.0
    script.now = 2.2
    (serve,) = script.say(r.Wake())
    assert slots_of(serve) == ["s1"]


def test_idle_generator_with_a_due_batch_never_waits() -> None:
    script = Script(slots=3, max_lag=9, max_wait_s=1.0)
    script.ask("s0")
    script.now = 1.0
    script.say(r.Wake())
    script.now = 1.1
    script.ask("s1")
    script.now = 5.0
    (serve,) = script.batch_done()  # s1 has been due since 2.1
    assert slots_of(serve) == ["s1"]


def test_when_every_live_slot_waits_nothing_more_can_come() -> None:
    script = Script(slots=2)
    assert script.ask("s0") == []
    (serve,) = script.ask("s1")
    assert slots_of(serve) == ["s0", "s1"]


def test_a_slot_without_tickets_is_not_waited_for() -> None:
    script = Script(slots=3, batch_size=2, max_lag=0, batching="lockstep")  # two tickets for three slots
    script.ask("s0")
    (serve,) = script.ask("s1")
    assert slots_of(serve) == ["s0", "s1"]


def test_lockstep_waits_for_every_live_slot_and_shares_evenly() -> None:
    script = Script(slots=4, batch_size=4, generators=2, batching="lockstep", max_wait_s=0.0)
    for slot in ("s2", "s0", "s1"):
        assert script.ask(slot) == []
    assert script.conductor.deadline() == float("inf")
    script.ask("s3")
    assert {s.generator: slots_of(s) for s in script.of(r.Serve)} == {"g0": ["s2", "s0"], "g1": ["s1", "s3"]}


def test_fixed_routing_binds_slot_i_to_generator_i_mod_n() -> None:
    script = Script(slots=4, batch_size=4, generators=2, batching="lockstep", routing="fixed")
    for slot in ("s3", "s2", "s1", "s0"):
        script.ask(slot)
    assert {s.generator: slots_of(s) for s in script.of(r.Serve)} == {"g0": ["s2", "s0"], "g1": ["s3", "s1"]}


def test_least_loaded_gives_the_next_batch_to_whoever_served_fewest_rows() -> None:
    script = Script(slots=3, batch_size=4, generators=2, max_wait_s=0.0)
    assert [s.generator for s in script.ask("s0")] == ["g0"]  # type: ignore[union-attr]
    assert [s.generator for s in script.ask("s1")] == ["g1"]  # type: ignore[union-attr]
    assert script.ask("s2") == []
    (serve,) = script.batch_done(generator="g1")
    assert (serve.generator, slots_of(serve)) == ("g1", ["s2"])


def test_lost_generators_batch_goes_back_with_its_old_arrival_time() -> None:
    script = Script(slots=3, batch_size=4, generators=2, max_wait_s=1.0, max_requests=2, routing="fixed")
    script.ask("s0")
    script.now = 0.5
    script.ask("s2")  # s0 and s2 belong to g0: two requests, due
    script.now = 0.9
    assert script.say(r.StationLost("g0", 0, "killed")) == [  # g1 serves them at once, oldest first
        r.Serve("g1", script.conductor.serving.generators.present["g1"].batch)
    ]
    batch = script.conductor.serving.generators.present["g1"].batch
    assert batch is not None
    assert [(q.slot, q.arrived) for q in batch.requests] == [("s0", 0.0), ("s2", 0.5)]


# ---------------------------------------------------------------- updates and versions


def test_an_answer_that_may_have_been_lost_with_its_generator_is_asked_for_again() -> None:
    script = Script(slots=1, generators=2, max_lag=0)
    script.ask("s0", 1)
    (serve,) = script.of(r.Serve)
    script.batch_done(generator=serve.generator)
    script.say(r.StationLost(serve.generator, 0, "killed"))
    (again,) = script.of(r.Serve)
    assert (again.generator != serve.generator, again.batch.requests) == (True, serve.batch.requests)


def test_an_answer_that_has_arrived_is_not_asked_for_again() -> None:
    script = Script(slots=1, generators=2, max_lag=0)
    script.ask("s0", 1)
    (serve,) = script.of(r.Serve)
    script.batch_done(generator=serve.generator)
    script.ask("s0", 2)
    script.say(r.StationLost(serve.generator, 0, "killed"))
    assert [request.sequence for command in script.of(r.Serve) for request in command.batch.requests] in ([2], [])


def train_one(script: Script, first: int) -> None:
    for number in (first, first + 1):
        script.finish(number)
    (lend,) = script.of(r.StartUpdate)
    script.say(r.UpdateDone("trainer", 0, lend.update))


def test_an_update_is_lent_trained_released_and_published() -> None:
    script = Script(max_lag=0)
    script.finish(1)
    script.finish(0)
    (lend,) = script.of(r.StartUpdate)
    assert (lend.update, lend.version, lend.tickets, lend.oldest) == (0, 0, (1, 0), (0, 0))
    assert script.say(r.UpdateDone("trainer", 0, 0)) == [
        r.ReleasePayloads(("p1", "p0")),
        r.PublishWeights("trainer", 1),
    ]
    assert script.conductor.ledger.trained == 2


def test_order_ticket_sorts_the_update() -> None:
    script = Script(max_lag=0, order="ticket")
    script.finish(1)
    script.finish(0)
    assert script.of(r.StartUpdate)[0].tickets == (0, 1)


def test_publication_happens_every_sync_interval_updates() -> None:
    script = Script(slots=2, max_lag=0, sync_interval=2)
    train_one(script, 0)
    assert script.of(r.PublishWeights) == []
    train_one(script, 2)
    assert script.of(r.PublishWeights) == [r.PublishWeights("trainer", 1)]


def test_continue_applies_between_two_passes_while_episodes_run() -> None:
    script = Script(slots=3, max_lag=2, on_update="continue", max_wait_s=0.0)
    script.ask("s2")  # being served
    train_one(script, 0)
    assert script.say(r.Published("trainer", 0, 1)) == []
    assert script.batch_done() == [r.ApplyWeights("g0", 1)]
    script.ask("s2", sequence=2)
    assert script.of(r.Serve) == []  # not while the weights change
    assert any(isinstance(c, r.Serve) for c in script.applied(1))


def test_drain_grants_nothing_until_running_episodes_end_and_weights_are_applied() -> None:
    script = Script(slots=3, max_lag=2, on_update="drain")
    train_one(script, 0)  # rows of 0 and 1 run 3 and 4 by now
    running = sorted(script.tickets.keys() - {0, 1})
    assert running == [2, 3, 4]
    script.say(r.Published("trainer", 0, 1))
    for number in running:
        script.finish(number)
        assert script.of(r.StartRows) == []
    assert script.of(r.ApplyWeights) == [r.ApplyWeights("g0", 1)]
    script.applied(1)
    (first, *_) = script.of(r.StartRows)
    assert first.grants[0].ticket.version == 1


def test_applied_version_is_the_lowest_of_the_live_generators() -> None:
    script = Script(slots=2, generators=2, max_lag=3)
    train_one(script, 0)
    script.say(r.Published("trainer", 0, 1))
    script.applied(1, "g0")
    assert script.conductor.versions.applied == 0
    script.applied(1, "g1")
    assert script.conductor.versions.applied == 1


def test_a_new_generator_serves_only_once_it_holds_the_applied_version() -> None:
    script = Script(slots=2, max_wait_s=0.0)
    train_one(script, 0)
    script.say(r.Published("trainer", 0, 1))
    script.applied(1)
    script.say(r.StationLost("g0", 0, "killed"))
    script.ask("s0", version=1)
    assert script.said == []
    assert script.say(r.GeneratorJoined("g1", 0)) == [r.ApplyWeights("g1", 1)]
    assert script.conductor.versions.applied == 1
    assert len(script.applied(1, "g1")) == 1


# ---------------------------------------------------------------- faults


def test_failed_sample_goes_out_again_under_its_number_before_new_tickets() -> None:
    script = Script(slots=1, max_lag=5)
    script.say(r.SampleFailed("sim", 0, 0, 1, r.DropReason.ENVIRONMENT_RAISED))
    (start,) = script.of(r.StartRows)
    assert (start.grants[0].ticket.number, start.grants[0].ticket.attempt) == (0, 2)


def test_after_max_attempts_the_group_is_dropped_cancelled_and_replaced() -> None:
    script = Script(slots=3, group_size=2, max_lag=1, max_attempts=1)  # limit 4: groups 0 and 1, three rows
    script.finish(1)  # group 0: ticket 1 buffered, 0 runs; the row goes to ticket 3
    said = script.say(r.SampleFailed("sim", 0, 0, 1, r.DropReason.ENVIRONMENT_RAISED))
    assert script.of(r.ReleasePayloads) == [r.ReleasePayloads(("p1",))]
    assert [g.ticket.group for c in said if isinstance(c, r.StartRows) for g in c.grants] == [2]
    assert script.conductor.ledger.dropped == {"environment raised": 2}


def test_running_members_of_a_dropped_group_are_cancelled_and_their_rows_come_back() -> None:
    script = Script(slots=2, group_size=2, max_lag=0, max_attempts=1)
    script.ask("s1")  # waits: s0 is live too
    script.say(r.SampleFailed("sim", 0, 0, 1, r.DropReason.ENVIRONMENT_RAISED))
    assert script.of(r.CancelRow) == [r.CancelRow("sim", "s1", 1, 1)]
    assert [g.row for c in script.of(r.StartRows) for g in c.grants] == [0]
    script.say(r.SampleFailed("sim", 0, 1, 1, r.DropReason.CANCELLED))
    assert script.said[0] == r.RefuseRequest("sim", "s1", 1, "its rows were cancelled")
    assert [g.row for c in script.of(r.StartRows) for g in c.grants] == [1]


def test_sample_that_finishes_while_being_cancelled_is_released_not_counted() -> None:
    script = Script(slots=1, max_lag=0, episode_deadline_s=5.0)
    script.now = 5.0
    assert script.conductor.deadline() == 5.0
    assert script.say(r.Wake()) == [r.CancelRow("sim", "s0", 0, 1)]
    said = script.finish(0)
    assert said[0] == r.ReleasePayloads(("p0",))
    assert script.conductor.ledger.buffered == 0
    assert script.tickets[0].attempt == 2


def test_lost_simulator_gives_its_tickets_to_its_successor_and_old_messages_are_refused() -> None:
    script = Script(slots=2, max_lag=0)
    script.say(r.StationLost("sim", 0, "killed"))
    assert script.conductor.ledger.reissuing == 2
    script.join_simulator(2, 1, incarnation=1)
    assert [g.ticket.attempt for c in script.of(r.StartRows) for g in c.grants] == [2, 2]
    before = script.conductor.stations.refused
    assert script.ask("s0", incarnation=0) == []
    assert script.conductor.stations.refused == before + 1


def test_lost_trainer_gives_back_what_was_lent() -> None:
    script = Script(max_lag=0)
    script.finish(0)
    script.finish(1)
    script.say(r.StationLost("trainer", 0, "killed"))
    assert (script.conductor.ledger.lent, script.conductor.ledger.buffered) == (0, 2)
    script.say(r.TrainerJoined("trainer", 1, 0))
    (lend,) = script.of(r.StartUpdate)
    assert lend.tickets == (0, 1)


def test_trainer_back_with_older_weights_rolls_back_and_publishes_a_new_version() -> None:
    script = Script(max_lag=1)
    train_one(script, 0)
    script.say(r.Published("trainer", 0, 1))
    script.applied(1)
    train_one(script, 2)  # update 1, version 2
    script.say(r.Published("trainer", 0, 2))
    script.applied(2)
    script.say(r.StationLost("trainer", 0, "killed"))
    script.say(r.TrainerJoined("trainer", 1, 1))  # the checkpoint has one update
    assert script.of(r.PublishWeights) == [r.PublishWeights("trainer", 3)]
    ledger = script.conductor.ledger
    assert (ledger.trained, ledger.rolled_back) == (2, 2)
    assert script.conductor.rollout.admission.consumed == 6  # version 3 · B
    assert all(slack >= 0 for _, slack in script.conductor.rollout.admission.slack())


def test_a_trainer_that_lost_only_part_of_a_version_goes_on_under_the_same_version() -> None:
    script = Script(max_lag=1, sync_interval=2)
    train_one(script, 0)
    script.say(r.StationLost("trainer", 0, "killed"))
    script.say(r.TrainerJoined("trainer", 1, 0))
    assert script.of(r.PublishWeights) == []
    assert (script.conductor.ledger.rolled_back, script.conductor.rollout.admission.consumed) == (2, 0)


def ahead_of_its_publication() -> Script:
    """A trainer whose second update has ended while version 1, whose state is saved, is still being published."""
    script = Script(max_lag=2)
    train_one(script, 0)
    assert script.of(r.PublishWeights) == [r.PublishWeights("trainer", 1)]
    script.say(r.Checkpointed("trainer", 0, 1))
    train_one(script, 2)
    assert script.of(r.PublishWeights) == [r.PublishWeights("trainer", 2)]
    return script


def test_a_version_may_be_announced_after_the_update_behind_it() -> None:
    script = ahead_of_its_publication()
    assert script.say(r.Published("trainer", 0, 1)) == [r.ApplyWeights("g0", 1)]
    script.applied(1)
    assert script.say(r.Published("trainer", 0, 2)) == [r.ApplyWeights("g0", 2)]
    script.applied(2)
    assert (script.conductor.versions.applied, script.conductor.versions.trained) == (2, 2)


def test_a_trainer_that_is_lost_before_it_announces_a_version_that_it_has_saved_publishes_it_again() -> None:
    """Its first incarnation may have written version 1: with the same weights, as these are the saved ones."""
    script = ahead_of_its_publication()
    script.say(r.StationLost("trainer", 0, "killed"))
    script.say(r.TrainerJoined("trainer", 1, 1))
    assert script.of(r.PublishWeights) == [r.PublishWeights("trainer", 1)]
    ledger, versions = script.conductor.ledger, script.conductor.versions
    assert (ledger.trained, ledger.rolled_back) == (2, 2)
    assert (versions.trained, versions.published, versions.updates) == (1, 0, 1)
    assert script.say(r.Published("trainer", 0, 1)) == [], "what the lost one said comes too late"
    assert script.say(r.Published("trainer", 1, 1)) == [r.ApplyWeights("g0", 1)]
    script.finish(4)
    script.finish(5)
    (start,) = script.of(r.StartUpdate)
    assert (start.update, start.version, start.oldest) == (1, 1, (0, 0))


def test_checkpointed_updates_cannot_be_rolled_back() -> None:
    script = Script(max_lag=1)
    train_one(script, 0)
    script.say(r.Checkpointed("trainer", 0, 1))
    assert list(script.conductor.updates.undoable) == []


def test_a_checkpoint_of_an_earlier_trainer_is_none_of_the_present_ones() -> None:
    script = Script(max_lag=1)
    train_one(script, 0)
    script.say(r.StationLost("trainer", 0, "killed"))
    script.say(r.TrainerJoined("trainer", 1, 1))
    assert script.conductor.updates.undoable
    script.say(r.Checkpointed("trainer", 0, 1))
    assert script.conductor.updates.undoable
    assert script.conductor.stations.refused == 1


def test_too_many_dropped_samples_halt_the_run() -> None:
    script = Script(slots=1, max_attempts=1, max_dropped=0)
    script.say(r.SampleFailed("sim", 0, 0, 1, r.DropReason.ENVIRONMENT_RAISED, "step: E: broken", "task reach, seed 3"))
    (halt,) = script.of(r.Halt)
    assert halt.reason == (
        "rollout.max_dropped = 0: 1 samples were dropped after rollout.max_attempts = 1 attempts each "
        "(1 x environment raised); the last failure: step: E: broken (task reach, seed 3); "
        "correct what fails, then resume the run"
    )


def test_an_update_that_halts_the_run_is_trained_and_never_met_again() -> None:
    script = Script(max_lag=0)
    script.finish(0)
    script.finish(1)
    said = script.say(r.UpdateDone("trainer", 0, 0, "the gradient of update 0 is not finite"))
    assert r.Halt("the gradient of update 0 is not finite") in said
    assert r.PublishWeights("trainer", 1) in said
    assert script.conductor.ledger.trained == 2
    assert script.conductor.versions.updates == 1


def test_a_run_that_halts_begins_nothing_more_until_it_is_resumed() -> None:
    script = Script(slots=2, max_lag=4)
    for number in range(4):
        script.finish(number)
    assert script.conductor.updates.in_training, "and the samples of another update wait"
    script.say(r.UpdateDone("trainer", 0, 0, "the gradient of update 0 is not finite"))
    assert not script.of(r.StartUpdate)
    assert script.conductor.updates.in_training == [], "so that a run that winds down waits for no update"
    for number in range(4, 6):
        script.finish(number)
        assert not script.of(r.StartUpdate)
        assert not script.of(r.StartRows)
    resumed = restore_conductor(script.conductor.settings, script.conductor.save())
    resumed.detach()
    assert any(isinstance(command, r.StartUpdate) for command in resumed.handle(r.TrainerJoined("trainer", 1), 9.0))


HOSTS = [{"batching": "lockstep"}, {"routing": "fixed"}, {"routing": "round_robin"}, {}]


@pytest.mark.parametrize("settings", HOSTS)
def test_a_generator_that_may_not_take_weights_yet_is_not_waited_for(settings: dict[str, str]) -> None:
    script = Script(slots=4, generators=2, max_lag=4, on_update="drain", max_wait_s=0.0, **settings)
    train_one(script, 0)
    script.say(r.Published("trainer", 0, 1))  # episodes run, so it waits
    script.say(r.StationLost("g1", 0, "killed"))
    assert script.say(r.GeneratorJoined("g1", 1)) == []
    served = [c for index in range(4) for c in script.ask(f"s{index}") if isinstance(c, r.Serve)]
    while script.conductor.serving.generators.present["g0"].batch:
        served += [c for c in script.batch_done() if isinstance(c, r.Serve)]
    assert sorted(slot for serve in served for slot in slots_of(serve)) == ["s0", "s1", "s2", "s3"]
    assert {serve.generator for serve in served} == {"g0"}


@pytest.mark.parametrize("settings", HOSTS)
def test_a_generator_that_joins_an_evaluation_takes_its_weights_not_newer_ones(settings: dict[str, str]) -> None:
    script = Script(slots=2, max_lag=0, max_wait_s=0.0, **settings)
    evaluate(script, episodes=2)
    script.finish(0)
    script.finish(1)
    script.say(r.UpdateDone("trainer", 0, 0))
    script.say(r.Published("trainer", 0, 1))
    script.say(r.StationLost("g0", 0, "killed"))
    assert script.say(r.GeneratorJoined("g1", 0)) == [r.ApplyWeights("g1", 0)]
    script.applied(0, "g1")
    served = [c for slot in ("s0", "s1") for c in script.ask(slot) if isinstance(c, r.Serve)]
    assert {serve.generator for serve in served} == {"g1"}


def test_a_second_trainer_takes_over_what_the_first_had_borrowed() -> None:
    script = Script(max_lag=0)
    script.finish(0)
    script.finish(1)
    script.say(r.TrainerJoined("other", 0, 0))
    (lend,) = script.of(r.StartUpdate)
    assert (lend.trainer, lend.tickets) == ("other", (0, 1))
    assert script.say(r.UpdateDone("trainer", 0, 0)) == []  # the first is no longer heard


# ---------------------------------------------------------------- segments, joint resets


def test_a_parked_row_goes_on_with_its_episode_under_a_new_ticket() -> None:
    script = Script(slots=1, max_lag=5, segments=True)
    script.finish(0, end=r.SampleEnd.SEGMENT)
    (start,) = script.of(r.StartRows)
    assert (start.grants[0].resume, start.grants[0].ticket.number) == (True, 1)


def test_rows_that_reset_together_wait_for_each_other() -> None:
    conductor_script = Script(slots=0, max_lag=9)
    conductor_script.join_simulator(1, 3, reset_rows=False)
    (start,) = conductor_script.of(r.StartRows)
    assert len(start.grants) == 3
    assert [c for n in (0, 2) for c in conductor_script.finish(n) if isinstance(c, r.StartRows)] == []
    conductor_script.finish(1)
    (start,) = conductor_script.of(r.StartRows)
    assert [(g.row, g.ticket.number) for g in start.grants] == [(0, 3), (1, 4), (2, 5)]


# ---------------------------------------------------------------- evaluation


def evaluate(script: Script, name: str = "before", episodes: int = 1) -> list[r.Command]:
    return script.say(r.Evaluate(name, tuple(r.Episode(0, 0, seed, greedy=True) for seed in range(episodes))))


def test_evaluation_waits_for_running_training_and_holds_new_tickets_back() -> None:
    script = Script(slots=2, max_lag=0)
    assert evaluate(script) == []
    script.finish(0)
    assert script.of(r.StartRows) == []
    script.finish(1)
    (start,) = script.of(r.StartRows)
    ticket = start.grants[0].ticket
    assert (ticket.number, ticket.evaluation, ticket.greedy) == (-1, "before", True)
    script.finish(-1)
    assert script.of(r.SampleEvaluated)[0].success
    assert script.of(r.EvaluationDone) == [r.EvaluationDone("before", 1, 0)]
    assert script.conductor.ledger.started == 2


def grants_of_version(*, evaluated: bool) -> list[tuple[int, str]]:
    """(ticket, slot) of the grants of version 1, after rows 2, 0, 1 ended version 0 in this order."""
    script = Script(slots=3, batch_size=3, max_lag=0)
    for number in (2, 0, 1):
        script.finish(number)
    if evaluated:
        evaluate(script, episodes=4)
        for number in (-2, -1, -4, -3):
            script.finish(number)
    script.say(r.UpdateDone("trainer", 0, 0))
    script.say(r.Published("trainer", 0, 1))
    script.applied(1)
    return [(grant.ticket.number, start.slot) for start in script.of(r.StartRows) for grant in start.grants]


def test_an_evaluation_leaves_no_trace_in_who_runs_what() -> None:
    assert grants_of_version(evaluated=True) == grants_of_version(evaluated=False)
    assert grants_of_version(evaluated=False) == [(3, "s0"), (4, "s1"), (5, "s2")]


def test_weights_that_arrive_during_an_evaluation_wait_for_its_end() -> None:
    script = Script(slots=2, max_lag=0)
    evaluate(script)
    script.finish(0)
    script.finish(1)  # evaluation begins; the trainer has its samples
    script.say(r.UpdateDone("trainer", 0, 0))
    assert script.say(r.Published("trainer", 0, 1)) == []
    script.finish(-1)
    assert script.of(r.ApplyWeights) == [r.ApplyWeights("g0", 1)]


def test_evaluation_episode_that_keeps_failing_is_reported_as_dropped() -> None:
    script = Script(slots=1, target=0, max_attempts=2)
    evaluate(script)
    for attempt in (1, 2):
        script.say(r.SampleFailed("sim", 0, -1, attempt, r.DropReason.ENVIRONMENT_RAISED))
    assert script.of(r.EvaluationDone) == [r.EvaluationDone("before", 0, 1)]


def test_target_is_announced_once_when_trained_published_and_applied() -> None:
    script = Script(max_lag=0, target=1)
    train_one(script, 0)
    script.say(r.Published("trainer", 0, 1))
    assert script.of(r.TargetReached) == []
    assert script.applied(1) == [r.TargetReached(1)]
    assert script.say(r.Wake()) == []
