"""The watch and the driver catch conductors that break a guarantee, and a replay finds another decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.oracles.guarantees import GuaranteeChecker, Violation
from tests.oracles.replay import first_difference
from tests.plugins.virtual.clustersim.clusters import settings

from polyrhythm.conductors import build_conductor
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.driver import Deadlock, ProtocolError
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler.records import (
    BatchDone,
    Command,
    Event,
    Grant,
    ReleasePayloads,
    RequestArrived,
    Serve,
    StartRows,
    StartUpdate,
)

BUSY = settings(
    scheduler={"batch_size": 8, "max_lag": 2.0, "on_update": "continue", "max_rows": 4, "max_wait_s": 0.004},
    simulators={"slots": 8, "step": "lognormal:10ms:0.8", "steps": 12},
    generators={"count": 2},
    versions=6,
)


class Careless:
    """A conductor whose commands pass through `change`."""

    def __init__(self, scheduler: Any) -> None:
        self.conductor = build_conductor(scheduler)

    def handle(self, event: Event, now: float) -> list[Command]:
        return self.change(self.conductor.handle(event, now))

    def deadline(self) -> float | None:
        return self.conductor.deadline()

    def change(self, commands: list[Command]) -> list[Command]:
        return commands


def drive(careless: Careless, cluster_settings: ClusterSettings = BUSY) -> VirtualCluster:
    cluster = VirtualCluster(cluster_settings, careless)
    watch = GuaranteeChecker(cluster, careless.conductor)
    cluster.run()
    watch.finish()
    return cluster


def test_a_conductor_that_forgets_a_batch_ends_in_deadlock() -> None:
    class Forgets(Careless):
        def change(self, commands: list[Command]) -> list[Command]:
            return [command for command in commands if not isinstance(command, Serve)]

    with pytest.raises((Deadlock, ProtocolError, Violation)):
        drive(Forgets(BUSY.scheduler))


def test_lag_beyond_the_bound_is_seen() -> None:
    strict = BUSY.model_copy(update={"scheduler": replace(BUSY.scheduler, max_lag=0.0)})
    with pytest.raises(Violation, match=r"the lags .* exceed 0"):
        drive(Careless(BUSY.scheduler), strict)


def test_a_batch_clock_that_starts_late_is_seen() -> None:
    hurried = BUSY.model_copy(update={"scheduler": replace(BUSY.scheduler, max_wait_s=0.001)})
    with pytest.raises(Violation, match="idle although"):
        drive(Careless(BUSY.scheduler), hurried)


def test_an_update_on_the_same_samples_again_is_seen() -> None:
    class Repeats(Careless):
        first: StartUpdate | None = None

        def change(self, commands: list[Command]) -> list[Command]:
            for index, command in enumerate(commands):
                if isinstance(command, StartUpdate):
                    self.first = self.first or command
                    first = replace(self.first, update=command.update, version=self.first.version)
                    commands[index] = first
            return [command for command in commands if not isinstance(command, ReleasePayloads)]

    with pytest.raises(Violation, match="trained twice"):
        drive(Repeats(BUSY.scheduler))


def test_a_ticket_for_a_busy_row_is_seen() -> None:
    class Crowds(Careless):
        def change(self, commands: list[Command]) -> list[Command]:
            return [
                replace(command, grants=tuple(Grant(0, grant.ticket) for grant in command.grants))
                if isinstance(command, StartRows)
                else command
                for command in commands
            ]

    two_rows = settings(scheduler={"batch_size": 2}, simulators={"rows": 2})
    with pytest.raises(ProtocolError, match="but works on"):
        drive(Crowds(two_rows.scheduler), two_rows)


def test_a_payload_released_twice_is_seen() -> None:
    class Releases(Careless):
        def change(self, commands: list[Command]) -> list[Command]:
            return commands + [command for command in commands if isinstance(command, ReleasePayloads)]

    with pytest.raises(ProtocolError, match="released twice"):
        drive(Releases(BUSY.scheduler))


GROUPED = BUSY.model_copy(update={"scheduler": replace(BUSY.scheduler, group_size=2)})


def test_a_group_whose_return_is_out_of_bounds_is_seen() -> None:
    strict = GROUPED.model_copy(update={"scheduler": replace(GROUPED.scheduler, min_return=0.6)})
    with pytest.raises(Violation, match=r"group \d+ is lent with a mean return of 0"):
        drive(Careless(GROUPED.scheduler), strict)


def test_half_a_group_is_seen() -> None:
    with pytest.raises(Violation, match="is lent with 1 samples"):
        drive(Careless(BUSY.scheduler), GROUPED)


def test_more_members_than_allowed_are_seen() -> None:
    with pytest.raises(Violation, match="has more than 2 tickets"):
        drive(Careless(replace(GROUPED.scheduler, extra_members=1)), GROUPED)


def test_a_group_without_a_place_is_seen() -> None:
    class Forgets(Careless):
        def change(self, commands: list[Command]) -> list[Command]:
            for group in list(self.conductor.rollout.admission.groups.values())[:1]:
                group.spare = True
            return commands

    with pytest.raises(Violation, match="groups with a place are"):
        drive(Forgets(GROUPED.scheduler), GROUPED)


def test_a_spare_group_that_is_of_no_use_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    redundant = GROUPED.model_copy(update={"scheduler": replace(GROUPED.scheduler, extra_groups=2, max_lag=0.0)})
    monkeypatch.setattr("polyrhythm.scheduler.samples.redundancy.surplus", lambda *_: [])
    with pytest.raises(Violation, match="is complete or of no use"):
        drive(Careless(redundant.scheduler), redundant)


def test_a_request_served_twice_is_seen() -> None:
    class Doubles(Careless):
        def change(self, commands: list[Command]) -> list[Command]:
            return commands + [command for command in commands if isinstance(command, Serve)]

    with pytest.raises(Violation, match="is busy and gets"):
        drive(Doubles(BUSY.scheduler))


def test_a_replay_names_the_first_decision_that_differs() -> None:
    cluster = VirtualCluster(BUSY, record=True)
    cluster.run()
    trace = cluster.driver.steps
    assert first_difference(build_conductor(BUSY.scheduler), trace) is None
    difference = first_difference(build_conductor(replace(BUSY.scheduler, max_rows=3)), trace)
    assert difference is not None
    assert isinstance(difference.event, RequestArrived | BatchDone)
    assert "decided   Serve" in str(difference)
