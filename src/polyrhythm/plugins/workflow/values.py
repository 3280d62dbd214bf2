"""Encodes nested values as MessagePack and pieces of memory, and transfers them between the processes of a workflow.

A value is None, a bool, a number, text, bytes, a numpy array or scalar, a torch tensor, a `Channel`, or a list, tuple
or dict of such values. The sender refuses everything else and names its position in the value; nothing is pickled. The
received value is equal to the sent one, belongs to the receiver and is writable. An OrderedDict, such as torch's state
dicts, comes as a dict. A tensor comes without its gradient; one from a device goes to the receiver's device.

The way depends on the size, the two ends, and of a channel on its `on_device`:

    message   at most 32 KiB: inside the message itself
    kept      in one process: the buffer is handed over
    host      on one host: a file in shared memory, which the receiver maps; the sender makes one copy
    device    tensors between workers of one device: its memory (`shipments`); the rest of the value as above
    tcp       from another host: pieces of 4 MiB, authenticated and encrypted
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from polyrhythm.plugins.cluster import parcels
from polyrhythm.plugins.cluster.parcels import KeptParcels, Parcels
from polyrhythm.plugins.workflow.protocol import Parcel
from polyrhythm.plugins.workflow.shipments import Shipment, Shipping
from polyrhythm.runtime.transport.drops import UnfitMessage

if TYPE_CHECKING:
    import torch

#: Codes of what MessagePack has no type for.
_TUPLE, _ARRAY, _TENSOR, _CHANNEL, _SHIPPED = range(1, 6)
#: dtypes without Python objects in them, as numpy writes them.
_DTYPE = re.compile(r"[<>|=][biufcSUMm][0-9]{1,5}(\[[0-9a-zA-Z]{1,8}\])?")
_TENSOR_DTYPES = frozenset((
    "bool", "uint8", "int8", "int16", "int32", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
))  # fmt: skip
_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_encode = msgspec.msgpack.Encoder().encode
_Ext = msgspec.msgpack.Ext
#: Of an array or tensor: its piece, dtype, shape; whether it is a scalar, or was on a device.
_decode_array = msgspec.msgpack.Decoder(tuple[int, str, tuple[int, ...], bool]).decode
#: Of a tensor in a shipment: its offset, dtype, shape.
_decode_shipped = msgspec.msgpack.Decoder(tuple[int, str, tuple[int, ...]]).decode
_decode_channel = msgspec.msgpack.Decoder(tuple[str, bool]).decode


class Pieces(list[memoryview]):
    """The memory of a value's arrays and tensors, except of the tensors that go into `shipment`."""

    def __init__(self, shipment: Shipment | None = None) -> None:
        self.shipment = shipment


def encode(value: Any, what: str, shipment: Shipment | None = None) -> tuple[bytes, list[memoryview]]:
    """The structure, and the memory of its arrays and tensors. what: names the value in errors; shipment: is given the
    tensors of its device. TypeError: part of the value cannot be sent."""
    pieces = Pieces(shipment)
    try:
        return _encode(_node(value, what, pieces)), pieces
    except RecursionError:
        raise TypeError(f"{what}: it contains itself, or is nested too deeply") from None
    except OverflowError:
        raise TypeError(f"{what}: an integer in it has more than 64 bits") from None


def _node(value: Any, path: str, pieces: Pieces) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_node(item, f"{path}[{place}]", pieces) for place, item in enumerate(value)]
    if kind is dict or kind is OrderedDict:
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{path}: a key of a dict is {key!r}; keys are text or integers")
        return {key: _node(item, f"{path}[{key!r}]", pieces) for key, item in value.items()}
    if kind is tuple:
        return _Ext(_TUPLE, _encode([_node(item, f"{path}[{place}]", pieces) for place, item in enumerate(value)]))
    if isinstance(value, np.ndarray | np.generic):
        return _array_node(value, path, pieces)
    if kind.__module__.partition(".")[0] == "torch" and hasattr(value, "untyped_storage"):
        return _tensor_node(value, path, pieces)
    if (name := getattr(value, "channel_name", None)) is not None:
        return _Ext(_CHANNEL, _encode((name, value.on_device)))
    raise TypeError(
        f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be sent; send None, numbers, text, bytes, arrays, "
        "tensors, channels, and lists, tuples and dicts of these"
    )


