"""The newest published weights in the trainer's device memory, which generators open by CUDA IPC: one on the same
device copies from there into its module (way ipc), one on another device from device to device (way peer). Of a
simulated device the memory is a file in the run's folder; a generator in the trainer's process has the memory itself
(way reference). All else is the same.

Every publication goes to the host's shared memory too (`SharedWeights`), which main and stations elsewhere read and
which says what the newest version is. The trainer keeps one more copy, of the newest version, on its device:

    <folder>/weights.device         the publication that is there (version, number), then the handle of the memory
    <folder>/weights.device.*.lock  the copy's lock, and the lock that the trainer holds while it lives

Invariants: the copy is written under an exclusive lock and read under a shared one, until reading has ended on the
device; the file names a publication only while its copy is whole. A reader never waits for the device: what is not
there, or is being overwritten, or whose writer is dead, it gets from the host. The trainer waits for a reader for one
copy at most. A new trainer removes the file before it holds the writer's lock and makes another, so nobody reads memory
of a trainer that is dead.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from polyrhythm.errors import first_line
from polyrhythm.runtime.devices import CPU, is_simulated
from polyrhythm.runtime.memory.published import Way, hold_lock, is_held, lock_file
from polyrhythm.runtime.memory.tensors import Copy, Device, State, Stream, copy_into, copy_tensor, fitting, views_of
from polyrhythm.runtime.memory.weights import NOTHING, Fetched, Publication, SharedWeights


class CudaHandles:
    """Shares memory of `device`, the trainer's, between processes by CUDA IPC, as `torch.multiprocessing` does: all
    processes see the same devices under the same numbers. A process on another device opens the memory where it is,
    which costs it a CUDA context there. name: of the device in the run; means: how memory is shared, for the log."""

    means = "CUDA IPC"

    def __init__(self, device: str, name: str = "") -> None:
        self.device, self.name = torch.device(device), name or device

    def allocate(self, size: int) -> Tensor:
        """Bytes that can be exported."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def export(self, memory: Tensor) -> bytes:
        """The handle by which another process opens the memory. RuntimeError: it cannot be shared."""
        return msgspec.msgpack.encode(list(memory.untyped_storage()._share_cuda_()))

    def open(self, handle: bytes, *, here: bool = False) -> Tensor:
        """The memory that another process exported. RuntimeError: it cannot be opened. here: it is on this process's
        device, which may have another number for a process that is bound to it."""
        torch.cuda.init()
        fields = msgspec.msgpack.decode(handle)
        if here:
            fields[0] = self.device.index
        storage = torch.UntypedStorage._new_shared_cuda(*fields)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def release(self, handle: bytes) -> None:
        """Count the handle, of memory of this process, as opened and closed. Torch keeps exported memory until
        then, and CUDA does not open it where it was exported."""
        *_, counters, counter, _, _ = msgspec.msgpack.decode(handle)
        torch.UntypedStorage._release_ipc_counter_cuda(counters, counter)

    def wait(self) -> None:
        """Until the copies of this thread have ended on the device."""
        torch.cuda.current_stream(self.device).synchronize()


