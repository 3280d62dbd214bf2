"""The weights of a run in a file: written whole or not at all, read without executing anything in it."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import RunFolderError

#: Name of the newest whole weights in a run folder: after the warm start, and when training ends, however it ends.
POLICY_FILE = "policy.pt"


def save_policy(weights: Mapping[str, Tensor], config: RunConfig, path: Path, version: int) -> None:
    """Write {"policy": state_dict, "config": plain data, "version": int}."""
    unfinished = path.with_name(path.name + ".part")
    content = {"policy": dict(weights), "config": config.model_dump(mode="json"), "version": version}
    torch.save(content, unfinished)
    unfinished.replace(path)


def load_policy(path: Path) -> tuple[RunConfig, dict[str, Any], int]:
    """The configuration, weights and version in a run folder or in one of its checkpoints."""
    file = path / POLICY_FILE if path.is_dir() else path
    if not file.is_file():
        raise RunFolderError(f"{path} holds no {POLICY_FILE}: the run did not finish, or this is not a run folder")
    if not zipfile.is_zipfile(file):
        raise RunFolderError(f"{file} cannot be read as a checkpoint: it is damaged, or something else; name another")
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        weights, version = content["policy"], int(content["version"])
        config = validate(content["config"], origin=str(file))
    except (OSError, RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise RunFolderError(f"{file} cannot be read as a checkpoint ({error}); name another") from error
    return config, weights, version
