"""A run that goes on with other stations: what ran goes out again, what waited waits, and nobody is to blame."""

from __future__ import annotations

import json
import math
import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.long import tries
from tests.oracles.arbitrary import arbitrary_cluster
from tests.oracles.guarantees import GuaranteeChecker
from tests.scheduler.test_conductor import Script, train_one

from polyrhythm.conductors import build_conductor, restore_conductor
from polyrhythm.plugins.virtual.clustersim.cluster import Member, VirtualCluster
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings, FaultPlan
from polyrhythm.plugins.virtual.clustersim.station import VirtualStation
from polyrhythm.scheduler import records as r
from polyrhythm.scheduler.conductor import AnyConductor


def cut(script: Script) -> Script:
    """The script's conductor saved, restored and without stations."""
    before = script.conductor
    saved = json.loads(json.dumps(before.save()))
    script.conductor = restore_conductor(before.settings, saved)
    script.conductor.detach()
    assert script.conductor.ledger.imbalance == 0
    return script


def go_on(script: Script, version: int, *, updates: int = 0, slots: int = 2, rows: int = 1) -> list[r.Grant]:
    """New stations join, whose incarnations begin at 0 again; the first grants."""
    assert script.say(r.WeightsOffered(version)) == []
    said = script.join_simulator(slots, rows)
    assert script.say(r.GeneratorJoined("g0", 0)) == [r.ApplyWeights("g0", version)]
    said += script.say(r.TrainerJoined("trainer", 0, updates))
    said += script.applied(version)
    return [grant for start in said if isinstance(start, r.StartRows) for grant in start.grants]


def test_no_station_is_left_and_nothing_is_waited_for() -> None:
    script = Script(generators=2, slots=3, max_lag=9, episode_deadline_s=50.0)
    script.ask("s0")
    script.ask("s1")
    conductor = cut(script).conductor
    assert conductor.stations.incarnations == {}
    assert conductor.serving.generators.present == {}
    assert len(conductor.serving.queue) == 0
    assert conductor.rollout.rows.slots == {}
    assert conductor.updates.trainer == ""
    assert conductor.deadline() == math.inf


def test_what_ran_goes_out_again_as_it_was_and_before_anything_new() -> None:
    script = Script(slots=3, max_lag=9)
    script.finish(1)
    wanted = {number: script.tickets[number] for number in (0, 2, 3)}
    grants = go_on(cut(script), 0, slots=4)
    assert [grant.ticket for grant in grants] == [*wanted.values(), script.tickets[4]]
    assert script.conductor.ledger.running == 4


def test_what_waited_and_what_was_lent_is_lent_again() -> None:
    script = Script(slots=3, max_lag=9)
    for number in (0, 1, 2):
        script.finish(number)
    assert script.conductor.ledger.lent == 2
    cut(script)
    assert (script.conductor.ledger.lent, script.conductor.ledger.buffered) == (0, 3)
    script.say(r.WeightsOffered(0))
    (lend,) = script.say(r.TrainerJoined("trainer", 0, 0))
    assert isinstance(lend, r.StartUpdate)
    assert (lend.tickets, lend.payload_ids) == ((0, 1), ("p0", "p1"))


def test_updates_that_the_trainers_state_lacks_are_rolled_back() -> None:
    script = Script(slots=2, max_lag=2, sync_interval=2)
    train_one(script, 0)
    script.say(r.Checkpointed("trainer", 0, 1))
    train_one(script, 2)
    go_on(cut(script), 0, updates=1)
    ledger = script.conductor.ledger
    assert (ledger.trained, ledger.rolled_back) == (2, 2)
    assert script.conductor.versions.updates == 1


@pytest.mark.parametrize("max_attempts", [1, 2])
def test_being_cut_is_no_attempt(max_attempts: int) -> None:
    script = Script(slots=1, max_lag=0, max_attempts=max_attempts)
    for _ in range(3):
        (grant,) = go_on(cut(script), 0, slots=1)
        assert (grant.ticket.number, grant.ticket.attempt) == (0, 1)
    for attempt in range(1, max_attempts):
        script.say(r.SampleFailed("sim", 0, 0, attempt, r.DropReason.ENVIRONMENT_RAISED))
        assert script.conductor.ledger.dropped == {}
    script.say(r.SampleFailed("sim", 0, 0, max_attempts, r.DropReason.ENVIRONMENT_RAISED))
    assert script.conductor.ledger.dropped == {"environment raised": 1}


