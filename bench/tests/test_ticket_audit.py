"""The ticket audit: what it finds in a sequence of decisions, on its own and beside the ledger."""

from __future__ import annotations

import pytest

from polyrhythm.scheduler import records
from polyrhythm.scheduler.records import DropReason
from polyrhythm.scheduler.samples.groups import SampleLedger
from polyrhythm_bench.chaos.ticket_audit import TicketAudit


def ticket(number, attempt=1, version=0):
    return records.Ticket(number, number, 0, 0, 1, 1, version, attempt=attempt)


def grant(*tickets, simulator="s"):
    return records.StartRows(simulator, "e/0", tuple(records.Grant(i, t) for i, t in enumerate(tickets)))


def finished(number, attempt=1, oldest=0):
    return records.SampleFinished(
        "s", 0, number, attempt, "0", records.SampleEnd.TRUNCATED, 1, 1, oldest, oldest, False, 0.0
    )


def lend(*tickets, update=0, version=0, oldest=None):
    return records.StartUpdate("t", update, version, tickets, ("0",) * len(tickets), oldest or (0,) * len(tickets))


def audited(*decisions, max_lag=1.0, bound="sample"):
    """An audit that has seen these: an event, or an event with the commands that follow."""
    audit = TicketAudit(max_lag, bound)
    for decision in (records.TrainerJoined("t", 0, 0), *decisions):
        event, commands = decision if isinstance(decision, tuple) else (decision, [])
        audit.on_decision(0.0, event, commands)
    return audit


WAKE = records.Wake()
UPDATE = records.UpdateDone("t", 0, 0)
LOST_TRAINER = records.StationLost("t", 0, "was killed")


def test_a_ticket_that_goes_its_way_is_no_violation():
    lost = records.StationLost("s", 0, "was killed")
    audit = audited(
        (WAKE, [grant(ticket(0), ticket(1), ticket(2))]),
        finished(0),
        (lost, []),  # 1 and 2 ran in it
        (WAKE, [grant(ticket(1, 2), ticket(2, 2))]),
        records.SampleFailed("s", 1, 2, 2, records.DropReason.ENVIRONMENT_RAISED),
        (WAKE, [grant(ticket(2, 3), ticket(3))]),
        (finished(1, 2, oldest=1), [lend(0, 1, oldest=(0, 1), version=1)]),
        LOST_TRAINER,
        (records.TrainerJoined("t", 1, 0), [lend(0, 1, oldest=(0, 1), version=1)]),
        UPDATE,
    )
    assert audit.violations == []
    assert audit.lag() == {"mean": 0.5, "max": 1, "counts": {"0": 2, "1": 2}}
    audit.settle(SampleLedger(started=4, running=2, trained=2), may_roll_back=False)
    assert audit.violations == []


def test_what_a_lost_trainer_had_trained_after_its_state_is_rolled_back_and_never_lent_again():
    begun = [(WAKE, [grant(ticket(0))]), (finished(0), [lend(0)]), UPDATE, LOST_TRAINER]
    audit = audited(*begun, records.TrainerJoined("t", 1, 0))
    audit.settle(SampleLedger(started=1, rolled_back=1), may_roll_back=False)
    assert audit.violations == []
    kept = audited(*begun, records.TrainerJoined("t", 1, 1))
    kept.settle(SampleLedger(started=1, trained=1), may_roll_back=False)
    assert kept.violations == []
    again = audited(*begun, (records.TrainerJoined("t", 1, 0), [lend(0)]))
    (violation,) = again.violations
    assert "ticket 0 is lent for update 0 while it is rolled_back in update 0" in violation


RUNNING = (WAKE, [grant(ticket(0), ticket(1))])
FINISHED = (RUNNING, finished(0), finished(1))


