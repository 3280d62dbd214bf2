"""A worker's use of the device that it shares with others: whether it is there, and what it keeps meanwhile elsewhere.

Invariant: between a yield and the next take (`obey`) no method of the worker runs but its `close`.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from polyrhythm.plugins.lease.offload import open_store
from polyrhythm.runtime.messages import OffloadStore
from polyrhythm.scheduler.records import DeviceCommand, TakeDevice, YieldDevice

if TYPE_CHECKING:
    from torch import Tensor

#: Objects that are not searched for tensors.
_OPAQUE = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType),
)


class SwitchFailed(BaseException):
    """`offload` or `onload` of a worker raised; not for the worker's methods to catch."""


class WorkerDevice:
    """name: torch's, of the device; in_turn: whether others may be on it meanwhile; is_on: whether the worker is;
    order: what it was told and has not done yet; locks: `device_lock` bodies that it is in; is_away: whether its
    tensors are off the device."""

    def __init__(self, name: str, *, in_turn: bool) -> None:
        self.name, self.in_turn, self.is_on = name, in_turn, not in_turn
        self.order: DeviceCommand | None = None
        self.locks = 0
        self._store: OffloadStore | None = None
        self.is_away = False
        self._switched, self._switch_s, self._freed = 0, 0.0, 0

    @property
    def must_switch(self) -> bool:
        return isinstance(self.order, TakeDevice) or (self.order is not None and not self.locks)

    def place(self, *, in_turn: bool) -> None:
        """What is known once all workers are placed: whether it really has to share the device in turn."""
        if self.in_turn and not in_turn:
            self.in_turn, self.is_on = False, True

    def accepts(self, command: DeviceCommand) -> bool:
        """Whether the worker can be told this now."""
        return self.order is None and self.is_on == isinstance(command, YieldDevice)

    def obey(self, offload: Callable[[], int], onload: Callable[[], None]) -> tuple[int, float]:
        """Do what it was told, by these functions; the bytes freed, and seconds. SwitchFailed: the function raised."""
        assert self.order is not None, "it was told nothing"
        begin, takes, freed = time.monotonic(), isinstance(self.order, TakeDevice), 0
        try:
            if takes:
                onload()
            else:
                freed = self._freed = int(offload() or 0)
        except Exception as error:
            name = "onload" if takes else "offload"
            raise SwitchFailed(f"{name} raised {type(error).__name__}: {error}") from error
        self.is_on, self.order = takes, None
        seconds = time.monotonic() - begin
        self._switched += 1
        self._switch_s += seconds
        return freed, seconds

    def offload(self, value: Any) -> int:
        """Move the tensors in the value off the device; the bytes freed there. Nothing happens if that is done."""
        if self.is_away or "torch" not in sys.modules:
            return 0
        self._store = self._store or open_store(self.name, "")
        freed = self._store.suspend(tensors_in(value))
        self.is_away = True
        return freed

    def onload(self) -> None:
        """Move them back, with their content."""
        if self.is_away:
            assert self._store is not None
            self._store.resume()
            self.is_away = False

    def statistics(self) -> dict[str, float]:
        """As of `plugins.lease.station.LeasedStation`; nothing of a worker that never left."""
        if not self._switched:
            return {}
        return {"switches": self._switched, "switch_s": self._switch_s, "offloaded_bytes": self._freed}

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested collections and attributes: of modules the parameters and buffers, of optimizers the state,
    and all gradients. Slots, closures and module globals are not searched."""
    import torch

    seen: set[int] = set()
    todo: deque[Any] = deque([value])
    while todo:
        found = todo.popleft()
        if isinstance(found, _OPAQUE) or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            yield found
            if found.is_leaf and found.grad is not None:
                todo.append(found.grad)
        elif isinstance(found, Mapping):
            todo += [*found.keys(), *found.values()]
        elif isinstance(found, list | tuple | set | frozenset | deque):
            todo += found
        elif not type(found).__module__.startswith(__package__):
            todo.append(getattr(found, "__dict__", None))