def _array_node(array: Any, path: str, pieces: Pieces) -> msgspec.msgpack.Ext:
    dtype = array.dtype.str
    if not _DTYPE.fullmatch(dtype) or not array.dtype.itemsize:
        raise TypeError(f"{path}: an array of dtype {array.dtype} cannot be sent; convert it to numbers or text")
    pieces.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return _Ext(_ARRAY, _encode((len(pieces) - 1, dtype, array.shape, isinstance(array, np.generic))))


def _tensor_node(tensor: torch.Tensor, path: str, pieces: Pieces) -> msgspec.msgpack.Ext:
    from polyrhythm.runtime.memory.tensors import as_bytes

    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _TENSOR_DTYPES or str(tensor.layout) != "torch.strided":
        raise TypeError(f"{path}: a tensor of {tensor.dtype}, {tensor.layout}, cannot be sent; make it dense numbers")
    held = tensor.detach().resolve_conj().resolve_neg()
    if pieces.shipment is not None and (offset := pieces.shipment.add(held)) is not None:
        return _Ext(_SHIPPED, _encode((offset, dtype, tuple(tensor.shape))))
    held = held.cpu().contiguous()
    pieces.append(as_bytes(held).numpy().data)
    return _Ext(_TENSOR, _encode((len(pieces) - 1, dtype, tuple(tensor.shape), tensor.device.type != "cpu")))


def decode(
    content: bytes,
    pieces: Sequence[memoryview],
    channel: Callable[[str, bool], Any],
    device: str = "cpu",
    shipped: Callable[[int, str, tuple[int, ...]], Any] | None = None,
) -> Any:
    """The value. pieces: memory owned by the receiver; channel: makes a channel by name and `on_device`; device: for
    tensors from devices; shipped: gives the tensors of its shipment. UnfitMessage: the content was not made by
    `encode`."""

    def extension(code: int, data: memoryview) -> Any:
        if code == _TUPLE:
            return tuple(decoder.decode(data))
        if code == _CHANNEL:
            return channel(*_decode_channel(data))
        if code == _SHIPPED:
            offset, dtype, shape = _decode_shipped(data)
            if shipped is None or dtype not in _TENSOR_DTYPES or any(extent < 0 for extent in shape):
                raise ValueError(f"it has no tensor of {dtype!r}, {shape} in a shipment")
            return shipped(offset, dtype, shape)
        index, dtype, shape, flag = _decode_array(data)
        if not 0 <= index < len(pieces) or any(extent < 0 for extent in shape):
            raise ValueError(f"it has no piece {index} of shape {shape}")
        if code == _TENSOR:
            return _tensor(pieces[index], dtype, shape, device if flag else "cpu")
        if code != _ARRAY or not _DTYPE.fullmatch(dtype):
            raise ValueError(f"there are no arrays of {dtype!r}, code {code}")
        array = np.frombuffer(pieces[index], np.dtype(dtype)).reshape(shape)
        return array[()] if flag else array

    decoder = msgspec.msgpack.Decoder(list[Any], ext_hook=extension)
    try:
        return msgspec.msgpack.decode(content, ext_hook=extension)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnfitMessage("undecodable", f"a value of {len(content)} bytes cannot be decoded ({error})") from error


