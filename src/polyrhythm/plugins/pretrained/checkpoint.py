"""Opens a released checkpoint folder from its headers: its tensors, their files, and its architecture.

`Checkpoint.open` takes milliseconds at any size and reads no tensor; `building` fills a network from it, and `saving`
writes one in the same layout. A faulty folder raises one ConfigError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.pretrained import folder_files
from polyrhythm.readable import few
from polyrhythm.safetensors_files import Header, read_header, read_tensors
from polyrhythm.sources import local_folder
from polyrhythm.specs import WeightSpec
from polyrhythm.specs.weights import weight_specs

if TYPE_CHECKING:
    from torch import Tensor

#: Prefix that some releases put before every name of the network.
_PREFIX = "model."
#: Names of lerobot's normalisation buffers: statistics, not tensors of the network.
_NORMALISERS = ("normalize_", "unnormalize_")
#: Endings of files of torch.save.
_TORCH = (".pt", ".bin")
#: Prefix of DistributedDataParallel, which OpenVLA-OFT's side files have.
_DDP = "module."
#: What the tensors' names of one architecture alone match, the more particular one first.
_SIGNS = (
    (r"(^backbone\.eagle_model\.|^action_head\.vl_self_attention\.)", "groot_n1d5"),
    (r"^vision_backbone\.featurizer\.", "openvla_oft"),
    (r"(layernorm\.dense\.|^time_mlp_in\.)", "pi05"),
    (r"^state_proj\.", "pi0"),
)


@dataclass(frozen=True, slots=True)
class TensorSource:
    """File of a tensor and its name in that file."""

    file: Path
    stored: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A released folder. All names are the network's: without `prefix`; tensors of side files under their module's
    name.

    config: config.json, {} without one. tensors: of the model and of side files, in file order; places: source of each.
    side: names from side files. extra: tensors of the model's files that belong to no network: lerobot's normalisation
    buffers, by stored name. ours: of polyrhythm.safetensors. files: of the model, with their headers. statistics,
    tokenizer: files and folder, for `plugins.vla.statistics`.
    """

    folder: Path
    config: Mapping[str, Any]
    prefix: str
    tensors: Mapping[str, WeightSpec]
    places: Mapping[str, TensorSource]
    side: frozenset[str]
    extra: Mapping[str, TensorSource]
    ours: Mapping[str, WeightSpec]
    files: Mapping[Path, Header]
    statistics: tuple[Path, ...]
    tokenizer: Path | None

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Read config.json and the headers. ConfigError: the checkpoint is incomplete."""
        folder = local_folder(folder)
        folder_files.check_is_folder(folder)
        expected = folder_files.weight_files(folder)
        files = {folder / name: _header(folder / name, names) for name, names in expected.items()}
        stored = {name: TensorSource(path, name) for path, header in files.items() for name in header.tensors}
        extra = {name: place for name, place in stored.items() if name.startswith(_NORMALISERS)}
        inner = [name for name in stored if name not in extra]
        prefix = _PREFIX if inner and all(name.startswith(_PREFIX) for name in inner) else ""
        places = {name.removeprefix(prefix): stored[name] for name in inner}
        tensors = {name: files[place.file].tensors[place.stored] for name, place in places.items()}
        side = {
            f"{module}.{stored.removeprefix(_DDP)}": (spec, TensorSource(file, stored))
            for module, file in folder_files.side_files(folder).items()
            for stored, spec in stored_specs(file).items()
        }
        ours, config = folder / folder_files.OURS, folder / folder_files.CONFIG
        return cls(
            folder=folder,
            config=folder_files.read_json(config) if config.is_file() else {},
            prefix=prefix,
            tensors=tensors | {name: spec for name, (spec, _) in side.items()},
            places=places | {name: place for name, (_, place) in side.items()},
            side=frozenset(side),
            extra=extra,
            ours=read_header(ours).tensors if ours.is_file() else {},
            files=files,
            statistics=folder_files.statistics_files(folder),
            tokenizer=folder_files.tokenizer_folder(folder),
        )

    @property
    def parameters(self) -> int:
        """Total number of elements of its tensors."""
        return sum(prod(spec.shape) for spec in self.tensors.values())

    @property
    def architecture(self) -> str:
        """The policy type, detected from the names of the tensors; "" if unknown."""
        for sign, name in _SIGNS:
            if any(re.search(sign, tensor) for tensor in self.tensors):
                return name
        return ""

    def number(self, key: str, default: int) -> int:
        """An entry of config.json, or the default. ConfigError: it is not a number."""
        found = self.config.get(key) or default
        if not isinstance(found, int):
            raise ConfigError(
                f"checkpoint = {self.folder}: config.json has {key} = {found!r}, which is not a number; copy it again "
                "from its release"
            )
        return found

    def require(self, kind: str) -> None:
        """ConfigError unless the folder has this policy type's architecture."""
        found = self.architecture
        if not found:
            first = few([repr(name) for name in self.tensors])
            raise ConfigError(
                f"checkpoint = {self.folder}: its tensors ({first}) are of no architecture known here; "
                f"use a folder of {', '.join(sorted(name for _, name in _SIGNS))} in PyTorch's released names"
            )
        if found != kind:
            raise ConfigError(
                f"policy.type = {kind!r}, but checkpoint = {self.folder} is a {found!r}; set policy.type = {found!r} "
                "or name another folder"
            )

    def read(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """These tensors (default all) in their stored dtypes, file by file, memory-mapped on the CPU. Copy a tensor
        before its file may change. KeyError: unknown name."""
        by_file: dict[Path, list[str]] = {}
        for name in self.tensors if names is None else names:
            by_file.setdefault(self.places[name].file, []).append(name)
        for file, wanted in by_file.items():
            yield from read_stored(file, {name: self.places[name].stored for name in wanted})

    def read_ours(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of polyrhythm.safetensors by the policy's names; none without the file."""
        return read_stored(self.folder / folder_files.OURS, None if self.ours else {})


def stored_specs(file: Path) -> Mapping[str, WeightSpec]:
    """Names and specs of the tensors in a safetensors or torch.save file. ConfigError: it is neither."""
    return weight_specs(_torch_file(file, "meta")) if file.suffix in _TORCH else read_header(file).tensors


def read_stored(file: Path, stored: Mapping[str, str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one file, by name -> stored name; by default all by their stored names."""
    if file.suffix in _TORCH:
        found = _torch_file(file, "cpu")
        yield from found.items() if stored is None else ((name, found[inner]) for name, inner in stored.items())
    elif stored is None or stored:
        yield from read_tensors(file, {name: name for name in read_header(file).tensors} if stored is None else stored)


def _header(file: Path, expected: list[str] | None) -> Header:
    """Header of a file. ConfigError: the index names tensors that are missing in it."""
    header = read_header(file)
    if absent := [name for name in expected or () if name not in header.tensors]:
        raise ConfigError(
            f"{file} lacks {len(absent)} tensors that {folder_files.INDEX} places there ({few(absent)}); "
            "download both again from one release"
        )
    return header


def _torch_file(file: Path, device: str) -> dict[str, Tensor]:
    """The state_dict of a torch.save file; code in it is refused. device: "meta" reads only shapes."""
    import zipfile

    import torch

    try:
        mapped = device == "cpu" and zipfile.is_zipfile(file)
        found = torch.load(file, map_location=device, weights_only=True, mmap=mapped)
    except Exception as error:  # arbitrary bytes may raise anything
        raise ConfigError(
            f"{file} cannot be read as tensors alone ({str(error).splitlines()[0]}); copy it again from its release, "
            "or save its state_dict as safetensors"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise ConfigError(f"{file} holds no state_dict; save the module's state_dict there")
    return found
