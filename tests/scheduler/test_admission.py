"""Admission and the choice of an update, with numbers worked out by hand."""

import pytest

from polyrhythm.scheduler.records import Ticket
from polyrhythm.scheduler.samples.admission import Admission, mix, shuffled
from polyrhythm.scheduler.samples.buffer import SampleBuffer
from polyrhythm.scheduler.samples.groups import Group, Sample
from polyrhythm.scheduler.settings import SchedulerSettings
from polyrhythm.specs import hashing


def grant_all(admission: Admission, version: int, samples: dict[int, Sample] | None = None) -> list[Ticket]:
    tickets = []
    while (ticket := admission.next(version, samples or {})) is not None:
        tickets.append(ticket)
    return tickets


@pytest.mark.parametrize(
    ("max_lag", "sync_interval", "version", "granted"),
    [
        (0.0, 1, 0, 4),  # floor((0 + 1 + 0)·4)
        (1.0, 1, 0, 8),
        (0.5, 1, 0, 6),
        (0.3, 1, 0, 5),  # floor(1.3·4) = 5
        (0.1, 10, 0, 44),  # 0.1·40 is 4 although the float product is not exact
        (2.0, 2, 1, 32),  # B = 8: (1 + 1 + 2)·8
    ],
)
def test_tickets_are_granted_up_to_the_limit(max_lag: float, sync_interval: int, version: int, granted: int) -> None:
    admission = Admission(SchedulerSettings(batch_size=4, sync_interval=sync_interval, max_lag=max_lag), target=100)
    tickets = grant_all(admission, version)
    assert [t.number for t in tickets] == list(range(granted))
    assert {t.version for t in tickets} == {version}


def test_no_more_tickets_than_the_target_needs() -> None:
    admission = Admission(SchedulerSettings(batch_size=4, max_lag=9), target=2)
    assert len(grant_all(admission, 0)) == 8


def test_groups_are_admitted_whole_and_share_task_and_seed() -> None:
    settings = SchedulerSettings(batch_size=6, max_lag=0.5, group_size=3, tasks=2)  # limit 9: three groups
    admission = Admission(settings, target=9)
    tickets = grant_all(admission, 0)
    assert [t.group for t in tickets] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [t.task for t in tickets] == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert len({t.seed for t in tickets}) == 3
    assert len({t.noise for t in tickets}) == 9


def test_a_group_begun_is_completed_at_its_own_age_after_a_new_version() -> None:
    settings = SchedulerSettings(batch_size=4, max_lag=0, group_size=4)
    admission = Admission(settings, target=9)
    first = admission.next(0, {})
    assert first is not None
    rest = [admission.next(1, {}) for _ in range(3)]
    assert [t.version for t in rest if t] == [1, 1, 1]
    assert admission.outstanding == {0: 4}


def test_a_lost_ticket_goes_out_before_any_new_one_with_its_number_and_version() -> None:
    admission = Admission(SchedulerSettings(batch_size=2, max_lag=3), target=9)
    ticket = admission.next(0, {})
    assert ticket is not None
    sample = Sample(ticket)
    admission.give_back(sample)
    again = admission.next(1, {0: sample})
    assert again is not None
    assert (again.number, again.version, again.attempt, again.seed) == (0, 0, 2, ticket.seed)
    fresh = admission.next(1, {0: sample})
    assert fresh is not None
    assert (fresh.number, fresh.version) == (1, 1)


def filled(settings: SchedulerSettings, plan: list[tuple[int, int, int]]) -> tuple[Admission, SampleBuffer]:
    """plan: (version, groups outstanding, of which complete)."""
    admission, buffer = Admission(settings, target=99), SampleBuffer(settings)
    for version, outstanding, complete in plan:
        for index in range(outstanding):
            group = Group(admission.next_group, version, settings.group_size)
            admission.next_group += 1
            admission.groups[group.number] = group
            admission.outstanding[version] = admission.outstanding.get(version, 0) + group.size
            if index < complete:
                group.finished = group.size
                buffer.add(group)
    return admission, buffer


