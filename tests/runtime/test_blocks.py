"""Who owns a block: always exactly one, and there are always enough of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from tests.oracles.arbitrary import arbitrary_cluster

from polyrhythm.conductors import build_conductor
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.in_flight import InFlight, blocks_needed
from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.records import (
    Command,
    DropReason,
    Episode,
    Evaluate,
    Event,
    Grant,
    ReleasePayloads,
    SampleEnd,
    SampleFailed,
    SampleFinished,
    SimulatorJoined,
    StartRows,
    StationLost,
    Ticket,
)


def of_blocks(count: int) -> InFlight:
    return InFlight(ArenaLayout(blocks=count, steps=1, chunk=1, obs={}, answers={}, slots={}))


def in_use(pool: InFlight) -> list[int]:
    """Blocks that are being written, and those of finished samples."""
    return [*(attempt.block for attempt in pool.attempts.values()), *map(int, pool.finished())]


def blocks_of(pool: InFlight, command: StartRows) -> list[int]:
    """The blocks that the command's grants get, in order."""
    return [grant.block for grant in pool.assign(command).grants]


def start(*numbers: int, simulator: str = "s", attempt: int = 1) -> StartRows:
    tickets = [Ticket(number, number, 0, 0, 0, 0, 0, attempt) for number in numbers]
    return StartRows(simulator, f"{simulator}/0", tuple(Grant(0, ticket) for ticket in tickets))


def finished(number: int, payload_id: str, *, simulator: str = "s", attempt: int = 1) -> SampleFinished:
    return SampleFinished(simulator, 0, number, attempt, payload_id, SampleEnd.TERMINATED, 1, 1, 0, 0, True, 0.0)


def failed(number: int, *, attempt: int = 1) -> SampleFailed:
    return SampleFailed("s", 0, number, attempt, DropReason.CANCELLED)


def test_a_block_goes_from_the_simulator_to_the_conductor_and_is_free_again() -> None:
    pool = of_blocks(3)
    first, second = blocks_of(pool, start(0, 1))
    assert first != second
    pool.on_event(finished(1, str(second)))
    assert pool.finished() == (str(second),)
    pool.on_event(failed(0))
    assert pool.describe() == "2 blocks free, 0 being written, 1 finished"
    pool.release((str(second), ""))
    assert pool.describe() == "3 blocks free, 0 being written, 0 finished"


class Reader:
    """Copies a block when it is told to, and notes whether main had to tell it."""

    def __init__(self, *pending: int) -> None:
        self.pending, self.copied_now = set(pending), list[int]()

    def is_pending(self, block: int) -> bool:
        return block in self.pending

    def copy_now(self, block: int) -> None:
        if block in self.pending:
            self.pending.remove(block)
            self.copied_now.append(block)


def test_a_released_block_is_given_out_only_after_its_reader_has_copied_it() -> None:
    pool = of_blocks(3)
    for number, block in enumerate(blocks_of(pool, start(0, 1, 2))):
        pool.on_event(finished(number, str(block)))
    reader = Reader(0, 1, 2)
    pool.hand_over(reader)
    reader.pending.discard(0)
    pool.release(("0", "1", "2"))
    assert pool.describe() == "3 blocks free, 0 being written, 0 finished"
    assert blocks_of(pool, start(3)) == [0], "the one that is copied goes first"
    assert reader.copied_now == []
    reader.pending.discard(1)
    assert sorted(blocks_of(pool, start(4, 5))) == [1, 2]
    assert reader.copied_now == [2], "1 had been copied meanwhile"
    assert not reader.pending


def test_what_an_earlier_reader_holds_is_free_when_the_next_one_comes() -> None:
    pool = of_blocks(2)
    for number, block in enumerate(blocks_of(pool, start(0, 1))):
        pool.on_event(finished(number, str(block)))
    first = Reader(0)
    pool.hand_over(first)
    pool.release(("0",))
    pool.hand_over(Reader(1))
    assert first.copied_now == [0]
    assert blocks_of(pool, start(2)) == [0]


def test_an_evaluations_block_is_free_when_its_episode_ends() -> None:
    pool = of_blocks(1)
    blocks_of(pool, start(-1))
    pool.on_event(finished(-1, ""))
    assert blocks_of(pool, start(4)) == [0]


