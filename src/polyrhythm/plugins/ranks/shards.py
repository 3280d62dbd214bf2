"""Shards of tensors (DTensors), and saved states of them: a folder in the format of torch.distributed.checkpoint (DCP).

    <folder>/__0_0.distcp, __1_0.distcp, …     tensors, each an archive of torch.save
    <folder>/index                             positions of tensors in the files and in the state, and other data
    <folder>/.metadata                         what DCP itself reads; a pickle, so it is not read here

Each rank writes its shards; a tensor that all ranks have is written once. The index is plain text (Python literals).
The folder is written under the name `<folder>.part`, and renamed once all ranks have written.
"""

from __future__ import annotations

import ast
import io
import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor, Shard

from polyrhythm.errors import RunFolderError
from polyrhythm.files import inner_path, remove_whole
from polyrhythm.training.checkpoint import BackgroundSaving
from polyrhythm.training.ranks import Piece

Group = torch.distributed.ProcessGroup
_INDEX = "index"
Path_ = tuple[Any, ...]


def is_sharded(x: Tensor) -> bool:
    return isinstance(x, DTensor)


def part_of(x: Tensor, like: Tensor | None = None) -> Tensor:
    """See `Ranks.part`."""
    if isinstance(x, DTensor):
        with torch.no_grad():
            return x.to_local()
    if not isinstance(like, DTensor):
        return x
    mesh, ((over, dim),) = like.device_mesh, _sharding(like)
    pieces = x.chunk(mesh.size(over), dim=dim)
    rank = mesh.get_local_rank(over)
    return pieces[rank] if rank < len(pieces) else x.narrow(dim, 0, 0)


def shard_of(x: Tensor) -> tuple[int, int]:
    """Which shard of `x` this rank has, of how many; ranks of different replicas have the same (0 of 1: all of it)."""
    if not isinstance(x, DTensor):
        return 0, 1
    for over, _ in _sharding(x):
        return x.device_mesh.get_local_rank(over), x.device_mesh.size(over)
    return 0, 1


def _sharding(x: DTensor) -> list[tuple[int, int]]:
    """The dimension of the mesh over which `x` is sharded, and that of `x`; one at most."""
    return [(at, each.dim) for at, each in enumerate(x.placements) if isinstance(each, Shard)]


