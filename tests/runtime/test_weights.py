"""Weights in shared memory, whatever happens to the writer and in whatever order a processor stores; and the layout."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.conformance.weights import Module, layout_of, state

from polyrhythm.policies.form import load_published
from polyrhythm.runtime.memory.published import PublishedMemory, shared_nbytes
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.runtime.memory.tensors import as_array, as_tensors, copy_into, tensors_over
from polyrhythm.runtime.memory.weights import SharedWeights
from polyrhythm.specs import WeightsLayout, WeightSpec
from polyrhythm.specs.weights import weight_specs

LAYOUT = layout_of(Module())


class Busy(Exception):
    """Whoever waits for the lock would wait."""


class Impatient(SharedWeights):
    """Raises Busy instead of waiting for a buffer."""

    def lock(self, index, operation):
        try:
            return super().lock(index, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if operation & fcntl.LOCK_NB:
                raise
            raise Busy from None


class Lockless(SharedWeights):
    """A reader that takes no lock: what the order of stores does to it shows that the interleavings are adverse."""

    def lock(self, index, operation):
        return Path(os.devnull).open("rb")


@contextmanager
def locked(writer, index):
    """The buffer as a writer holds it."""
    with writer.lock(index, fcntl.LOCK_EX):
        yield


def ends(folder, reader):
    memory = bytearray(shared_nbytes(LAYOUT))
    return SharedWeights(LAYOUT, memory, folder), reader(LAYOUT, memoryview(memory), folder)


def seen(reader, version):
    """Version and values that a module gets; None if it would wait."""
    module = Module(99)
    try:
        found = Receiver(reader, module).apply(version)
    except Busy:
        return None
    return found, module.values()


def in_every_order(folder, reader):
    """What a reader sees between any two stores of a publication of version 2 over version 0, in every order in which
    a processor may make them visible between lock and unlock."""
    names = ["empty", "a", "b", "n", "full"]
    for order in permutations(names):
        if order.index("full") < order.index("empty"):
            continue  # every processor keeps the order of stores to one place
        memory = bytearray(shared_nbytes(LAYOUT))
        writer, other = SharedWeights(LAYOUT, memory, folder), reader(LAYOUT, memoryview(memory), folder)
        raw = PublishedMemory(LAYOUT, memory, folder)
        writer.publish(0, state(0))
        writer.publish(1, state(1))
        with locked(writer, 0):
            for store in order:
                match store:
                    case "empty":
                        raw.stored[0] = 0
                    case "full":
                        raw.stored[0] = 3
                    case name:
                        tensors_over(LAYOUT, raw.buffers[0])[name].fill_(2)
                yield from (seen(other, version) for version in (0, 1, 2))
        yield seen(other, 2)


def test_no_order_of_stores_gives_a_reader_a_mix_of_versions(tmp_path):
    whole = {(version, (float(version),)) for version in (0, 1, 2)}
    found = [one for one in in_every_order(tmp_path, Impatient) if one is not None]
    assert len(found) > 100
    assert {(version, tuple(values)) for version, values in found} <= whole
    assert (2, [2.0]) in found


def test_a_reader_without_the_lock_would_see_mixed_versions(tmp_path):
    found = [(version, values) for version, values in in_every_order(tmp_path, Lockless)]
    assert any(len(values) > 1 for _, values in found)


def test_a_buffer_that_is_being_read_is_not_overwritten(tmp_path):
    memory = bytearray(shared_nbytes(LAYOUT))
    writer, reader = Impatient(LAYOUT, memory, tmp_path), SharedWeights(LAYOUT, memoryview(memory), tmp_path)
    writer.publish(0, state(0))
    writer.publish(1, state(1))

    def publish_meanwhile(into, tensors):
        with pytest.raises(Busy):
            writer.publish(2, state(2))
        assert (float(tensors["b"]), writer.versions()) == (0.0, (0, 1))

    assert reader.fetch(0, {}, copy=publish_meanwhile).publication.version == 0
    reader.fetch(1, {}, copy=lambda into, tensors: writer.publish(2, state(2)))
    assert writer.versions() == (2, 1)


def test_a_reader_does_not_wait_for_a_writer_that_is_stopped(tmp_path):
    """One that the kernel has stopped just after it locked a buffer; main reads too, and it is main that ends it."""
    writer, reader = ends(tmp_path, Impatient)
    writer.publish(0, state(0))
    writer.publish(1, state(1))
    with locked(writer, 0):
        assert seen(reader, 0) == (1, [1])
        assert seen(reader, 1) == (1, [1])
        assert reader.read()[0] == 1
    with locked(writer, 1):
        assert reader.read()[0] == 0
        assert seen(reader, 1) is None, "0 is older than what it was told of"


class Killed(Exception):
    pass


def die_in_the_middle(weights, version):
    """Begin to publish, and die after the first tensor: the kernel then releases the lock."""

    class Dying(dict):
        def __getitem__(self, name):
            if name == "b" and weights.versions()[0] * weights.versions()[1] < 0:
                raise Killed
            return super().__getitem__(name)

    with pytest.raises(Killed):
        weights.publish(version, Dying(state(version)))


def test_a_writer_that_dies_in_the_middle_leaves_the_newest_whole(tmp_path):
    memory = bytearray(shared_nbytes(LAYOUT))
    writer, reader = (SharedWeights(LAYOUT, memoryview(memory), tmp_path) for _ in range(2))
    for version in (0, 1):
        writer.publish(version, state(version))
    die_in_the_middle(writer, 2)
    assert reader.versions() == (-1, 1)
    assert seen(reader, 0) == seen(reader, 1) == (1, [1])
    successor = SharedWeights(LAYOUT, memory, tmp_path)
    successor.publish(2, state(7))
    assert reader.versions() == (2, 1)
    assert seen(reader, 2) == (2, [7])


def test_a_successor_that_dies_while_it_replaces_leaves_the_version_before_it(tmp_path):
    writer, reader = ends(tmp_path, SharedWeights)
    for version in (4, 5):
        writer.publish(version, state(version))
    die_in_the_middle(writer, 5)
    assert reader.newest == 4
    assert seen(reader, 5) == (4, [4])


def test_a_layout_with_another_content_than_its_checksum_is_refused():
    layout = WeightsLayout.of({"a": WeightSpec((2, 3), "float32"), "b": WeightSpec((), "bfloat16")})
    layout.verify()
    for change in (
        {"nbytes": layout.nbytes + 64},
        {"tensors": layout.tensors[:1]},
        {"tensors": (layout.tensors[0], dataclasses.replace(layout.tensors[1], offset=128))},
        {"tensors": (dataclasses.replace(layout.tensors[0], spec=WeightSpec((2, 3), "int32")), layout.tensors[1])},
    ):
        with pytest.raises(ValueError, match=r"its checksum is .* start every process from the same version"):
            dataclasses.replace(layout, **change).verify()
    with pytest.raises(ValueError, match="dtype = 'float33': unknown; use one of float64"):
        WeightSpec((1,), "float33")


def test_weights_are_applied_whole_or_not_at_all():
    module = torch.nn.Linear(3, 2)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(ValueError, match=r"bias is \(5,\), it should be \(2,\)"):
        load_published(module, {"weight": torch.zeros(2, 3), "bias": torch.zeros(5)})
    with pytest.raises(ValueError, match="extra"):
        load_published(module, {**before, "extra": torch.zeros(1)})
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())
    load_published(module, {"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    assert module.weight.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_over_memory_have_any_shape_and_share_no_byte(dtype):
    like = {
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "cube": torch.ones(3, 5, 7, dtype=dtype),
        "last": torch.ones(2, dtype=dtype),
    }
    layout = WeightsLayout.of(weight_specs(like))
    memory = bytearray(layout.nbytes)
    copy_into(tensors_over(layout, memoryview(memory)), like)
    again = tensors_over(layout, memoryview(memory))
    for name, tensor in like.items():
        assert (again[name].dtype, again[name].shape) == (dtype, tensor.shape)
        assert torch.equal(again[name], tensor)
        assert again[name].data_ptr() % tensor.element_size() == 0


def test_arrays_and_tensors_share_memory_on_the_cpu():
    array = np.zeros(3, np.float32)
    tensor = as_tensors({"x": array}, torch.device("cpu"))["x"]
    tensor[0] = 7
    assert array[0] == 7
    assert as_array(tensor)[0] == 7
    assert as_array(torch.ones(2, dtype=torch.bfloat16)).dtype == np.float32