def testattempts_of_a_ticket_are_told_apart() -> None:
    pool = of_blocks(2)
    (old,) = blocks_of(pool, start(5))
    (new,) = blocks_of(pool, start(5, attempt=2))  # the first was cancelled, and its simulator has not answered yet
    pool.on_event(failed(5))
    pool.on_event(finished(5, str(new), attempt=2))
    assert pool.finished() == (str(new),)
    assert blocks_of(pool, start(6)) == [old]


def test_what_a_lost_simulator_wrote_is_free_and_what_it_finished_is_not() -> None:
    pool = of_blocks(4)
    kept, _ = blocks_of(pool, start(0, 1))
    (other,) = blocks_of(pool, start(2, simulator="t"))
    pool.on_event(finished(0, str(kept)))
    pool.lose("s")
    assert pool.describe() == "2 blocks free, 1 being written, 1 finished"
    pool.on_event(finished(2, str(other), simulator="t"))
    assert set(pool.finished()) == {str(kept), str(other)}


def test_a_resumed_run_begins_with_the_blocks_that_hold_samples() -> None:
    pool = of_blocks(4)
    pool.restore(("2", "0"))
    assert pool.finished() == ("0", "2")
    assert sorted(blocks_of(pool, start(7, 8))) == [1, 3]
    pool.release(("0", "2"))
    assert pool.describe() == "2 blocks free, 2 being written, 0 finished"


def test_mistakes_of_ours_are_noticed() -> None:
    pool = of_blocks(1)
    (block,) = blocks_of(pool, start(0))
    with pytest.raises(AssertionError, match="no free block: 0 blocks free, 1 being written, 0 finished"):
        blocks_of(pool, start(1))
    with pytest.raises(KeyError):
        pool.release((str(block),))
    with pytest.raises(AssertionError, match=f"sample 0 should lie in {block}, not in 7"):
        pool.on_event(finished(0, "7"))


class Ownership(RuleBasedStateMachine):
    """Anything that may be told a pool, in any order; every block is free, written or finished, never two of them."""

    running = Bundle("running")
    samples = Bundle("samples")

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.count, self.number = of_blocks(12), 12, 0
        self.lost: set[int] = set()

    @precondition(lambda self: len(in_use(self.pool)) < self.count)
    @rule(target=running, simulator=st.sampled_from("st"))
    def begin(self, simulator: str) -> tuple[int, str, int]:
        self.number += 1
        (block,) = blocks_of(self.pool, start(self.number, simulator=simulator))
        return self.number, simulator, block

    @rule(target=samples, running=consumes(running))
    def finish(self, running: tuple[int, str, int]) -> str:
        number, simulator, block = running
        if number in self.lost:
            return ""
        self.pool.on_event(finished(number, str(block), simulator=simulator))
        return str(block)

    @rule(running=consumes(running))
    def fail(self, running: tuple[int, str, int]) -> None:
        if running[0] not in self.lost:
            self.pool.on_event(failed(running[0]))

    @rule(simulator=st.sampled_from("st"))
    def lose(self, simulator: str) -> None:
        self.lost |= {number for (number, _), one in self.pool.attempts.items() if one.station == simulator}
        self.pool.lose(simulator)

    @rule(sample=consumes(samples))
    def release(self, sample: str) -> None:
        self.pool.release((sample,))

    @rule()
    def resume(self) -> None:
        """The run is saved, and goes on with another pool; what ran is lost."""
        self.lost |= {number for number, _ in self.pool.attempts}
        payload_ids, self.pool = self.pool.finished(), of_blocks(self.count)
        self.pool.restore(payload_ids)

    @invariant()
    def every_block_has_one_owner(self) -> None:
        blocks = in_use(self.pool)
        assert len(set(blocks)) == len(blocks)
        assert set(blocks) <= set(range(self.count))
        assert self.pool.describe().startswith(f"{self.count - len(blocks)} blocks free")


TestOwnership = Ownership.TestCase
TestOwnership.settings = settings(max_examples=50, stateful_step_count=40, suppress_health_check=list(HealthCheck))


# ---------------------------------------------------------------- enough blocks