def test_a_run_that_halted_for_dropped_samples_may_drop_as_many_again() -> None:
    script = Script(slots=1, max_lag=0, max_attempts=1, max_dropped=1)
    for number in range(2):
        script.say(r.SampleFailed("sim", 0, number, 1, r.DropReason.ENVIRONMENT_RAISED))
    assert script.of(r.Halt)
    (grant,) = go_on(cut(script), 0, slots=1)
    assert not script.of(r.Halt)
    assert grant.ticket.number == 2
    script.say(r.SampleFailed("sim", 0, 2, 1, r.DropReason.ENVIRONMENT_RAISED))
    assert not script.of(r.Halt)
    script.say(r.SampleFailed("sim", 0, 3, 1, r.DropReason.ENVIRONMENT_RAISED))
    assert script.of(r.Halt)
    assert script.conductor.ledger.dropped == {"environment raised": 4}


def test_a_row_that_was_cancelled_is_not_waited_for() -> None:
    script = Script(slots=1, max_lag=0, episode_deadline_s=5.0)
    script.now = 5.0
    assert script.say(r.Wake()) == [r.CancelRow("sim", "s0", 0, 1)]
    (grant,) = go_on(cut(script), 0, slots=1)
    assert (grant.ticket.number, grant.ticket.attempt) == (0, 2), "this one was an attempt"
    assert script.conductor.rollout.cancelling == {}
    assert script.conductor.deadline() == 10.0


def test_a_group_that_was_begun_is_completed() -> None:
    script = Script(slots=3, group_size=4, batch_size=4, max_lag=0)
    script.finish(1)  # its row goes to the last member
    grants = go_on(cut(script), 0, slots=4)
    assert [(grant.ticket.number, grant.ticket.group) for grant in grants] == [(0, 0), (2, 0), (3, 0)]
    for number in (0, 2, 3):
        script.finish(number)
    (lend,) = script.of(r.StartUpdate)
    assert sorted(lend.tickets) == [0, 1, 2, 3]


def test_a_parked_episode_is_begun_anew() -> None:
    script = Script(slots=1, max_lag=9, segments=True)
    script.finish(0, end=r.SampleEnd.SEGMENT)
    (start,) = script.of(r.StartRows)
    assert start.grants[0].resume
    (grant,) = go_on(cut(script), 0, slots=1)
    assert (grant.ticket.number, grant.resume) == (1, False)


@pytest.mark.parametrize("background", [False, True])
def test_an_evaluation_under_way_is_forgotten_since_nobody_hears_its_results(background: bool) -> None:
    script = Script(slots=2, evaluator="g0")
    infos = (r.EnvBatchInfo("e", (r.SlotInfo("e/0", 0, 2),), reserved=True),)
    script.say(r.SimulatorJoined("apart", 0, infos))
    script.say(
        r.Evaluate("first", tuple(r.Episode(0, 0, seed, greedy=True) for seed in range(3)), background=background)
    )
    script.say(r.WeightsApplied("g0", 0, 0, pinned=True)) if background else [script.finish(0), script.finish(1)]
    assert any(number < 0 for number in script.tickets)
    rollout = cut(script).conductor.rollout
    assert (len(rollout.evaluations.queue), len(rollout.evaluations.background)) == (0, 0)
    assert all(number >= 0 for number in rollout.samples)
    assert all(grant.ticket.number >= 0 for grant in go_on(script, 0))


# ---------------------------------------------------------------- any run, cut anywhere


class Cut(Exception):
    pass


class Stopping:
    """A conductor that is taken away after some events, counted from the first one of this kind."""

    def __init__(self, conductor: AnyConductor, left: int, since: type = object) -> None:
        self.conductor, self._left, self._since = conductor, left, since

    def handle(self, event: r.Event, now: float) -> list[r.Command]:
        if isinstance(event, self._since):
            self._since = object
            if not self._left:
                raise Cut
            self._left -= 1
        return self.conductor.handle(event, now)

    def deadline(self) -> float:
        return self.conductor.deadline()


