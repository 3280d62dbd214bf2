"""Tells from a released folder how the code that saved it makes π0's and π0.5's prompts and pictures.

openpi       resizes with Pillow; π0.5's prompt has the state as long as it is; π0's instruction is cleaned
lerobot      since 0.5: resizes as torch does without antialiasing; π0's instruction stays as it is
lerobot 0.4  the same with -3 around pictures, and π0.5's prompt has the state filled up to `max_state_dim` with 0
lerobot 0.3  (π0 alone) pictures stand at the lower right

A folder is lerobot's if it has policy_preprocessor.json, normalisation buffers, or `input_features` in config.json and
no statistics of openpi. It is of 0.5 or later if it knows relative actions, as those since 0.5.1 do: one of 0.5.0 looks
as one of 0.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.folder_files import mapping_in, read_json
from polyrhythm.plugins.vla.images import Resizing

_RELATIVE = "relative_actions_processor"
_STATE_DIM = 32


@dataclass(frozen=True, slots=True)
class FolderInputs:
    """resizing: of pictures that do not have the network's size. state_entries: of the state in π0.5's prompt, filled
    up with 0; 0: as many as there are. cleans: whether π0's instruction is cleaned (`prompts.cleaned`). relative:
    whether actions are relative to the state."""

    resizing: Resizing = "openpi"
    state_entries: int = 0
    cleans: bool = True
    relative: bool = False


def folder_inputs(source: Checkpoint | None) -> FolderInputs:
    """How the folder's own code makes inputs; openpi's way without a folder."""
    if source is None or not _is_lerobots(source):
        return FolderInputs()
    steps, config = lerobot_steps(source), source.config
    if _RELATIVE in steps or "use_relative_actions" in config:
        return FolderInputs("lerobot", cleans=False, relative=bool(steps.get(_RELATIVE, {}).get("enabled")))
    if not steps and (source.extra or "resize_imgs_with_padding" in config):
        return FolderInputs("lerobot_0.3", cleans=False)
    entries = config.get("max_state_dim", _STATE_DIM)
    if not isinstance(entries, int):
        raise ConfigError(
            f"checkpoint = {source.folder}: config.json has max_state_dim = {entries!r}, which is not a number; copy "
            "it again from its release"
        )
    return FolderInputs("lerobot_0.4", entries, cleans=False)


def _is_lerobots(source: Checkpoint) -> bool:
    """Whether lerobot saved the folder: it has its processors, its buffers, or its configuration alone."""
    openpi = any(path.name == "norm_stats.json" for path in source.statistics)
    return bool(lerobot_steps(source) or source.extra or ("input_features" in source.config and not openpi))


def lerobot_steps(source: Checkpoint) -> dict[str, Mapping[str, Any]]:
    """Name of each step of policy_preprocessor.json -> its settings."""
    found: dict[str, Mapping[str, Any]] = {}
    for path in source.statistics:
        if path.suffix == ".json" and "preprocessor" in path.name:
            for step in read_json(path).get("steps") or ():
                if not isinstance(step, Mapping):
                    raise ConfigError(f"{path}: {step!r} is not a step; copy it again from its release")
                name = str(step.get("registry_name") or step.get("class", ""))
                found[name] = mapping_in(step, "config", f"{path}: {name}")
    return found
