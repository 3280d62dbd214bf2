"""What every implementation of the weights channel promises, whatever is between its two ends."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.conformance.weights import IMPLEMENTATIONS, Module, layout_of, state

from polyrhythm.runtime.memory.published import read_traffic
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.specs import WeightsLayout
from polyrhythm.specs.weights import weight_specs


@pytest.fixture(params=IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())
def connect(request, tmp_path):
    """Makes the two ends of a channel for a layout."""
    return lambda layout: request.param(layout, tmp_path)


@pytest.fixture
def ends(connect):
    return connect(layout_of(Module()))


def publish(writer, *versions):
    for version in versions:
        writer.publish(version, state(version))


def applied(reader, version):
    """Version and values that a new module gets."""
    module = Module(9)
    return Receiver(reader, module).apply(version), module.values()


def test_a_new_channel_is_empty(ends):
    assert ends.writer.newest == ends.reader.newest == -1
    with pytest.raises(AssertionError, match="nothing was published"):
        ends.reader.read()


def test_the_two_newest_versions_can_be_applied(ends):
    publish(ends.writer, 0, 1, 2)
    assert ends.reader.newest == 2
    for version in (1, 2):
        module = Module(9)
        assert Receiver(ends.reader, module).apply(version) == version
        assert module.values() == [version]
    module = Module(9)
    assert Receiver(ends.reader, module).apply(0) == 2, "a version that is gone gives the newest, under its own number"
    assert module.values() == [2]
    number, found = ends.reader.read()
    assert (number, float(found["a"][0, 0])) == (2, 2.0)


def test_a_publication_is_a_copy_and_so_is_what_is_read(ends):
    live = Module(1)
    ends.writer.publish(0, live.state_dict())
    _, read = ends.reader.read()
    with torch.no_grad():
        live.a.add_(1)
    publish(ends.writer, 5, 6)
    assert read["a"].eq(1).all()


def test_a_version_that_the_module_has_is_not_copied_again(ends):
    publish(ends.writer, 3)
    module = Module(9)
    receiver = Receiver(ends.reader, module)
    assert receiver.apply(3) == 3
    with torch.no_grad():
        module.a.fill_(7)
    assert receiver.apply(3) == 3
    assert receiver.apply(2) == 3, "2 is gone, and 3 is there"
    assert module.a.eq(7).all()


def test_a_staged_version_is_applied_whatever_is_published_meanwhile(ends):
    publish(ends.writer, 0)
    module = Module(9)
    receiver = Receiver(ends.reader, module)
    assert receiver.stage(0) == 0
    assert module.values() == [9], "staging leaves the module alone"
    publish(ends.writer, 1, 2, 3)
    assert receiver.apply(0) == 0
    assert module.values() == [0]
    assert receiver.stage(2) == 2
    assert receiver.apply(3) == 3, "another version than the staged one comes straight from the channel"
    assert module.values() == [3]


def test_apply_keeps_every_tensor_at_its_address(ends):
    module = Module(9)
    receiver, addresses = Receiver(ends.reader, module), [x.data_ptr() for x in module.state_dict().values()]
    publish(ends.writer, 0, 1)
    receiver.stage(0)
    receiver.apply(0)
    receiver.apply(1)
    assert [x.data_ptr() for x in module.state_dict().values()] == addresses
    assert module.values() == [1]


def test_a_bfloat16_layout_converts_what_a_float32_trainer_publishes(connect):
    ends = connect(layout_of(Module(dtype=torch.bfloat16)))
    trained = Module(1.001).state_dict()
    ends.writer.publish(0, trained)
    module = Module(9, torch.bfloat16)
    assert Receiver(ends.reader, module).apply(0) == 0
    assert module.a.dtype is torch.bfloat16
    assert torch.equal(module.a, trained["a"].to(torch.bfloat16))
    assert ends.reader.read()[1]["a"].dtype is torch.bfloat16


def test_a_part_of_the_trainers_tensors_can_be_published(connect):
    part = {name: tensor for name, tensor in state(0).items() if name != "b"}
    ends = connect(WeightsLayout.of(weight_specs(part)))
    module = Module(9)
    publish(ends.writer, 4)
    assert Receiver(ends.reader, module).apply(4) == 4
    assert module.a.eq(4).all()
    assert module.b.eq(9).all()


def test_a_version_left_by_a_dead_writer_is_replaced_and_the_one_before_it_stays(ends):
    publish(ends.writer, 3, 4, 5)
    ends.writer.publish(5, state(8))
    for wanted, value in ((4, 4), (5, 8)):
        module = Module(9)
        assert Receiver(ends.reader, module).apply(wanted) == wanted
        assert module.values() == [value]


def test_what_was_staged_or_applied_of_a_version_that_was_replaced_since_is_not_used(ends):
    """A generator may stage, or take in place of one that is gone, a version that its writer never announced."""
    publish(ends.writer, 3, 4, 5)
    modules = Module(9), Module(9)
    staging, applied = (Receiver(ends.reader, module) for module in modules)
    assert staging.stage(5) == applied.apply(5) == 5
    ends.writer.publish(5, state(8))
    assert staging.apply(5) == applied.apply(5) == 5
    assert [module.values() for module in modules] == [[8], [8]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"a": torch.zeros(3, 2)}, r"a is float32 \[3, 2\], the layout has float32 \[2, 3\]"),
        ({"n": torch.tensor(1.0)}, r"n is float32 \[\], the layout has int64 \[\]"),
        ({"b": None}, r"b is missing, the layout has float32 \[\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_what_is_there_stays(ends, change, said):
    publish(ends.writer, 0)
    wrong = {name: tensor for name, tensor in {**state(1), **change}.items() if tensor is not None}
    with pytest.raises(ValueError, match=said):
        ends.writer.publish(1, wrong)
    assert ends.reader.newest == 0
    module = Module(9)
    Receiver(ends.reader, module).apply(0)
    assert module.values() == [0]


def test_a_module_in_another_dtype_than_the_layouts_cannot_receive(ends):
    with pytest.raises(ValueError, match=r"a is bfloat16 \[2, 3\], the layout has float32 \[2, 3\]"):
        Receiver(ends.reader, Module(dtype=torch.bfloat16))


# ------------------------------------------------------------ tensor by tensor


def stream(value, names=("a", "b", "n"), **changes):
    """The tensors of these names, one at a time."""
    tensors = {**state(value), **changes}
    for name in names:
        yield name, tensors[name]


def one_at_a_time(tensors):
    """A stream of which a tensor is gone when the next one comes."""
    for name, tensor in tensors.items():
        own = tensor.clone()
        yield name, own
        own.fill_(77)


def test_a_stream_is_published_tensor_by_tensor(ends):
    publish(ends.writer, 0)
    ends.writer.publish(1, one_at_a_time({"other": torch.zeros(3), **state(1)}))
    for wanted in (0, 1):
        module = Module(9)
        assert Receiver(ends.reader, module).apply(wanted) == wanted
        assert module.values() == [wanted]


@pytest.mark.parametrize("names", [("a", "b", "n"), ("n", "a", "b"), ("other", "b", "n", "a", "other")])
def test_a_stream_is_a_version_whatever_its_order_and_what_else_it_has(ends, names):
    for version in range(3):
        ends.writer.publish(version, stream(version, names, other=torch.full((5,), 77.0)))
    assert [applied(ends.reader, version) for version in (1, 2)] == [(1, [1]), (2, [2])]


def test_of_a_stream_one_tensor_is_held_at_a_time(ends):
    """A sharded trainer makes whole tensors of shards one after another; no rank is to have them all."""
    alive, most = weakref.WeakSet(), []

    def made():
        for name, tensor in state(4).items():
            whole = tensor.clone()
            gc.collect()
            most.append(len(alive))
            alive.add(whole)
            yield name, whole
            del whole

    ends.writer.publish(0, made())
    assert most == [0, 0, 0]
    assert applied(ends.reader, 0) == (0, [4])


def test_a_stream_is_converted_to_the_layouts_dtypes(connect):
    ends = connect(layout_of(Module(dtype=torch.bfloat16)))
    trained = Module(1.001).state_dict()
    ends.writer.publish(0, iter(trained.items()))
    assert torch.equal(ends.reader.read()[1]["a"], trained["a"].to(torch.bfloat16))


BROKEN = [
    (("a", "n"), {}, r"b is missing, the layout has float32 \[\]"),
    ((), {}, r"a is missing"),
    (("a", "b", "a", "n"), {}, r"a is given twice"),
    (("a", "b", "n"), {"n": torch.tensor(1.0)}, r"n is float32 \[\], the layout has int64 \[\]"),
    (("a", "b", "n"), {"b": torch.zeros(2)}, r"b is float32 \[2\], the layout has float32 \[\]"),
]


@pytest.mark.parametrize(("names", "changes", "said"), BROKEN)
def test_a_stream_that_does_not_fit_leaves_the_newest_version_and_the_next_is_published(ends, names, changes, said):
    publish(ends.writer, 0, 1)
    with pytest.raises(ValueError, match=said):
        ends.writer.publish(2, stream(2, names, **changes))
    assert ends.reader.newest == 1
    assert applied(ends.reader, 1) == applied(ends.reader, 2) == (1, [1])
    ends.writer.publish(2, stream(2))
    assert applied(ends.reader, 2) == (2, [2])


def test_a_stream_whose_first_tensor_does_not_fit_leaves_both_versions(ends):
    publish(ends.writer, 0, 1)
    with pytest.raises(ValueError, match="a is float32"):
        ends.writer.publish(2, stream(2, a=torch.zeros(7)))
    assert [applied(ends.reader, version) for version in (0, 1)] == [(0, [0]), (1, [1])]


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_stream_that_breaks_leaves_the_newest_version(ends, after):
    """The error of whatever makes the tensors (a rank that was lost) is the writer's to see."""

    def breaking():
        yield from list(stream(2))[:after]
        raise ConnectionError("a rank is gone")

    publish(ends.writer, 0, 1)
    with pytest.raises(ConnectionError, match="a rank is gone"):
        ends.writer.publish(2, breaking())
    assert ends.reader.newest == 1
    assert applied(ends.reader, 2) == (1, [1])


