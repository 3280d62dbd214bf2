"""A state that is sharded over ranks, as a folder in the format of torch.distributed.checkpoint (DCP).

    <folder>/.metadata, __0_0.distcp, __1_0.distcp, …

Each rank writes its shards; a tensor that all ranks have is written once. One tensor more, `index`, says in plain text
where each belongs in the state, and what of the state is no tensor. The folder is written under the name
`<folder>.part`, and renamed once all ranks have written.
"""

from __future__ import annotations

import ast
import io
import pickle
import shutil
import threading
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from polyrhythm.errors import RunFolderError
from polyrhythm.training.shards import joined, part_of

Group = torch.distributed.ProcessGroup
_INDEX = "index"
Path_ = tuple[Any, ...]


class SavingThread:
    """See `checkpoint.Saving`."""

    def __init__(self, tensors: dict[str, Tensor], folder: Path, rank: int, group: Group) -> None:
        self._error: Exception | None = None
        self._arguments = tensors, folder, rank, group
        self._thread = threading.Thread(target=self._run, name="saving", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            _write(*self._arguments)
        except CheckpointException as error:  # torch's own, no Exception, with that of each rank within
            causes = [cause for cause, _ in error.failures.values()]
            self._error = next((cause for cause in causes if isinstance(cause, OSError)), OSError(str(causes[0])))
        except Exception as error:  # noqa: BLE001 - raised by wait()
            self._error = error


def save_sharded(state: Mapping[str, Any], folder: Path, rank: int, group: Group) -> SavingThread:
    """Save a state of tensors, plain data and dicts of them; copied to host memory before this returns, and written in
    a thread. group: of all ranks, for its collectives alone, so one saving at a time."""
    tensors: dict[str, Tensor] = {}
    index: list[tuple[Path_, Any]] = []
    for path, value in _leaves(state):
        if isinstance(value, Tensor):
            name = "/".join(map(str, path))
            tensors[name] = joined(part_of(value.detach()).to("cpu", copy=True), value.detach())
            index.append((path, name))
        else:
            index.append((path, [value]))
    tensors[_INDEX] = torch.frombuffer(bytearray(repr(index).encode()), dtype=torch.uint8)
    return SavingThread(tensors, folder, rank, group)


def load_sharded(folder: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """The state, its tensors sharded as those of `like` that stand in the same place, else whole in host memory.
    RunFolderError: it is damaged, or no such folder. Whoever reads all of it (an empty `like`) also learns of a tensor
    that was changed since."""
    try:
        reader = _Reader(folder)
        metadata = reader.read_metadata()
        if not like:
            _check_sums(folder, metadata)
        known = metadata.state_dict_metadata
        (raw,) = _read(reader, {_INDEX: _room(known[_INDEX], None)}).values()
        index = ast.literal_eval(bytes(raw.tolist()).decode())
        rooms = {name: _room(known[name], _at(like, path)) for path, name in index if isinstance(name, str)}
        tensors = _read(reader, rooms)
    except (Exception, CheckpointException) as error:  # arbitrary bytes may raise anything
        raise RunFolderError(f"{folder} cannot be read as a checkpoint ({error}); name another") from error
    state: dict[str, Any] = {}
    for path, value in index:
        inner = state
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = tensors[value] if isinstance(value, str) else value[0]
    return state


def _write(tensors: dict[str, Tensor], folder: Path, rank: int, group: Group) -> None:
    unfinished = folder.with_name(f"{folder.name}.part")
    save(dict(tensors), storage_writer=FileSystemWriter(unfinished), process_group=group)
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)


def _leaves(state: Mapping[Any, Any], above: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every path of keys and what stands there: tensors, and plain data (empty dicts included)."""
    for key, value in state.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _at(like: Any, path: Path_) -> Tensor | None:
    for key in path:
        like = like.get(key) if isinstance(like, Mapping) else None
    return like if isinstance(like, Tensor) else None


@torch.no_grad()
def _room(stored: Any, like: Tensor | None) -> Tensor:
    """Memory for a stored tensor or this rank's part of it, as `like` is sharded. ValueError: another shape."""
    if not isinstance(stored, TensorStorageMetadata):
        raise TypeError("it holds something else than tensors")
    if like is None:
        return torch.empty(stored.size, dtype=stored.properties.dtype)
    if like.shape != stored.size:
        return torch.empty(stored.size, dtype=stored.properties.dtype)  # of another policy: whoever takes it says so
    part = torch.empty_like(part_of(like.detach()), dtype=stored.properties.dtype, device="cpu")
    return joined(part, like.detach())


def _read(reader: FileSystemReader, rooms: dict[str, Tensor]) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each process reads for itself
        load(rooms, storage_reader=reader, no_dist=True)
    return rooms


class _Reader(FileSystemReader):
    """A reader that executes nothing: DCP's metadata is a pickle, of which only its own plain classes are made."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _PlainUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError("its metadata is something else")
        sizes = {path.name: path.stat().st_size for path in Path(self.path).iterdir()}
        for place in (metadata.storage_data or {}).values():
            if sizes.get(place.relative_path, 0) < place.offset + place.length:
                raise ValueError(f"{place.relative_path} is absent or too short")
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


def _check_sums(folder: Path, metadata: Metadata) -> None:
    """ValueError: a tensor is not as it was written. Each is an archive with checksums, which torch does not verify."""
    for index, place in (metadata.storage_data or {}).items():
        with (folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            with zipfile.ZipFile(io.BytesIO(file.read(place.length))) as parts:
                if parts.testzip() is not None:
                    raise ValueError(f"{index.fqn} in it is damaged")


class _PlainUnpickler(pickle.Unpickler):
    """Makes the classes of DCP's metadata, and what these hold, alone."""

    _DCP = "torch.distributed.checkpoint"
    _KNOWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
        {
            f"{_DCP}.metadata": (
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            ),
            f"{_DCP}.filesystem": ("_StorageInfo",),
            "pathlib": ("PosixPath",),
            "torch": ("Size",),
            "torch.serialization": ("_get_layout",),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in self._KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"its metadata names {module}.{name}")
        return super().find_class(module, name)
