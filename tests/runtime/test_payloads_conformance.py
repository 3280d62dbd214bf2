"""What every implementation of `Payloads` must do; a new one is added to `payloads` and has to pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.plugins.cluster.served import served
from tests.runtime.arenas import layout_like
from tests.stations.counting import ticket
from tests.training.toy import ToyPolicy, collect

from polyrhythm.plugins.cluster.hosts.directory import HostedPayloads
from polyrhythm.plugins.cluster.hosts.memory import OtherHosts
from polyrhythm.runtime.launcher import ArenaPayloads
from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder, open_segment
from polyrhythm.scheduler import records as r
from polyrhythm.specs import Trajectory

(SAMPLE,) = collect(ToyPolicy(), (3,))
LAYOUT = layout_like(SAMPLE, blocks=4, steps=5)


@pytest.fixture(params=["in memory", "shared", "another host"])
def both(request: Any, tmp_path: Path) -> Iterator[tuple[ArenaPayloads, Arena]]:
    """Payloads, and the arena as a station of the same host, or of another, has it."""
    if request.param == "in memory":
        payloads = ArenaPayloads.in_memory(LAYOUT)
        yield payloads, payloads.arena
        return
    if request.param == "another host":
        own, far = bytearray(LAYOUT.nbytes), bytearray(LAYOUT.nbytes)
        ends = {"main": served(tmp_path, Arena(LAYOUT, own), host="main"), "b": served(tmp_path, Arena(LAYOUT, far))}
        arena = Arena(LAYOUT, own, OtherHosts(LAYOUT, "main", {}, {"b": ends["b"]}))
        station = Arena(LAYOUT, far, OtherHosts(LAYOUT, "b", {}, {"main": ends["main"]}))
        yield HostedPayloads(arena, "main", Hosts(), InFlight(arena.layout)), station
        return
    folder = SharedRunFolder({"arena": LAYOUT.nbytes}, tmp_path)
    try:
        payloads = ArenaPayloads(InFlight(LAYOUT), memoryview(folder.segment("arena")))
        yield payloads, Arena(LAYOUT, memoryview(open_segment(folder.folder, "arena")))
    finally:
        folder.remove()


class Hosts:
    """All simulators are on main's host."""

    lost = frozenset[str]()

    def host_of(self, station: str) -> str:
        return "main"


def start(count: int, first: int = 0) -> r.StartRows:
    return r.StartRows("s", "slot", tuple(r.Grant(row, ticket(first + row, 9)) for row in range(count)))


def blocks_of(payloads: ArenaPayloads, command: r.StartRows) -> list[int]:
    """The blocks that the command's grants get, in order."""
    return [grant.block for grant in payloads.assign(command).grants]


def finished(number: int, block: int) -> r.SampleFinished:
    return r.SampleFinished("s", 0, number, 1, str(block), r.SampleEnd.TERMINATED, 3, 3, 0, 0, True, 1.0)


def read_at(station: Arena, payloads: ArenaPayloads, payload_id: str) -> Trajectory:
    """As a trainer that was told of the sample reads it."""
    (name,) = payloads.locate([payload_id])
    assert station.holds(name, SAMPLE.ticket)
    return station.read(name)


def test_a_sample_is_read_where_it_was_written(both: tuple[ArenaPayloads, Arena]) -> None:
    payloads, station = both
    payloads.put("2", SAMPLE)
    for read in (payloads.read("2"), read_at(station, payloads, "2")):
        assert (read.steps, read.ticket) == (3, SAMPLE.ticket)
        for name, array in SAMPLE.obs.items():
            np.testing.assert_array_equal(read.obs[name], array)
        np.testing.assert_array_equal(read.actions, SAMPLE.actions)
    payloads.arena.rewards[:] = 7.5
    for read, arena in ((payloads.read("2"), payloads.arena), (read_at(station, payloads, "2"), station)):
        assert (read.rewards == 7.5).all()
        assert np.shares_memory(read.rewards, arena.rewards), "read in place, not copied"


def test_a_block_has_one_owner_until_it_is_released(both: tuple[ArenaPayloads, Arena]) -> None:
    payloads, _ = both
    first = blocks_of(payloads, start(3))
    assert len(set(first)) == 3
    payloads.on_event(finished(0, first[0]))
    payloads.on_event(r.SampleFailed("s", 0, 1, 1, r.DropReason.ENVIRONMENT_RAISED, "fell over"))
    second = blocks_of(payloads, start(2, first=10))
    assert not set(second) & {first[0], first[2]}, "finished and written blocks are not given out"
    payloads.release([str(first[0])])
    assert blocks_of(payloads, start(1, first=20)) == [first[0]]
    with pytest.raises(KeyError):
        payloads.release([str(first[0])])


def test_blocks_of_a_lost_station_are_free_and_its_finished_samples_stay(both: tuple[ArenaPayloads, Arena]) -> None:
    payloads, _ = both
    blocks = blocks_of(payloads, start(4))
    payloads.on_event(finished(0, blocks[0]))
    payloads.on_event(r.StationLost("s", 0, "killed"))
    assert set(blocks_of(payloads, start(3, first=10))) == set(blocks[1:])
    assert payloads.in_flight.finished() == (str(blocks[0]),)


@pytest.mark.parametrize(
    ("payload_id", "words"),
    [("node-7/1", "lies on host node-7, which this process cannot read"), ("4", "no such block"), ("", "no such")],
)
def test_a_sample_that_is_not_here_is_an_error_that_says_where(
    payload_id: str, words: str, both: tuple[ArenaPayloads, Arena]
) -> None:
    for holder in both:
        with pytest.raises(LookupError, match=words):
            holder.read(payload_id)
    assert not both[1].holds(payload_id, 4)