def piece_of(name: str, x: Tensor) -> Piece:
    """This rank's rows of `x`, which is sharded by rows as `torch.chunk` divides them."""
    index, count = shard_of(x)
    if count == 1:
        return Piece(name, part_of(x))
    first = min(index * -(-len(x) // count), len(x))
    return Piece(name, part_of(x), first)


def join(part: Tensor, like: Tensor) -> Tensor:
    """See `Ranks.join`."""
    if not isinstance(like, DTensor):
        return part
    return DTensor(part, like._spec, requires_grad=False)  # from_local would move an offloaded part


def save_folder(state: Mapping[str, Any], folder: Path, rank: int, group: Group) -> BackgroundSaving:
    """Save a state of tensors, plain data and dicts of them: copied to host memory at once, then written in a thread.
    group: all ranks, used only by saves, so one runs at a time."""
    tensors: dict[str, Tensor] = {}
    index: list[tuple[Path_, Any]] = []
    for path, value in _leaves(state):
        if isinstance(value, Tensor):
            name = "/".join(map(str, path))
            tensors[name] = join(part_of(value.detach()).to("cpu", copy=True), value.detach())
            index.append((path, name))
        else:
            index.append((path, [value]))
    return BackgroundSaving(partial(_write, tensors, index, folder, rank, group))


def load_folder(folder: Path, like: Mapping[str, Any]) -> dict[str, Any]:
    """The state; tensors are sharded like those at the same path in `like`, else whole in host memory. RunFolderError:
    it is damaged, or not such a folder. Only reading all of it (an empty `like`) detects a tensor that was modified."""
    try:
        reader = _Reader(folder)
        if not like:
            reader.check_sums()
        rooms = {
            name: _room(reader.tensors[name], _at(like, path)) for path, name in reader.state if isinstance(name, str)
        }
        tensors = _read(reader, rooms)
    except (Exception, CheckpointException) as error:  # arbitrary bytes may raise anything
        raise RunFolderError(f"{folder} cannot be read as a checkpoint ({error}); name another") from error
    state: dict[str, Any] = {}
    for path, value in reader.state:
        inner = state
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = tensors[value] if isinstance(value, str) else value[0]
    return state


def _write(
    tensors: dict[str, Tensor], index: Sequence[tuple[Path_, Any]], folder: Path, rank: int, group: Group
) -> None:
    unfinished = folder.with_name(f"{folder.name}.part")
    if torch.distributed.is_initialized():  # with ranks: rank 0 has removed what a killed trainer left under this name
        torch.distributed.barrier(group)
    try:
        save(dict(tensors), storage_writer=_Writer(unfinished, index), process_group=group)
    except CheckpointException as error:  # torch's own, not an Exception; contains that of each rank
        causes = [cause for cause, _ in error.failures.values()]
        raise next((cause for cause in causes if isinstance(cause, OSError)), OSError(str(causes[0]))) from None
    if rank == 0:
        remove_whole(folder)  # of the same updates, saved before
        unfinished.rename(folder)


def _leaves(state: Mapping[Any, Any], above: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
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
def _room(stored: TensorStorageMetadata, like: Tensor | None) -> Tensor:
    """Host memory for a stored tensor, or for this rank's part of it, sharded like `like`. For all of it if the shapes
    differ, as then it is of another policy, which the caller reports."""
    if like is None or like.shape != stored.size:
        return torch.empty(stored.size, dtype=stored.properties.dtype)
    part = torch.empty_like(part_of(like.detach()), dtype=stored.properties.dtype, device="cpu")
    return join(part, like.detach())


def _read(reader: FileSystemReader, rooms: dict[str, Tensor]) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each process reads for itself
        load(rooms, storage_reader=reader, no_dist=True)
    return rooms


class _Writer(FileSystemWriter):
    """Writes the index beside DCP's metadata. state: paths of tensors in the state, and other data."""

    def __init__(self, folder: Path, state: Sequence[tuple[Path_, Any]]) -> None:
        super().__init__(folder)
        self._state = state

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        tensors = {
            name: (tuple(stored.size), str(stored.properties.dtype).removeprefix("torch."))
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        pieces = [
            (key.fqn, tuple(key.offset or ()), tuple(chunk.sizes), place.relative_path, place.offset, place.length)
            for key, place in metadata.storage_data.items()
            for chunk in metadata.state_dict_metadata[key.fqn].chunks  # type: ignore[union-attr]
            if chunk.offsets == key.offset
        ]
        with (Path(self.path) / _INDEX).open("w", encoding="utf-8") as file:
            file.write(repr({"state": self._state, "tensors": tensors, "pieces": pieces}))
            file.flush()
            os.fsync(file.fileno())


class _Reader(FileSystemReader):
    """Reads by the index."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        found = ast.literal_eval((folder / _INDEX).read_text(encoding="utf-8"))
        self.state: list[tuple[Path_, Any]] = found["state"]
        self.tensors = {
            name: TensorStorageMetadata(TensorProperties(dtype=_dtype(dtype)), torch.Size(size), [])
            for name, (size, dtype) in found["tensors"].items()
        }
        self.places: dict[MetadataIndex, _StorageInfo] = {}
        for name, offsets, sizes, file, offset, length in found["pieces"]:
            path = inner_path(folder, file)
            if not path.is_file() or path.stat().st_size < offset + length:
                raise ValueError(f"{file} is absent or too short")
            self.tensors[name].chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            self.places[MetadataIndex(name, offsets)] = _StorageInfo(file, offset, length)

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        return Metadata(dict(self.tensors), storage_data=self.places, storage_meta=StorageMeta(load_id=self.load_id))

    def check_sums(self) -> None:
        """ValueError: a tensor was modified. Each is an archive with checksums, which torch does not verify."""
        for index, place in self.places.items():
            with (Path(self.path) / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                with zipfile.ZipFile(io.BytesIO(file.read(place.length))) as parts:
                    if parts.testzip() is not None:
                        raise ValueError(f"{index.fqn} in it is damaged")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"it names the dtype {name}")
    return found