def _tensor(piece: memoryview, dtype: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    import torch

    if dtype not in _TENSOR_DTYPES:
        raise ValueError(f"{dtype!r} is not a dtype of tensors that are sent")
    kind = getattr(torch, dtype)
    if math.prod(shape) * kind.itemsize != len(piece):
        raise ValueError(f"{len(piece)} bytes are no tensor of {dtype}, {shape}")
    tensor = torch.frombuffer(piece, dtype=kind) if len(piece) else torch.empty(0, dtype=kind)
    return tensor.reshape(shape).to(device)


#: Bytes of the largest value that goes within its message.
SMALL = 32 * 2**10
_DECODER = msgspec.msgpack.Decoder(tuple[bytes, tuple[int, ...]])


def pack_whole(value: Any, what: str) -> Parcel:
    """A parcel that contains its bytes, whatever their size. TypeError: the value cannot be sent."""
    content = parcels.pack(*encode(value, what))
    return Parcel(len(content), content)


class Carrier:
    """One process's end. channel: makes a channel of this process by name and `on_device`; device: where received
    tensors go. ways: number of parcels received, by way."""

    def __init__(self, parcels: Parcels, channel: Callable[[str, bool], Any], device: str = "cpu") -> None:
        self.ways: Counter[str] = Counter()
        self._parcels, self._channel, self._device = parcels, channel, device
        self._shipping: Shipping | None = None

    def ship_by(self, shipping: Shipping) -> None:
        """From now on tensors can stay on the device."""
        self._shipping = shipping

    def is_beside(self, worker: str) -> bool:
        """Whether the worker shares this one's device, and its memory."""
        return self._shipping is not None and worker in self._shipping.beside

    def pack(self, value: Any, what: str, copies: int = 1, *, on_device: bool = False) -> list[Parcel]:
        """One parcel of the value for each of `copies` receivers. what: names the value in errors; on_device: all
        receivers share this worker's device. TypeError: it cannot be sent. StartError: it does not fit into shared
        memory."""
        if on_device and self._shipping is not None:
            shipment = self._shipping.begin()
            content, pieces = encode(value, what, shipment)
            if shipment.nbytes > SMALL and (labels := self._shipping.send(shipment, copies)):
                frames = (parcels.parts_of(content, [*pieces, label]) for label in labels)
                return [self._pack(frame, 1, self._shipping.device)[0] for frame in frames]
        return self._pack(parcels.parts_of(*encode(value, what)), copies)

    def _pack(self, parts: list[parcels.Piece], copies: int, device: str = "") -> list[Parcel]:
        nbytes = sum(map(len, parts))
        if nbytes <= SMALL:
            return [Parcel(nbytes, b"".join(parts), device=device)] * copies
        names = self._parcels.keep(parts, copies)
        return [Parcel(nbytes, host=self._parcels.host, name=name, device=device) for name in names]

    def unpack(self, parcel: Parcel) -> Any:
        """The value of a parcel; a parcel can be unpacked once. LookupError: it is gone, or on another device.
        UnfitMessage: it is damaged."""
        if parcel.device and (self._shipping is None or parcel.device != self._shipping.device):
            raise LookupError(
                f"its tensors are in the memory of {parcel.device}, and this process is elsewhere; make the channel "
                "without on_device"
            )
        memory, way = self._take(parcel)
        content, pieces = parcels.unpack(memory, _DECODER)
        if not parcel.device:
            self.ways[way] += 1
            return decode(content, pieces, self._channel, self._device)
        assert self._shipping is not None
        if not pieces:
            raise UnfitMessage("undecodable", f"a parcel from {parcel.device} does not say where its tensors are")
        with self._shipping.receive(pieces.pop()) as shipped:
            self.ways["device"] += 1
            return decode(content, pieces, self._channel, self._device, shipped)

    def _take(self, parcel: Parcel) -> tuple[memoryview, str]:
        if parcel.content:
            return memoryview(bytearray(parcel.content)), "message"
        memory = self._parcels.take(parcel.host, parcel.name, parcel.nbytes)
        way = "host" if parcel.host == self._parcels.host else "tcp"
        return memory, "kept" if isinstance(self._parcels, KeptParcels) else way

    def drop(self, parcel: Parcel) -> None:
        """Free a parcel of this process that nobody will receive."""
        if parcel.device:
            assert self._shipping is not None
            _, pieces = parcels.unpack(self._take(parcel)[0], _DECODER)
            self._shipping.drop(pieces[-1])
        elif not parcel.content:
            self._parcels.drop(parcel.name)

    def free_received(self) -> None:
        """Free memory of the device whose receivers have what was in it."""
        if self._shipping is not None:
            self._shipping.free_received()