@pytest.mark.parametrize(
    ("decisions", "words"),
    [
        ((*FINISHED, (WAKE, [lend(0, 0)])), "ticket 0 is lent for update 0 while it is lent"),
        ((*FINISHED, (WAKE, [lend(0)]), (WAKE, [lend(1, update=1)])), "update 1 is lent while the one before"),
        ((*FINISHED, (WAKE, [lend(0)]), (UPDATE, [lend(0, update=1)])), "while it is trained in update 0"),
        ((RUNNING, (finished(0), [lend(1, oldest=(-1,))])), "ticket 1 is lent for update 0 while it is running"),
        ((*FINISHED, (WAKE, [lend(0, 7)])), "ticket 7 is lent for update 0, but was never granted"),
        ((*FINISHED, UPDATE), "update 0 is done, but nothing is lent"),
        ((*FINISHED, (WAKE, [lend(0, version=2)])), "ticket 0 is lent 2 versions late, 1 are allowed"),
        ((*FINISHED, (WAKE, [lend(0, version=1, oldest=(1,))])), "as of version 1, but finished with 0"),
        ((*FINISHED, (WAKE, [grant(ticket(0, 2))])), "attempt 2 of ticket 0 is granted while it is buffered"),
        ((RUNNING, (WAKE, [grant(ticket(1))])), "attempt 1 of ticket 1 is granted while it is running"),
    ],
)
def test_the_audit_finds(decisions, words):
    (violation,) = audited(*decisions).violations
    assert words in violation


@pytest.mark.parametrize(
    ("ledger", "words"),
    [
        ({"started": 2, "running": 1, "buffered": 1}, []),
        ({"started": 3, "running": 2, "buffered": 1}, ["2 tickets were granted, the ledger has 3", "1 tickets are ru"]),
        ({"started": 2, "trained": 1, "running": 1}, ["1 tickets are buffered, the ledger has 0", "0 tickets are tr"]),
        ({"started": 2, "running": 1, "dropped": {DropReason.DEADLINE: 1}}, ["samples were dropped: {'deadline': 1}"]),
        ({"started": 2, "running": 1, "dropped": {DropReason.ROLLBACK: 1}}, []),
    ],
)
def test_the_audit_is_compared_with_the_ledger(ledger, words):
    audit = audited(RUNNING, finished(0))
    audit.settle(SampleLedger(**ledger), may_roll_back=True)
    assert len(audit.violations) == len(words)
    assert all(word in violation for word, violation in zip(words, audit.violations, strict=True))


def test_the_mean_lag_is_bound_where_the_mean_is():
    decisions = (*FINISHED, (WAKE, [lend(0, version=2)]), (UPDATE, [lend(1, update=1)]))
    ledger = SampleLedger(started=2, trained=1, lent=1)
    for max_lag, violations in ((1.0, 0), (0.5, 1)):
        audit = audited(*decisions, max_lag=max_lag, bound="mean")
        audit.settle(ledger, may_roll_back=False)
        assert len(audit.violations) == violations


def test_a_cancelled_attempt_counts_no_more():
    cancel = records.CancelRow("s", "e/0", 0, 1)
    audit = audited(RUNNING, (WAKE, [cancel, grant(ticket(0, 2))]), finished(0, 1), finished(0, 2), (WAKE, [lend(0)]))
    assert audit.violations == []


def test_many_violations_are_counted():
    audit = audited(*[(WAKE, [lend(number)]) for number in range(40)])
    assert len(audit.violations) < 30
    assert "more like these" in audit.violations[-1]


def test_a_sample_of_a_lost_host_runs_again_without_another_attempt():
    """So does what a station had that only moved; a sample that is not lost may not."""
    gone = records.PayloadsLost("host-2", ("0",))
    moved = records.StationLost("s", 0, "moves to node b, which has room", False, moves=True)
    audit = audited(
        (WAKE, [grant(ticket(0), ticket(1))]),
        finished(0),
        gone,
        (WAKE, [grant(ticket(0))]),
        moved,
        (WAKE, [grant(ticket(0), ticket(1))]),
        finished(0),
        (WAKE, [lend(0)]),
        gone,
        UPDATE,
    )
    assert audit.violations == []
    audit = audited((WAKE, [grant(ticket(0))]), finished(0), (WAKE, [grant(ticket(0))]))
    (violation,) = audit.violations
    assert "attempt 1 of ticket 0 is granted while" in violation