class SimulatedHandles:
    """The same for a simulated device: its memory is that of files in the run's folder."""

    means = "a file of the run, as the device is simulated"

    def __init__(self, folder: Path, name: str = "sim:0") -> None:
        self.device, self.folder, self.name = torch.device("cpu"), folder, name
        self._files: dict[int, Path] = {}

    def allocate(self, size: int) -> Tensor:
        for left in self.folder.glob("device-*"):  # by a trainer that died: who has mapped it keeps it
            left.unlink()
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix="device-", delete=False) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)  # so that no later write fails
            except OSError as error:
                Path(file.name).unlink()
                raise RuntimeError(f"{size} bytes in {self.folder}: {error.strerror}") from error
        memory = self._map(Path(file.name))
        self._files[memory.data_ptr()] = Path(file.name)
        return memory

    def export(self, memory: Tensor) -> bytes:
        return str(self._files[memory.data_ptr()]).encode()

    def open(self, handle: bytes, *, here: bool = False) -> Tensor:  # noqa: ARG002 - as of `CudaHandles`
        return self._map(Path(handle.decode()))

    def release(self, handle: bytes) -> None: ...

    def wait(self) -> None: ...

    def _map(self, path: Path) -> Tensor:
        with path.open("r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


class OwnHandles:
    """The same within one process: the memory itself, which CUDA does not open where it was exported."""

    means = "one process"
    _exported: ClassVar[dict[bytes, Tensor]] = {}

    def __init__(self, device: str, name: str) -> None:
        self.device, self.name = torch.device(device), name

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def export(self, memory: Tensor) -> bytes:
        handle = str(memory.data_ptr()).encode()
        self._exported[handle] = memory
        return handle

    def open(self, handle: bytes, *, here: bool = False) -> Tensor:  # noqa: ARG002 - as of `CudaHandles`
        if handle not in self._exported:
            raise RuntimeError("it is not this process's")
        return self._exported[handle]

    def release(self, handle: bytes) -> None: ...

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


Handles = CudaHandles | SimulatedHandles | OwnHandles


def handles_of(device: str, folder: Path, local: str = "", *, one_process: bool = False) -> Handles:
    """Of a device of the run. local: its name for torch, where that differs; folder: of the run; one_process: all that
    use the memory are in this process."""
    if one_process:
        return OwnHandles(CPU if is_simulated(device) else local or device, device)
    return SimulatedHandles(folder, device) if is_simulated(device) else CudaHandles(local or device, device)


def can_reach(device: str, other: str) -> bool:
    """Whether the first device, by torch's name, can read the memory of the second (NVLink, or PCIe where the system
    allows it)."""
    if is_simulated(device):
        return True
    return torch.cuda.can_device_access_peer(torch.device(device), torch.device(other))


log = logging.getLogger(__name__)

_NAME = "weights.device"
_PUBLICATION = 2 * 8


class _DeviceCopy:
    """A copy on a device, and the file that names it. state: the layout's tensors."""

    def __init__(self, path: Path, state: State) -> None:
        with path.open("r+b") as file:
            self.inode = os.fstat(file.fileno()).st_ino
            # The version is stored plus one, as in `SharedWeights`.
            self._held = np.frombuffer(mmap.mmap(file.fileno(), _PUBLICATION), np.int64)
        self.state = state

    def holds(self, publication: Publication) -> bool:
        return tuple(self._held.tolist()) == (publication.version + 1, publication.number)

    def name(self, publication: Publication) -> None:
        """Say what is there; `NOTHING` while it is being overwritten."""
        self._held[:] = publication.version + 1, publication.number


class DeviceWeights:
    """The `Weights` of a process that shares the trainer's device memory. The trainer's process is the one that
    publishes.

    host: its end of the channel in shared memory; folder: of the run; handles: of the trainer's device; way: ipc, peer
    or reference, how this process reads; keeps: whether the trainer keeps a copy, because a generator reads it.
    """

    fetches, shared = False, None

    def __init__(
        self, host: SharedWeights, folder: Path, handles: Handles, way: Way = "ipc", *, keeps: bool = True
    ) -> None:
        self.layout, self.traffic, self.held = host.layout, host.traffic, host.held
        self._host, self._handles, self._way, self._keeps = host, handles, way, keeps
        self._path = folder / _NAME
        self._copy: _DeviceCopy | None = None
        self._writes = False
        self._given_up = 0  # the inode of a file that this process could not use

    @property
    def newest(self) -> int:
        return self._host.newest

    def find(self, version: int) -> Publication | None:
        return self._host.find(version)

    def read(self, version: int | None = None) -> tuple[int, State]:
        return self._host.read(version)

    # ------------------------------------------------------------ the writer

    def publish(self, version: int, state: State | Stream) -> None:
        """As in `Weights`: to the host and to the device, tensor by tensor, unless the device cannot be shared."""
        tensors = fitting(self.layout, state)
        own = self._own_copy()
        if own is None:
            self._host.publish(version, tensors)
            return
        with lock_file(self._lock_path("copy"), fcntl.LOCK_EX):
            own.name(NOTHING)
            self._host.publish(version, _copied(tensors, own.state))
            self._handles.wait()
            own.name(self._host.find(version) or NOTHING)

    def _own_copy(self) -> _DeviceCopy | None:
        """The copy that this process writes; None if nobody reads it, or the device's memory cannot be shared."""
        if self._writes or self._given_up or not self._keeps:
            return self._copy
        self._path.unlink(missing_ok=True)
        try:
            memory = self._handles.allocate(self.layout.nbytes)
            handle = self._handles.export(memory)
        except RuntimeError as error:
            self._give_up(-1, "published in host memory alone", error)
            return None
        new = self._path.with_suffix(".new")
        new.write_bytes(bytes(_PUBLICATION) + handle)
        hold_lock(self._lock_path("writer"), self)
        new.replace(self._path)
        self._writes, self._copy = True, _DeviceCopy(self._path, views_of(self.layout, memory))
        log.info("weights are published on %s (%s) and in host memory", self._handles.name, self._handles.means)
        return self._copy

    # ------------------------------------------------------------ a reader

    def lies_on(self, device: Device) -> bool:
        """Whether the trainer shares a copy on this device."""
        return self._way in ("reference", "ipc") and device == self._handles.device and self._open_copy() is not None

    def fetch(self, version: int, into: State, present: Publication = NOTHING, copy: Copy = copy_into) -> Fetched:
        wanted = self._host.find(version) or self._host.find(self._host.newest)
        if wanted is not None and wanted != present:
            with self._reading(wanted) as state:
                if state is not None:
                    copy(into, state)
                    self._handles.wait()
                    return Fetched(wanted, self._way)
        return self._host.fetch(version, into, present, copy)

    @contextmanager
    def _reading(self, publication: Publication) -> Iterator[State | None]:
        """The tensors of the publication, which nobody overwrites meanwhile; None if they cannot be had at once."""
        shared = self._open_copy()
        try:
            file = lock_file(self._lock_path("copy"), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        with file:
            yield shared.state if shared is not None and shared.holds(publication) else None

    def _open_copy(self) -> _DeviceCopy | None:
        """The copy of the living trainer; None: there is none, or this process cannot open it."""
        if not self._writes and not is_held(self._lock_path("writer")):
            self._copy = None
            return None
        try:
            inode = self._path.stat().st_ino
            if inode == self._given_up:
                return None
            if self._copy is None or self._copy.inode != inode:
                memory = self._handles.open(self._path.read_bytes()[_PUBLICATION:])
                self._copy = _DeviceCopy(self._path, views_of(self.layout, memory))
                log.info("weights come from the trainer's memory on %s (%s)", self._handles.name, self._handles.means)
        except FileNotFoundError:
            self._copy = None
            return None
        except RuntimeError as error:
            self._give_up(inode, "read from host memory", error)
            return None
        return self._copy

    def _give_up(self, inode: int, instead: str, error: RuntimeError) -> None:
        self._given_up = inode
        why = first_line(error)
        name, means = self._handles.name, self._handles.means
        log.warning("weights are %s: memory of %s cannot be shared by %s (%s)", instead, name, means, why)

    def _lock_path(self, name: str) -> Path:
        return self._path.with_name(f"{_NAME}.{name}.lock")


def _copied(tensors: Iterator[tuple[str, Tensor]], into: State) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        copy_tensor(into[name], tensor)
        yield name, tensor
        del tensor