class Listening:
    """A conductor whose events and commands pass by a pool, as they do at a launcher; `most`: blocks in use at once."""

    def __init__(self, conductor: AnyConductor, count: int) -> None:
        self.conductor, self.pool, self.count, self.most = conductor, of_blocks(count), count, 0
        self._blocks: dict[tuple[int, int], int] = {}
        self._handles: dict[str, str] = {}

    def handle(self, event: Event, now: float) -> list[Command]:
        refused = self.conductor.stations.refused
        commands = self.conductor.handle(event, now)
        if self.conductor.stations.refused == refused:
            self._hear(event)
        for command in commands:
            if isinstance(command, StartRows):
                tickets = [(grant.ticket.number, grant.ticket.attempt) for grant in command.grants]
                self._blocks |= dict(zip(tickets, blocks_of(self.pool, command), strict=True))
            elif isinstance(command, ReleasePayloads):
                self.pool.release([self._handles.pop(payload_id) for payload_id in command.payload_ids])
        self.most = max(self.most, len(in_use(self.pool)))
        return commands

    def _hear(self, event: Event) -> None:
        if isinstance(event, SampleFinished):
            block = str(self._blocks.pop((event.ticket, event.attempt)))
            self._handles[event.payload_id] = block
            self.pool.on_event(replace(event, payload_id=block))
        elif isinstance(event, StationLost):
            self.pool.lose(event.station)
        elif isinstance(event, SimulatorJoined):
            self.pool.lose(event.simulator)
        else:
            self.pool.on_event(event)

    def deadline(self) -> float:
        return self.conductor.deadline()

    def payload_ids(self) -> set[str]:
        """What the simulated stations call the finished blocks."""
        blocks = set(self.pool.finished())
        return {payload_id for payload_id, block in self._handles.items() if block in blocks}


def listening(cluster_settings: ClusterSettings) -> tuple[VirtualCluster, Listening]:
    scheduler = cluster_settings.scheduler
    rows = sum(group.count * group.env_batches * group.slots * group.rows for group in cluster_settings.simulators)
    spare = {"group_size": scheduler.group_size, "extra_groups": scheduler.extra_groups}
    count = blocks_needed(rows, scheduler.version_samples, scheduler.max_lag, **spare)
    decider = Listening(build_conductor(scheduler), count)
    return VirtualCluster(cluster_settings, decider), decider


randoms = st.randoms(use_true_random=False)
examples = settings(max_examples=75, deadline=None, suppress_health_check=list(HealthCheck))


@examples
@given(randoms)
def test_blocks_suffice_whatever_goes_wrong_and_none_is_left(rng: random.Random) -> None:
    cluster_settings = arbitrary_cluster(rng)
    cluster, decider = listening(cluster_settings)
    cluster.run()
    assert cluster.driver.reached >= cluster_settings.versions
    rollout = decider.conductor.rollout
    held = {sample.payload_id for sample in rollout.samples.values() if sample.payload_id}
    assert decider.payload_ids() == held, "what the conductor does not hold is free"
    if all(fault.station != "trainer" for fault in cluster_settings.faults):  # a rollback leaves samples that are late
        assert held == set()
        assert decider.pool.attempts.keys() <= rollout.cancelling.keys(), "what a simulator has not answered yet"


@settings(examples, max_examples=50)
@given(randoms)
def test_blocks_suffice_for_an_evaluation_while_samples_wait(rng: random.Random) -> None:
    cluster, decider = listening(arbitrary_cluster(rng))
    episodes = tuple(Episode(task=0, instruction=0, seed=seed, greedy=True) for seed in range(rng.randint(1, 12)))
    cluster.driver.clock.at(rng.choice((0.0, 0.03, 0.08, 0.15)), cluster.driver.submit, Evaluate("first", episodes))
    cluster.run()
    assert decider.pool.describe()


def test_a_slow_trainer_and_a_large_lag_use_many_of_them() -> None:
    """While it trains the first batch, two more wait: all that admission lets be ahead."""
    cluster_settings = ClusterSettings.model_validate(
        {
            "versions": 6,
            "scheduler": {"batch_size": 8, "max_lag": 2.0},
            "simulators": [{"slots": 4, "step": "1ms", "steps": 3}],
            "generators": [{"serve": "1ms"}],
            "trainer": {"update": "10s", "publish": "1ms"},
        }
    )
    cluster, decider = listening(cluster_settings)
    cluster.run()
    assert decider.count == 4 + 3 * 8
    assert decider.most == 3 * 8
