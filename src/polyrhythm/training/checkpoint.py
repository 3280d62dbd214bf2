"""Saved states: written atomically, read without executing anything in the file.

A state is a file, or a folder if it is sharded over ranks, which the plugin `folder` of kind `checkpoint` reads. Any
number of ranks can read either.
"""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from polyrhythm.errors import RunFolderError
from polyrhythm.files import atomic_write
from polyrhythm.plugin import load as load_plugin
from polyrhythm.plugin import table

#: The form of a state that is a folder.
_FOLDER = "folder"


class Saving(Protocol):
    """A state that is being saved. over: whether it has ended, successfully or not."""

    @property
    def over(self) -> bool: ...

    @property
    def copied(self) -> Mapping[str, Any] | None:
        """The whole state in host memory from which it is written; None if there is no such copy, or after `wait`."""

    def wait(self) -> None:
        """Wait until it has ended; raises its error. Afterwards the state exists, as rank 0 sees it."""


class Saved:
    """A state that is already saved."""

    over, copied = True, None

    def wait(self) -> None:
        pass


class BackgroundSaving:
    """A state that a thread writes. write: raises OSError if it cannot; copied: see `Saving`. ended: an event, since an
    interrupted `Thread.join` may mark a running thread as ended (CPython 3.11)."""

    def __init__(self, write: Callable[[], None], copied: Mapping[str, Any] | None = None) -> None:
        self.copied = copied
        self.ended = threading.Event()
        self._error: BaseException | None = None
        # The thread drops its argument when it ends. A daemon, so that a hanging file system does not keep the process.
        threading.Thread(target=self._run, args=(write,), name="saving", daemon=True).start()

    @property
    def over(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        self.ended.wait()
        self.copied = None
        if self._error is not None:
            raise self._error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001 - raised by wait()
            self._error = error
        finally:
            self.ended.set()


def save_file(state: Mapping[str, Any], path: Path, *, background: bool = False) -> Saving:
    """Save a learner's state as a file. background: write in a thread, from a copy. OSError: cannot write."""
    if background:
        copied = _copied(state, {})
        return BackgroundSaving(partial(save_state, copied, path), copied)
    save_state(state, path)
    return Saved()


def _copied(state: Any, known: dict[tuple[Any, ...], Tensor]) -> Any:
    """The state with its tensors copied to host memory. known: copies so far, so that tied tensors stay tied."""
    if isinstance(state, Mapping):
        return {key: _copied(value, known) for key, value in state.items()}
    if not isinstance(state, Tensor):
        return state
    key = state.data_ptr(), state.shape, state.stride(), state.dtype, state.device
    if key not in known or not state.numel():
        known[key] = state.detach().to("cpu", copy=True)
    return known[key]


def load(path: Path, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read what `Ranks.save` wrote, without communication: each rank reads its part of a folder, or a whole file.

    like: nested as the state; tensors are sharded like those of `like`, and whole where it has none. RunFolderError:
    damaged, or not a checkpoint.
    """
    if not path.is_dir():
        return load_state(path)
    if _FOLDER not in table("checkpoint"):
        raise RunFolderError(f"{path} is a sharded state; install the plugin ranks, which reads it")
    state: dict[str, Any] = load_plugin("checkpoint", _FOLDER)(path, like or {})
    return state


def save_state(state: Mapping[str, Any], path: Path) -> None:
    """Write plain data and tensors atomically: if the process is killed, the earlier file stays.
    OSError: cannot write."""
    with atomic_write(path) as unfinished, unfinished.open("wb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:  # torch's own, with the file's behind it
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def load_state(path: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Read what `save_state` wrote. RunFolderError: the file is damaged, or not a checkpoint. mapped: leave tensors in
    the file, for callers that copy them at once."""
    if not zipfile.is_zipfile(path):
        raise RunFolderError(f"{path} cannot be read as a checkpoint: it is damaged, or something else; name another")
    try:
        with zipfile.ZipFile(path) as parts:
            damaged = parts.testzip()  # torch does not verify the checksums that it writes
        if damaged is not None:
            raise ValueError(f"{damaged} in it is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # arbitrary bytes may raise anything
        raise RunFolderError(f"{path} cannot be read as a checkpoint ({error}); name another") from error
    if not isinstance(state, dict):
        raise RunFolderError(f"{path} cannot be read as a checkpoint: it holds {type(state).__name__}; name another")
    return state