def test_a_stream_that_breaks_while_it_replaces_a_version_leaves_the_one_before_it(ends):
    publish(ends.writer, 3, 4)
    with pytest.raises(ValueError, match="n is missing"):
        ends.writer.publish(4, stream(8, ("a", "b")))
    ends.writer.publish(4, stream(7))
    assert [applied(ends.reader, version) for version in (3, 4)] == [(3, [3]), (4, [7])]


# ------------------------------------------------------------ what was moved


def test_what_was_published_taken_and_applied_is_counted_once(ends):
    layout, module = ends.writer.layout, Module(9)
    receiver = Receiver(ends.reader, module)
    for version in range(3):
        publish(ends.writer, version)
        receiver.stage(version)
        receiver.apply(version)
    receiver.apply(2)
    with pytest.raises(ValueError, match="missing"):
        ends.writer.publish(3, stream(3, ("a", "b")))
    published = read_traffic(ends.writer.traffic.statistics())
    taken = read_traffic(receiver.traffic.statistics())
    assert list(published) in (["published"], ["shards"])
    assert len(taken) == 2
    for moved in (*published.values(), *taken.values()):
        assert (moved.versions, moved.nbytes) == (3, 3 * layout.nbytes)
        assert moved.gb_per_s == pytest.approx(moved.nbytes / moved.seconds / 1e9)
