"""Nested values on their way: what comes out, what is refused, and that nothing damaged gets through."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.runtime.mutations import mutated_frames

from polyrhythm.errors import StartError
from polyrhythm.plugins.cluster.parcels import KeptParcels, SharedParcels
from polyrhythm.plugins.workflow.channel import Channel
from polyrhythm.plugins.workflow.protocol import Parcel
from polyrhythm.plugins.workflow.values import SMALL, Carrier, pack_whole
from polyrhythm.runtime.transport.drops import UnfitMessage


def channel(name: str, on_device: bool = False) -> Channel:
    return Channel(name, None, on_device)  # type: ignore[arg-type]


def carriers(kind: str, folder: Path) -> tuple[Carrier, Carrier]:
    """A sender and a receiver."""
    if kind == "kept":
        kept = KeptParcels()
        return Carrier(kept, channel), Carrier(kept, channel)
    return Carrier(SharedParcels(folder, "a"), channel), Carrier(SharedParcels(folder, "b"), channel)


both = pytest.mark.parametrize("kind", ["kept", "host"])


def equal(one: Any, other: Any) -> bool:
    """The same types and numbers, bit by bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, Channel):
        return one.channel_name == other.channel_name
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


NUMBERS = hnp.arrays(
    st.sampled_from(["<f4", ">f8", "|b1", "<i8", "|u1", "<U3", "|S2", "<c8", "<M8[ns]", "<f2"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
VALUES = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary(max_size=50)),
        *(NUMBERS, NUMBERS.filter(lambda array: array.ndim == 0).map(lambda array: array[()])),
        st.just(channel("c")),
    ),
    lambda inner: st.one_of(
        *(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)),
        st.dictionaries(st.one_of(st.text(), st.integers(-9, 9)), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(VALUES)
def test_what_comes_out_is_what_went_in(value: Any) -> None:
    sender, receiver = carriers("kept", Path())
    (parcel,) = sender.pack(value, "the value")
    assert equal(receiver.unpack(parcel), value)


TENSORS = {
    "transposed": torch.arange(12.0).reshape(3, 4).T,
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "empty": torch.empty(0, 3, dtype=torch.int64),
    "scalar": torch.tensor(True),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "many": torch.rand(SMALL),
}


@both
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_keep_dtype_shape_and_numbers(kind: str, name: str, tmp_path: Path) -> None:
    sender, receiver = carriers(kind, tmp_path)
    tensor = TENSORS[name]
    (parcel,) = sender.pack({"x": [tensor]}, "the value")
    found = receiver.unpack(parcel)["x"][0]
    assert type(found) is torch.Tensor
    assert not found.requires_grad
    assert torch.equal(found, tensor)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)


def test_a_state_dict_of_torch_comes_as_a_dict(tmp_path: Path) -> None:
    sender, receiver = carriers("host", tmp_path)
    state = torch.nn.Linear(2, 3).state_dict()
    found = receiver.unpack(sender.pack(state, "the value")[0])
    assert type(found) is dict
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    torch.nn.Linear(2, 3).load_state_dict(found)


@both
@pytest.mark.parametrize("size", [10, 100_000])
def test_what_is_received_is_the_receivers_own(kind: str, size: int, tmp_path: Path) -> None:
    """Neither the sender, afterwards, nor another receiver changes it, and it can be written to."""
    sender, receiver = carriers(kind, tmp_path)
    sent = np.zeros(size)
    one, other = sender.pack({"x": sent}, "the value", 2)
    sent[:] = 7
    first = receiver.unpack(one)["x"]
    first[:] = 1
    second = receiver.unpack(other)["x"]
    second += 2
    assert (first.sum(), second.sum()) == (size, 2 * size)


@both
def test_a_parcel_is_taken_once_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    sender, receiver = carriers(kind, tmp_path)
    one, other = sender.pack(np.zeros(SMALL), "the value", 2)
    receiver.unpack(one)
    with pytest.raises(LookupError, match="gone"):
        receiver.unpack(one)
    sender.drop(other)
    with pytest.raises(LookupError, match="gone"):
        receiver.unpack(other)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []
    assert receiver.ways == {"kept" if kind == "kept" else "host": 1}


def test_small_values_go_within_their_message_and_large_ones_do_not(tmp_path: Path) -> None:
    sender, _ = carriers("host", tmp_path)
    (small,), (large,) = sender.pack(np.zeros(100), "x"), sender.pack(np.zeros(100_000), "x")
    assert (small.content != b"", small.name) == (True, "")
    assert (large.content, large.name) == (b"", "a-0")
    assert large.nbytes == (tmp_path / "parcels" / "a-0").stat().st_size


class Mine:
    pass


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"a": [1, Mine()]}, r"the value\['a'\]\[1\]: a .*Mine cannot be sent; send None, numbers"),
        (lambda: 0, "the value: a builtins.function cannot be sent"),
        ({(1, 2): 3}, r"the value: a key of a dict is \(1, 2\)"),
        ({1.5: 3}, "the value: a key of a dict is 1.5"),
        ({None: 3}, "the value: a key of a dict is None"),
        ({False: 3}, "the value: a key of a dict is False"),
        ({0.0: 3}, "the value: a key of a dict is 0.0"),
        ({b"": 3}, "the value: a key of a dict is b''"),
        ({(): 3}, r"the value: a key of a dict is \(\)"),
        (np.array([None]), "the value: an array of dtype object cannot be sent"),
        (np.zeros(2, [("x", "f4")]), r"the value: an array of dtype \[\('x', '<f4'\)\] cannot be sent"),
        (torch.eye(2).to_sparse(), "the value: a tensor of torch.float32, torch.sparse_coo, cannot be sent"),
        (2**64, "the value: an integer in it has more than 64 bits"),
        (LOOP, "the value: it contains itself, or is nested too deeply"),
        ({1, 2}, "the value: a builtins.set cannot be sent"),
    ],
)
def test_what_cannot_be_sent_is_refused_with_its_place(value: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        carriers("kept", Path())[0].pack(value, "the value")


def test_an_item_that_does_not_fit_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    """As the kernel tells it where /dev/shm is full."""
    import errno

    def full(file: int, content: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    sender, _ = carriers("host", tmp_path)
    monkeypatch.setattr("os.write", full)
    with pytest.raises(StartError, match=r"0\.8 MB wanted for one item, .* lower the capacity of channels"):
        sender.pack(np.zeros(100_000), "the item")
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_a_name_reaches_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    _, receiver = carriers("host", tmp_path)
    for name in ("../secret", "", "a/b", "\x00"):
        with pytest.raises(LookupError, match="names no parcel"):
            receiver.unpack(Parcel(1, name=name))
    assert (tmp_path / "secret").exists()


def test_a_damaged_value_is_unfit_or_a_value() -> None:
    value = {"x": np.arange(6.0).reshape(2, 3), "y": (torch.ones(3), [None, "a", b"b"]), 3: np.float32(2)}
    whole = pack_whole(value, "x").content
    _, receiver = carriers("kept", Path())
    outcomes = set()
    for content in (*mutated_frames([whole], 4000, 1), *inner_mutations(value, 4000)):
        if not content:
            continue
        try:
            receiver.unpack(Parcel(len(content), content))
            outcomes.add("a value")
        except UnfitMessage as unfit:
            outcomes.add(unfit.kind)
    assert outcomes == {"a value", "undecodable"}


def inner_mutations(value: Any, count: int) -> Any:
    """The structure of the value damaged, in a frame that is not."""
    from polyrhythm.plugins.cluster import parcels
    from polyrhythm.plugins.workflow import values

    rng, (head, pieces) = random.Random(2), values.encode(value, "x")
    for _ in range(count):
        damaged = bytearray(head)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        yield parcels.pack(bytes(damaged), pieces)