def stopping(conductor: AnyConductor, rng: random.Random) -> Stopping:
    """Anywhere, or soon after a station was lost or came back."""
    since = rng.choice((object, r.StationLost, r.TrainerJoined))
    return Stopping(conductor, rng.randint(1, rng.choice((10, 50, 250))), since)


class Part(VirtualCluster):
    """A part of a run: its trainer begins with what an earlier part saved, and its stations join in any order."""

    def __init__(
        self, cluster_settings: ClusterSettings, decider: Stopping, before: VirtualCluster | None, rng: random.Random
    ) -> None:
        self._saved = before.checkpoint if before is not None else 0
        self._order = rng
        super().__init__(cluster_settings, decider, record=True)
        self.watch = GuaranteeChecker(self, decider.conductor)
        if before is not None:
            self.driver.payloads |= before.driver.payloads
            offered = offered_by(before, decider.conductor, rng)
            if offered >= 0:
                self.driver.bus = offered
                self.driver.submit(r.WeightsOffered(offered))

    def start(self, member: Member) -> None:
        first, late = member.incarnation < 0, self._order.choice((0.0, 0.0, 0.02, 0.2))
        if first and late:
            member.incarnation = 0  # only the first start is late
            self.driver.clock.after(late, self._start_late, member)
        else:
            super().start(member)

    def _start_late(self, member: Member) -> None:
        member.incarnation = -1
        super().start(member)

    def incarnation(self, member: Member) -> VirtualStation:
        self.checkpoint = max(self.checkpoint, self._saved)
        return super().incarnation(member)


def offered_by(before: VirtualCluster, conductor: AnyConductor, rng: random.Random) -> int:
    """The version that a resumed run begins with: one that is published, or was written and never heard of."""
    versions = conductor.versions
    if not versions.in_version and before.checkpoint == versions.updates:
        return versions.trained  # the trainer's state is exactly it
    return max(versions.published, before.driver.bus)


def trained(cluster: VirtualCluster) -> list[int]:
    """The tickets of all updates that were done."""
    lent: tuple[int, ...] = ()
    done: list[int] = []
    for step in cluster.driver.steps:
        if isinstance(step.event, r.UpdateDone):
            done += lent
        if isinstance(step.event, r.UpdateDone | r.TrainerJoined):
            lent = ()
        for command in step.commands:
            lent += command.tickets if isinstance(command, r.StartUpdate) else ()
    return done


def restored(conductor: AnyConductor) -> AnyConductor:
    """Saved, restored and without stations, as a resumed run begins."""
    after = restore_conductor(conductor.settings, json.loads(json.dumps(conductor.save())))
    dropped = dict(after.ledger.dropped)
    after.detach()
    assert after.ledger.imbalance == 0
    assert after.ledger.dropped == dropped
    assert (after.ledger.running, after.ledger.lent) == (0, 0)
    return after


@settings(max_examples=tries(25, 75), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_a_run_that_is_cut_anywhere_again_and_again_and_loses_stations_reaches_its_target(rng: random.Random) -> None:
    cluster_settings = arbitrary_cluster(rng)
    if rng.random() < 0.5:
        unheard = FaultPlan(station="trainer", at=rng.choice((0.0, 0.05, 0.2, 0.5)), after_reply=True)
        cluster_settings = cluster_settings.model_copy(update={"faults": (*cluster_settings.faults, unheard)})
    conductor = build_conductor(cluster_settings.scheduler)
    parts: list[Part] = []
    for cut in [*[True] * rng.randint(1, 3), False]:
        decider = stopping(conductor, rng) if cut else Stopping(conductor, -1)
        parts.append(Part(cluster_settings, decider, parts[-1] if parts else None, rng))
        try:
            parts[-1].run()
            parts[-1].watch.finish()
        except Cut:
            if parts[-1].driver.reached < cluster_settings.versions:
                conductor = restored(conductor)
                continue
        break
    ledger = conductor.ledger
    assert parts[-1].driver.reached >= cluster_settings.versions
    assert ledger.imbalance == 0
    times = Counter(number for part in parts for number in trained(part))
    assert times.total() == ledger.trained + ledger.rolled_back
    assert max(times.values(), default=1) == 1, "what was rolled back is gone, the rest is trained once"
