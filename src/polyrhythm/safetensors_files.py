"""Reads and writes safetensors files, and reads their headers (names, shapes, dtypes, offsets) without tensors.

The format: eight bytes with the header's length (little endian), the header as JSON, the tensors' bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrhythm.errors import ConfigError
from polyrhythm.files import name_in_errors, parse_json
from polyrhythm.specs import WeightSpec

if TYPE_CHECKING:
    from torch import Tensor

#: Dtype names of the format -> those of torch.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}
DTYPES |= {f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)} | {"U8": "uint8"}
DTYPES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
#: The format's own limit on the header's length.
_MOST_BYTES = 100_000_000
#: First bytes of the text file that Git LFS leaves in place of a file.
_LFS = b"version "
_AGAIN = "copy the file again from where it was released"


@dataclass(frozen=True, slots=True)
class Header:
    """tensors: in file order; metadata: strings saved with them; begins: offset of each tensor in the file; data:
    offset of the data section."""

    tensors: dict[str, WeightSpec]
    metadata: dict[str, str]
    begins: dict[str, int]
    data: int


def read_header(file: Path) -> Header:
    """The header of a safetensors file. ConfigError: it is not such a file, or is truncated."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        if first == _LFS:
            raise ConfigError(f"{file} is a pointer of Git LFS, not the file itself; run git lfs pull in its folder")
        if size < 8 or length > min(_MOST_BYTES, size - 8):
            raise ConfigError(f"{file} has {size:,} bytes: too few for its header, or no safetensors file; {_AGAIN}")
        try:
            content = parse_json(stream.read(length))
            metadata = content.pop("__metadata__", {})
            ends = [entry["data_offsets"][1] for entry in content.values()]
            names = sorted(content, key=lambda name: content[name]["data_offsets"][0])
            tensors = {name: _spec(file, name, content[name]) for name in names}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{file} has a header that cannot be read ({error}); {_AGAIN}") from error
    whole = 8 + length + max(ends, default=0)
    if size < whole:
        raise ConfigError(f"{file} has {size:,} bytes, its header tells {whole:,}: the file was cut off; {_AGAIN}")
    begins = {name: 8 + length + content[name]["data_offsets"][0] for name in tensors}
    return Header(tensors, metadata, begins, 8 + length)


def _spec(file: Path, name: str, entry: dict[str, Any]) -> WeightSpec:
    if entry["dtype"] not in DTYPES:
        raise ConfigError(f"{file}: {name} has the dtype {entry['dtype']}: unknown; use one of {', '.join(DTYPES)}")
    spec = WeightSpec(tuple(entry["shape"]), DTYPES[entry["dtype"]])
    begin, end = entry["data_offsets"]
    if end - begin != spec.nbytes:
        raise ConfigError(f"{file}: {name} is {spec}, {spec.nbytes:,} bytes, but has {end - begin:,}; {_AGAIN}")
    return spec


def read_tensors(file: Path, stored: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of the file by name -> stored name, each memory-mapped on the CPU."""
    from safetensors import safe_open  # an extra

    with safe_open(file, framework="pt", device="cpu") as opened:
        for name, inner in stored.items():
            yield name, opened.get_tensor(inner)


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a file with these tensors."""
    from safetensors.torch import save_file

    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with name_in_errors(file):
        file.touch()
        mode = file.stat().st_mode  # the default mode; safetensors would restrict it to the owner
        save_file(kept, file, metadata={"format": "pt"})
        file.chmod(mode)
