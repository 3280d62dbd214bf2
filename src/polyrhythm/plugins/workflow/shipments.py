"""Tensors on their way between workers of one device, which stay in its memory: by CUDA IPC, or on a simulated device
by a file.

The sender copies the tensors of a value into memory of its own and sends the handle of it. The receiver opens it,
copies each tensor into memory of its own, and removes its token; the sender frees the memory once no token is left.

    <folder>/shipments/OWNER-NUMBER/COPY     token of one receiver; COPY.open while it reads
    <folder>/shipments/OWNER-NUMBER/device-* memory of a simulated device

Invariant: memory of a shipment is written before its handle is sent, and freed after its receivers have read it.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from polyrhythm.plugins.workflow.protocol import OnDevice
from polyrhythm.runtime.transport.drops import UnfitMessage

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from polyrhythm.runtime.memory.device_weights import Handles

log = logging.getLogger(__name__)

FOLDER = "shipments"
_ALIGNMENT = 256
_TOKEN = re.compile(r"[A-Za-z0-9_.-]{1,150}-[0-9]{1,20}/[0-9]{1,9}")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, bytes]).decode


class Shipment:
    """Tensors of one value that go by the memory of their device. offsets in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.tensors: list[tuple[int, Tensor]] = []
        self.nbytes = 0
        self._device = device

    def add(self, tensor: Tensor) -> int | None:
        """Where the tensor will be; None if it is not on the device."""
        if tensor.device != self._device:
            return None
        offset = -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.tensors.append((offset, tensor))
        self.nbytes = offset + tensor.nbytes
        return offset


class Shipping:
    """One worker's end. placed: where the worker is, and which others are there; name: of the device for torch; folder:
    of the run."""

    def __init__(self, placed: OnDevice, name: str, folder: Path, owner: str) -> None:
        self.device, self.beside = placed.device, frozenset(placed.beside)
        self._name, self._folder, self._owner = name, folder / FOLDER, owner
        self._numbers = itertools.count()
        self._sent: dict[Path, Tensor] = {}

    def begin(self) -> Shipment:
        import torch

        return Shipment(torch.device(self._name))

    def send(self, shipment: Shipment, copies: int) -> list[bytes]:
        """Copy the tensors; what the receiver needs to have them, for each of `copies` receivers. Nothing if the device
        lacks memory for them, or cannot share it."""
        from polyrhythm.runtime.memory.tensors import as_bytes

        self.free_received()
        own = self._folder / f"{self._owner}-{next(self._numbers)}"
        own.mkdir(mode=0o700, parents=True)
        try:
            handles = self._handles(own)
            memory = handles.allocate(shipment.nbytes)
            for offset, tensor in shipment.tensors:
                memory[offset : offset + tensor.nbytes].copy_(as_bytes(tensor))
            handles.wait()
            labels = [_encode((f"{own.name}/{copy}", handles.export(memory))) for copy in range(copies)]
            for copy in range(copies):
                (own / str(copy)).touch()
        except RuntimeError as error:
            log.warning("tensors go through host memory: %s cannot share its own (%s)", self.device, error)
            shutil.rmtree(own)
            return []
        self._sent[own] = memory
        return labels

    @contextmanager
    def receive(self, label: bytes | memoryview) -> Iterator[Callable[[int, str, tuple[int, ...]], Tensor]]:
        """A function that gives the tensor at an offset, of a dtype and shape, in memory of this process. LookupError:
        the shipment cannot be had. ValueError: it holds no such tensor. UnfitMessage: the label is damaged."""
        import torch

        from polyrhythm.runtime.memory.tensors import as_bytes

        token, handle = self._read(label)
        handles, taken = self._handles(self._folder), _taken(token)
        try:
            token.rename(taken)
            memory = handles.open(handle)
        except (RuntimeError, OSError, ValueError, TypeError) as error:
            with suppress(FileNotFoundError):
                taken.rename(token)
            raise LookupError(f"{self.device}: what another worker has there cannot be opened ({error})") from error

        def take(offset: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
            size = math.prod(shape) * getattr(torch, dtype).itemsize
            if not 0 <= offset <= offset + size <= len(memory):
                raise ValueError(f"a shipment of {len(memory)} bytes has no {size} at {offset}")
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self._name)
            as_bytes(tensor).copy_(memory[offset : offset + size])
            return tensor

        try:
            yield take
            handles.wait()
        finally:
            taken.unlink(missing_ok=True)

    def drop(self, label: bytes | memoryview) -> None:
        """Nobody will receive this copy of a shipment of this process."""
        token, handle = self._read(label)
        try:
            token.unlink()
            self._handles(self._folder).release(handle)
        except FileNotFoundError:  # somebody has opened it all the same
            _taken(token).unlink(missing_ok=True)
        self.free_received()

    def free_received(self) -> None:
        """Free the memory of shipments that all their receivers have."""
        for own in [own for own in self._sent if all(file.match("device-*") for file in own.iterdir())]:
            del self._sent[own]
            shutil.rmtree(own)

    def _read(self, label: bytes | memoryview) -> tuple[Path, bytes]:
        try:
            token, handle = _decode(label)
        except ValueError as error:
            raise UnfitMessage("undecodable", f"a shipment's label cannot be decoded ({error})") from error
        if not _TOKEN.fullmatch(token):
            raise UnfitMessage("undecodable", f"{token!r} is not a shipment's token")
        return self._folder / token, handle

    def _handles(self, folder: Path) -> Handles:
        from polyrhythm.runtime.memory.device_weights import handles_of

        return handles_of(self.device.rpartition("/")[2], folder, self._name)


def _taken(token: Path) -> Path:
    return token.with_suffix(".open")
