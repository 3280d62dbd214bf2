"""Messages between a process that uses an environment and the process in another Python that runs it.

Frames on a socket pair: the content's length in 4 bytes, then one message in MessagePack. A request is answered before
the next one is sent; the process ends with the connection. Observations are written to a shared memory file; `observe`
is answered when they are complete.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.base import EnvTraits
from polyrhythm.specs import ArraySpec, EnvSpec

#: Of these messages, of what environments may be asked, and of `EnvSpec`; both ends must have the same.
VERSION = 9
_LENGTH = struct.Struct("<I")


class Array(msgspec.Struct, frozen=True):
    """An array, whole."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


# ---------------------------------------------------------------- requests


class Open(msgspec.Struct, tag=True, frozen=True):
    """The first request. env: the environment's section as plain data; simulators: number of the run's processes
    that render on this machine, 0 if unknown; computing: device that EGL would draw on beside generators or a trainer,
    "" if there is none. Answered by `EnvOpened`."""

    env: dict[str, Any]
    version: int = VERSION
    simulators: int = 0
    computing: str = ""


class Build(msgspec.Struct, tag=True, frozen=True):
    """Build a batch whose observations are written to the memory file, which is large enough. Answered by `Built`."""

    rows: int


class Rendering(msgspec.Struct, tag=True, frozen=True):
    """Request the settings whose batches can render. Answered by `Renders`."""


class BatchCall(msgspec.Struct, tag=True, frozen=True):
    """A method call for rows. tasks, seeds: for `reset`; actions: for `step`. Answered by `CallReturned`."""

    method: Literal["reset", "step", "observe", "expert_actions", "render", "discard", "texts"]
    rows: tuple[int, ...]
    tasks: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    actions: Array | None = None


# ---------------------------------------------------------------- answers


class EnvOpened(msgspec.Struct, tag=True, frozen=True):
    """env: the section with all its settings; gl: MuJoCo's GL backend, "" if none is chosen."""

    spec: EnvSpec
    env: dict[str, Any]
    gl: str = ""


class Renders(msgspec.Struct, tag=True, frozen=True):
    """env: section of the settings for rendering; None if the environment does not allow it."""

    env: dict[str, Any] | None


class Built(msgspec.Struct, tag=True, frozen=True):
    """The batch is ready."""

    rows: int
    spec: EnvSpec
    traits: EnvTraits


class CallReturned(msgspec.Struct, tag=True, frozen=True):
    """Result of a call. arrays, metrics: of a step, named as in `StepResult`, otherwise `result`; texts: of the row.
    failed: rows that failed while others did not, with their errors; refused: rows of `failed` whose episode is
    refused; warned: warnings that the environment has logged since the last call."""

    arrays: dict[str, Array] = {}
    metrics: dict[str, Array] = {}
    texts: tuple[str, ...] = ()
    failed: dict[int, str] = {}
    refused: tuple[int, ...] = ()
    warned: tuple[str, ...] = ()


class CallRaised(msgspec.Struct, tag=True, frozen=True):
    """The call raised. error: ImportError, or the name of a class of this package, else ""; text: its message, with
    the class name of other errors."""

    error: str
    text: str


Request = Open | Rendering | Build | BatchCall
Reply = EnvOpened | Renders | Built | CallReturned | CallRaised


class EnvLink:
    """One end of the connection. receives: `Request` or `Reply`."""

    def __init__(self, end: socket.socket, receives: Any) -> None:
        self._end, self._decoder = end, msgspec.msgpack.Decoder(receives)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Request | Reply) -> None:
        """OSError: the other end is closed."""
        content = self._encoder.encode(message)
        self._end.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self) -> Any:
        """The next message. EOFError: the other end is closed or sent an invalid message."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        try:
            return self._decoder.decode(self._read(length))
        except msgspec.MsgspecError as error:
            raise EOFError(f"it does not speak as this one does ({error})") from error

    def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        view = memoryview(content)
        while view:
            try:
                count = self._end.recv_into(view)
            except OSError as error:
                raise EOFError(str(error)) from error
            if not count:
                raise EOFError("the connection was closed")
            view = view[count:]
        return content

    def close(self) -> None:
        with suppress(OSError):  # it is closed already
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


def packed(array: NDArray[Any]) -> Array:
    """The array as a message field. TypeError: it contains objects, such as None."""
    if array.dtype.hasobject:
        raise TypeError(f"{array.tolist()!r:.100} is not an array of numbers")
    array = np.ascontiguousarray(array)
    return Array(array.dtype.str, array.shape, array.tobytes())


def unpacked(array: Array) -> NDArray[Any]:
    """The array of a message field, sharing its memory."""
    return np.frombuffer(bytearray(array.data), array.dtype).reshape(array.shape)


def observation_bytes(observation: Mapping[str, ArraySpec], rows: int) -> int:
    """Size in bytes of the file for the observations of `rows` rows; at least 1."""
    return max(1, sum(_size(array, rows) for array in observation.values()))


def map_observations(file: int, observation: Mapping[str, ArraySpec], rows: int) -> dict[str, NDArray[Any]]:
    """The file's arrays [rows,...] by name; each is aligned to 64 bytes."""
    memory, place, arrays = mmap.mmap(file, observation_bytes(observation, rows)), 0, {}
    for name, array in observation.items():
        count = rows * prod(array.shape)
        arrays[name] = np.frombuffer(memory, array.dtype, count, place).reshape(rows, *array.shape)
        place += _size(array, rows)
    return arrays


def _size(array: ArraySpec, rows: int) -> int:
    size = rows * array.nbytes
    return -(-size // 64) * 64


def memory_file() -> int:
    """Create an anonymous memory file; return its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("observations")
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
