"""The weights bus, whatever happens to its writer, and the tensors on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyrhythm.runtime.memory.tensors import apply_state, as_array, as_tensors, nbytes_of, snapshot, tensors_over
from polyrhythm.runtime.memory.weights import WeightsBus, bus_in_memory, bus_nbytes


class Module(torch.nn.Module):
    """A matrix, a number, and a counter; all the same value, so that a torn copy is seen."""

    def __init__(self, value=0):
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((2, 3), float(value)))
        self.b = torch.nn.Parameter(torch.tensor(float(value)))
        self.register_buffer("n", torch.tensor(value))

    def values(self):
        return sorted({float(x) for tensor in self.state_dict().values() for x in tensor.flatten()})


def state(value):
    return Module(value).state_dict()


class SlowReader(WeightsBus):
    """While it copies, the writer goes on: `plan` is the tensors that it still looks at before that, and what happens.

    `apply` looks at every tensor before it copies the first, `read` copies at once.
    """

    plan = (0, None)

    def __init__(self, like, memory):
        super().__init__(like, memory)
        self._buffers = [Watched(buffer, self.look) for buffer in self._buffers]

    def look(self):
        left, happen = self.plan
        self.plan = (left - 1, happen)
        if left == 0 and happen is not None:
            happen()


class Watched(dict):
    def __init__(self, tensors, look):
        super().__init__(tensors)
        self._look = look

    def items(self):
        for pair in super().items():
            self._look()
            yield pair


def buses(reader=WeightsBus):
    """A writer's and a reader's bus over the same memory."""
    memory = bytearray(bus_nbytes(state(0)))
    return WeightsBus(state(0), memory), reader(state(0), memoryview(memory))


def test_new_memory_is_an_empty_bus():
    bus = bus_in_memory(state(0))
    assert bus.newest == -1
    assert bus.versions() == (-1, -1)
    with pytest.raises(AssertionError, match="nothing was published"):
        bus.read()


def test_the_two_newest_versions_can_be_applied():
    writer, reader = buses()
    for version in (0, 1, 2):
        writer.publish(version, state(version))
    assert reader.newest == 2
    for version in (1, 2):
        module = Module(9)
        assert reader.apply(version, module) == version
        assert module.values() == [version]
    module = Module(9)
    assert reader.apply(0, module) == 2, "an overwritten version gives the newest instead, under its own number"
    assert module.values() == [2]
    number, found = reader.read()
    assert (number, found["a"][0, 0]) == (2, 2)


def test_a_published_version_does_not_follow_the_trainer_nor_a_copy_the_bus():
    bus, live = bus_in_memory(state(1)), Module(1)
    bus.publish(0, live.state_dict())
    _, copy = bus.read()
    with torch.no_grad():
        live.a.add_(1)
    bus.publish(1, live.state_dict())
    bus.publish(2, live.state_dict())
    assert copy["a"].eq(1).all()


def test_weights_that_are_there_are_not_copied_again():
    bus, module = bus_in_memory(state(0)), Module(5)
    bus.publish(3, state(3))
    assert bus.apply(3, module, present=3) == 3
    assert module.values() == [5]
    assert bus.apply(2, module, present=3) == 3
    assert module.values() == [5]


def test_a_reader_that_is_overtaken_gets_a_newer_version_whole():
    writer, reader = buses(SlowReader)
    writer.publish(0, state(0))
    writer.publish(1, state(1))
    module = Module(9)

    def overtake():
        assert module.values() == [0, 9], "one tensor is copied"
        writer.publish(2, state(2))

    reader.plan = (4, overtake)
    assert reader.apply(0, module) == 2
    assert module.values() == [2]
    reader.plan = (1, lambda: [writer.publish(version, state(version)) for version in (4, 5)])
    number, found = reader.read()
    assert number == 5
    assert {float(x) for tensor in found.values() for x in tensor.flatten()} == {5}


def test_a_reader_in_the_middle_of_the_other_buffer_is_not_disturbed():
    writer, reader = buses(SlowReader)
    writer.publish(0, state(0))
    writer.publish(1, state(1))
    reader.plan = (4, lambda: writer.publish(2, state(2)))
    module = Module(9)
    assert reader.apply(1, module) == 1
    assert writer.newest == 2
    assert module.values() == [1]


def unfinished(bus, version):
    """Begin to publish, and die after the first tensor."""

    class Killed(Exception):
        pass

    class Dying(dict):
        def items(self):
            first, *_ = super().items()
            yield first
            raise Killed

    with pytest.raises(Killed):
        bus.publish(version, Dying(state(version)))


def test_a_writer_that_dies_in_the_middle_leaves_the_newest_whole():
    writer, reader = buses()
    for version in (0, 1):
        writer.publish(version, state(version))
    unfinished(writer, 2)
    assert reader.versions() == (-1, 1)
    for wanted in (0, 1):
        module = Module(9)
        assert reader.apply(wanted, module) == 1
        assert module.values() == [1]
    assert reader.read()[0] == 1
    successor = WeightsBus(state(0), writer._stored.base)
    successor.publish(2, state(7))
    assert reader.versions() == (2, 1)


def test_a_version_that_nobody_heard_of_is_replaced_and_the_one_before_it_stays():
    writer, reader = buses()
    for version in (3, 4, 5):
        writer.publish(version, state(version))
    writer.publish(5, state(8))  # the writer of the first 5 died before it said so
    assert sorted(reader.versions()) == [4, 5]
    for wanted, value in ((4, 4), (5, 8)):
        module = Module(9)
        assert reader.apply(wanted, module) == wanted
        assert module.values() == [value]


def test_a_successor_that_dies_while_it_replaces_leaves_the_version_before_it():
    writer, reader = buses()
    for version in (4, 5):
        writer.publish(version, state(version))
    unfinished(writer, 5)
    assert reader.newest == 4
    module = Module(9)
    assert reader.apply(5, module) == 4
    assert module.values() == [4]


def test_weights_of_another_form_are_refused_and_what_is_there_stays():
    bus, module = bus_in_memory(state(0)), Module(9)
    bus.publish(0, state(0))
    for wrong in ({**state(1), "a": torch.zeros(3, 2)}, {**state(1), "c": torch.zeros(1)}, {"a": torch.zeros(2, 3)}):
        with pytest.raises(ValueError, match="do not fit the policy"):
            bus.publish(1, wrong)
    assert bus.newest == 0
    assert bus.apply(0, module) == 0
    assert module.values() == [0]


def test_weights_are_applied_whole_or_not_at_all():
    module = torch.nn.Linear(3, 2)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(ValueError, match=r"bias is \(5,\), it should be \(2,\)"):
        apply_state(module, {"weight": torch.zeros(2, 3), "bias": torch.zeros(5)})
    with pytest.raises(ValueError, match="extra"):
        apply_state(module, {**before, "extra": torch.zeros(1)})
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())
    apply_state(module, {"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    assert module.weight.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_over_memory_have_any_shape_and_share_no_byte(dtype):
    like = {
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "cube": torch.ones(3, 5, 7, dtype=dtype),
        "last": torch.ones(2, dtype=dtype),
    }
    memory = bytearray(nbytes_of(like))
    found = tensors_over(like, memoryview(memory))
    snapshot(like, found)
    again = tensors_over(like, memoryview(memory))
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