def test_younger_samples_may_pass_an_older_one_until_its_deadline_binds() -> None:
    settings = SchedulerSettings(
        batch_size=2, max_lag=1
    )  # B = 2; a sample of version 0 must be among the first 4 consumed
    admission, buffer = filled(settings, [(0, 1, 0), (1, 3, 3)])
    admission.consumed = 1
    assert next(admission.slack()) == (0, 2)  # 4 - 1 - 1: two younger ones may still pass
    chosen = buffer.choose(admission)
    assert chosen is not None
    assert [group.version for group in chosen] == [1, 1]
    admission.consumed = 2
    assert next(admission.slack()) == (0, 1)  # only one may pass now, and an update needs two
    assert buffer.choose(admission) is None


def test_oldest_version_first_within_the_deadlines() -> None:
    admission, buffer = filled(SchedulerSettings(batch_size=3, max_lag=2), [(0, 2, 2), (1, 4, 4)])
    chosen = buffer.choose(admission)
    assert chosen is not None
    assert [group.version for group in chosen] == [0, 0, 1]


def test_bound_mean_takes_samples_as_they_came() -> None:
    admission, buffer = filled(SchedulerSettings(batch_size=2, max_lag=1, bound="mean"), [(0, 1, 0), (1, 3, 3)])
    admission.consumed = 2
    assert buffer.choose(admission) is not None


def test_order_ticket_waits_for_the_lowest_outstanding_group() -> None:
    settings = SchedulerSettings(batch_size=2, max_lag=2, order="ticket")
    admission, buffer = filled(settings, [(0, 4, 0)])
    groups = list(admission.groups.values())
    for group in (groups[1], groups[2]):
        group.finished = 1
        buffer.add(group)
    assert buffer.choose(admission) is None
    groups[0].finished = 1
    buffer.add(groups[0])
    assert buffer.choose(admission) == [groups[0], groups[1]]


def test_groups_pass_only_whole_within_the_slack() -> None:
    settings = SchedulerSettings(batch_size=4, max_lag=0.75, group_size=2)  # limit of version 0: 4 + 3 = 7
    admission, buffer = filled(settings, [(0, 1, 0), (1, 2, 2)])
    admission.consumed = 2  # slack 7 - 2 - 2 = 3: one group of two may pass, two may not
    assert buffer.choose(admission) is None
    admission.consumed = 1
    assert buffer.choose(admission) is not None


def test_mix_is_a_63_bit_hash_that_depends_on_every_part() -> None:
    values = {mix(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(values) == 512
    assert all(0 <= value < 1 << 63 for value in values)
    assert mix(1, 2) != mix(2, 1)
    assert mix(1, -2, 3) == hashing.mix(1, -2, 3)


@pytest.mark.parametrize("count", [*range(1, 40), 64, 65, 1000])
def test_an_epochs_order_has_each_state_once(count: int) -> None:
    orders = [[shuffled(place, count, key) for place in range(count)] for key in range(4)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert count < 6 or len(set(map(tuple, orders))) == 4
    for order in orders:
        stay = sum(place == state for place, state in enumerate(order))
        assert count < 64 or stay < count / 8, "it is shuffled: of a random order one stays on average"


def test_groups_take_the_states_of_their_task_once_an_epoch() -> None:
    settings = SchedulerSettings(batch_size=4, tasks=3, training_states=7, seed=5)
    starts = [Admission(settings).start_of(group) for group in range(3 * 7 * 2)]
    for epoch in (starts[:21], starts[21:]):
        assert sorted((task, seed % 7) for task, seed in epoch) == [(t, s) for t in range(3) for s in range(7)]
    assert [task for task, _ in starts] == [group % 3 for group in range(42)]
    assert len({seed for _, seed in starts}) == 42
    plain = Admission(SchedulerSettings(batch_size=4, tasks=3, seed=5))
    for (_, seed), group in zip(starts, range(42), strict=True):
        assert seed == hashing.seed_in_state(plain.start_of(group)[1], seed % 7, 7)
        assert not seed & hashing.HELD_OUT
