"""Tensors on their way in the memory of a device: what comes out, when it is freed, what damaged labels can do."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch

from polyrhythm.plugins.workflow.protocol import OnDevice
from polyrhythm.plugins.workflow.shipments import Shipping
from polyrhythm.runtime.transport.drops import UnfitMessage

TENSORS = [
    torch.arange(12.0).reshape(3, 4).T,
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.tensor(True),
    torch.tensor([1 + 2j]),
    torch.empty(0, 3),
]


def ends(folder: Path) -> tuple[Shipping, Shipping]:
    return tuple(Shipping(OnDevice("sim:0", (other,), False), "cpu", folder, own) for own, other in ("ab", "ba"))  # type: ignore[return-value]


def ship(sender: Shipping, copies: int = 1) -> tuple[list[int], list[bytes]]:
    shipment = sender.begin()
    offsets = [shipment.add(tensor) for tensor in TENSORS]
    assert None not in offsets
    return offsets, sender.send(shipment, copies)  # type: ignore[return-value]


def left_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_each_receiver_has_its_own_and_the_memory_is_freed_after_the_last(tmp_path: Path) -> None:
    sender, receiver = ends(tmp_path)
    offsets, labels = ship(sender, 2)
    for number, label in enumerate(labels):
        sender.free_received()
        assert len(left_in(tmp_path)) == 3 - number  # the memory, and a token for each who has yet to come
        with receiver.receive(label) as take:
            found = [
                take(offset, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                for offset, tensor in zip(offsets, TENSORS, strict=True)
            ]
        assert all(torch.equal(x, y) for x, y in zip(found, TENSORS, strict=True))
        found[0].zero_()
    sender.free_received()
    assert not left_in(tmp_path)


def test_what_nobody_will_receive_is_freed(tmp_path: Path) -> None:
    sender, _ = ends(tmp_path)
    _, labels = ship(sender)
    sender.drop(labels[0])
    assert not left_in(tmp_path)


def test_what_was_dropped_is_not_received(tmp_path: Path) -> None:
    sender, receiver = ends(tmp_path)
    _, labels = ship(sender)
    with receiver.receive(labels[0]) as take:
        sender.drop(labels[0])
        assert torch.equal(take(0, "float32", (1,)), take(0, "float32", (1,))), "its memory stays as long as it is open"
    with pytest.raises(LookupError), receiver.receive(labels[0]):
        pass
    assert not left_in(tmp_path)


def test_a_receiver_that_fails_leaves_no_memory(tmp_path: Path) -> None:
    sender, receiver = ends(tmp_path)
    for offset, shape in ((10**9, (1,)), (0, (10**6,)), (-4, (1,))):
        _, (label,) = ship(sender)
        with pytest.raises(ValueError, match="a shipment of"), receiver.receive(label) as take:
            take(offset, "float32", shape)
    sender.free_received()
    assert not left_in(tmp_path)
    with (
        pytest.raises(LookupError, match="sim:0: what another worker has there cannot be opened"),
        receiver.receive(label),
    ):
        pass


def test_tensors_of_another_device_do_not_go_along(tmp_path: Path) -> None:
    shipment = ends(tmp_path)[0].begin()
    assert shipment.add(torch.empty(3, device="meta")) is None
    assert shipment.nbytes == 0


def test_a_damaged_label_opens_and_removes_nothing_else(tmp_path: Path) -> None:
    sender, receiver = ends(tmp_path / "run")
    _, (label,) = ship(sender)
    other = tmp_path / "other"
    other.touch()
    for token in ("../../other", "/etc/passwd", "a-0/../../../other", ""):
        with (
            pytest.raises(UnfitMessage, match="not a shipment's token"),
            receiver.receive(msgspec.msgpack.encode((token, b"x"))),
        ):
            pass
    rng = random.Random(1)
    for _ in range(100):
        damaged = bytearray(label)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        try:
            with receiver.receive(bytes(damaged)):
                pass
        except (UnfitMessage, LookupError):
            pass
    assert other.exists()
