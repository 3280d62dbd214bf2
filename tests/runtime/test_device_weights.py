"""Weights on a device that trainer and generator share, with files in place of CUDA IPC: where a version comes from,
and that nothing is read of a trainer that is dead or in the middle of a publication."""

from __future__ import annotations

import fcntl
import logging

import pytest
import torch
from tests.conformance.weights import HostHandles, Module, fill_host, layout_of, state

from polyrhythm.runtime.memory.device_weights import DeviceWeights
from polyrhythm.runtime.memory.published import lock_file, shared_nbytes
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.runtime.memory.weights import SharedWeights

LAYOUT = layout_of(Module())
CPU = torch.device("cpu")


class Unshared(HostHandles):
    """A device whose memory cannot be exported or opened."""

    def export(self, memory):
        raise RuntimeError("operation not supported\nmore lines")

    open = export


class Successor(HostHandles):
    """The device of a trainer that replaces a dead one: the old file is gone before the new writer has its lock."""

    def export(self, memory):
        assert not self.folder.joinpath("weights.device").exists()
        return super().export(memory)


class Channel:
    """The processes' ends of one channel. marked: the host's copy holds 99 in place of what was published."""

    def __init__(self, folder):
        self.folder, self.memory = folder, bytearray(shared_nbytes(LAYOUT))
        self.host = SharedWeights(LAYOUT, self.memory, folder)
        self.handles = []

    def end(self, handles=HostHandles):
        host = SharedWeights(LAYOUT, memoryview(self.memory), self.folder)
        self.handles.append(handles(self.folder))
        return DeviceWeights(host, self.folder, self.handles[-1])

    @property
    def opened(self):
        """How often memory of a device was opened."""
        return sum(handles.opened for handles in self.handles)

    def mark(self):
        fill_host(self.memory, self.folder, 99)


@pytest.fixture
def channel(tmp_path):
    return Channel(tmp_path)


def applied(reader, version):
    module = Module(7)
    found = Receiver(reader, module).apply(version)
    return found, module.values()


def test_the_newest_version_comes_from_the_device_and_others_from_the_host(channel):
    writer, reader = channel.end(), channel.end()
    assert not reader.lies_on(CPU)
    for version in (3, 4):
        writer.publish(version, state(version))
    channel.mark()
    assert reader.lies_on(CPU)
    assert applied(reader, 4) == (4, [4])
    assert applied(reader, 3) == (3, [99])
    assert applied(reader, 2) == (4, [4])
    assert channel.opened == 1


def test_what_main_publishes_comes_from_the_host(channel):
    writer, reader = channel.end(), channel.end()
    writer.publish(0, state(0))
    channel.host.publish(1, state(1))
    assert applied(reader, 1) == (1, [1])


def test_a_reader_does_not_wait_for_a_publication_and_does_not_read_half_of_one(channel):
    writer, reader = channel.end(), channel.end()
    writer.publish(0, state(0))
    assert applied(reader, 0) == (0, [0])
    channel.mark()
    with lock_file(channel.folder / "weights.device.copy.lock", fcntl.LOCK_EX):
        assert applied(reader, 0) == (0, [99])
    assert applied(reader, 0) == (0, [0])
    with (channel.folder / "weights.device").open("r+b") as file:
        file.write(bytes(16))  # as while it is overwritten: no publication
    assert applied(reader, 0) == (0, [99])


def test_nothing_is_read_from_a_trainer_that_is_dead_and_its_successor_is_opened(channel):
    first, reader = channel.end(), channel.end()
    first.publish(0, state(0))
    assert applied(reader, 0) == (0, [0])
    channel.mark()
    (opened,) = channel.handles[1].mapped
    del first
    assert not reader.lies_on(CPU)
    assert opened() is None, "nobody reads it again, so it is not kept"
    assert applied(reader, 0) == (0, [99])
    second = channel.end(Successor)
    second.publish(1, state(1))
    channel.mark()
    assert applied(reader, 1) == (1, [1])
    assert channel.opened == 2


def test_a_publication_that_was_replaced_is_not_taken_for_its_successor(channel):
    writer, reader = channel.end(), channel.end()
    writer.publish(5, state(5))
    channel.host.publish(5, state(8))
    assert applied(reader, 5) == (5, [8])


@pytest.mark.parametrize("who", ["writer", "reader"])
def test_memory_that_cannot_be_shared_is_warned_about_once_and_the_host_serves(who, channel, caplog):
    writer = channel.end(Unshared if who == "writer" else HostHandles)
    reader = channel.end(Unshared if who == "reader" else HostHandles)
    with caplog.at_level(logging.WARNING):
        for version in (0, 1):
            writer.publish(version, state(version))
            assert applied(reader, version) == (version, [version])
    instead = {"writer": "published in host memory alone", "reader": "read from host memory"}[who]
    how = "a file of the run, as the device is simulated"
    assert [record.getMessage() for record in caplog.records] == [
        f"weights are {instead}: memory of sim:0 cannot be shared by {how} (operation not supported)"
    ]
