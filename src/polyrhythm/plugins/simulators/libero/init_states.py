"""Reads LIBERO's files of initial states: zip files with a pickle of one array, of which nothing is executed."""

from __future__ import annotations

import io
import pickletools
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import MissingError

_PICKLE = "data.pkl"
#: What reading a damaged file raises.
_UNREADABLE = (OSError, ValueError, LookupError, EOFError, zipfile.BadZipFile)
_INTEGERS = {"BININT1", "BININT2", "BININT"}


def read_initial_states(file: Path) -> NDArray[np.float64]:
    """Initial states [N,K] of a task: time, positions and velocities of its MuJoCo model. file: its `.pruned_init`.
    MissingError: it is not there, or holds anything else."""
    try:
        with zipfile.ZipFile(io.BytesIO(file.read_bytes())) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(_PICKLE))
            return _pickled_matrix(archive.read(name))
    except _UNREADABLE as error:
        raise MissingError(
            f"LIBERO's initial states cannot be read ({file}: {error}); install LIBERO's package again"
        ) from error


def _pickled_matrix(content: bytes) -> NDArray[np.float64]:
    """The matrix of a pickle that holds one alone, as numpy writes it: its shape, its type and order, a flag for the
    order of columns, and its bytes, as text of one byte per letter. ValueError: it is anything else."""
    steps = [(step.name, value) for step, value, _ in pickletools.genops(content) if "PUT" not in step.name]
    names = [name for name, _ in steps]
    pairs = [i for i, name in enumerate(names) if name == "TUPLE2" and set(names[i - 2 : i]) <= _INTEGERS]
    shape = [int(str(value)) for _, value in steps[pairs[0] - 2 : pairs[0]]]
    texts = [(i, value) for i, (_, value) in enumerate(steps) if isinstance(value, str | bytes)]
    end, data = max(texts, key=lambda text: len(text[1]))
    told = [value for i, value in texts if i < end]
    flags = [name for name in names[:end] if name in ("NEWTRUE", "NEWFALSE")]
    if "f8" not in told or "<" not in told or flags[-1:] != ["NEWFALSE"]:
        raise ValueError("it is no matrix of 64-bit numbers")
    encoded = data.encode("latin1") if isinstance(data, str) else data
    return np.frombuffer(encoded, "<f8").reshape(shape).astype(np.float64)
