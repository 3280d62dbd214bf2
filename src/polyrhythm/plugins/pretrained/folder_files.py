"""Finds the files of a released checkpoint folder: tensors, side files, statistics, tokenizer. It opens only the index.

model.safetensors | weights.safetensors            all tensors
model.safetensors.index.json, model-*.safetensors  or in shards
config.json                                        the architecture's sizes
action_head--*.pt, proprio_projector--*.pt         OpenVLA-OFT's heads (or .safetensors), the highest step
polyrhythm.safetensors                             ours: critic and noise head
assets/ID/norm_stats.json, dataset_statistics.json, experiment_cfg/metadata.json, policy_*processor*  statistics
adapter_config.json, adapter_model.safetensors     peft's adapters, in a folder of their own
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.files import inner_path, parse_json
from polyrhythm.readable import few

CONFIG, INDEX, OURS = "config.json", "model.safetensors.index.json", "polyrhythm.safetensors"
ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
#: Key of config.json with what stands for tokenizer and statistics, and the cameras, where a policy began from a seed.
CHOICES = "polyrhythm"
SINGLE = ("model.safetensors", "weights.safetensors")
#: Modules whose tensors lie in files of their own, beside the model's.
SIDE_MODULES = ("action_head", "proprio_projector")
_STEP = re.compile(r"--(\d+)_")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "spiece.model", "tokenizer_config.json", "vocab.json")
_NO_SAFETENSORS = "a folder with model.safetensors, weights.safetensors or shards and their index is needed"


def read_json(file: Path) -> dict[str, Any]:
    """The mapping in a JSON file. ConfigError: it is not JSON, or not a mapping."""
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}); copy it again from where it was released") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} holds a {type(found).__name__}, not a mapping; copy it again from its release")
    return found


def check_is_folder(folder: Path) -> None:
    """ConfigError: it is a file; MissingError: it does not exist."""
    if folder.is_dir():
        return
    if folder.is_file():
        raise ConfigError(f"checkpoint = {folder}: a file; name its folder, {folder.parent}")
    raise MissingError(
        f"checkpoint = {folder}: there is no such folder; name the folder into which the checkpoint was downloaded "
        "(nothing is downloaded here)"
    )


def weight_files(folder: Path) -> dict[str, list[str] | None]:
    """Files of tensors -> names that the index expects in each, or None without an index. ConfigError: no safetensors;
    MissingError: a shard of the index is missing."""
    if (folder / INDEX).is_file():
        return _shards(folder)
    for name in SINGLE:
        if (folder / name).is_file():
            return {name: None}
    raise ConfigError(f"checkpoint = {folder}: {_what_is_there_instead(folder)}")


def _shards(folder: Path) -> dict[str, list[str] | None]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(x, str) for x in weight_map.values()):
        raise ConfigError(
            f"{folder / INDEX} has no weight_map from tensors to files; copy it again from where it was released"
        )
    files: dict[str, list[str] | None] = {}
    for tensor, file in weight_map.items():
        try:
            inner_path(folder, file)
        except ValueError as error:
            raise ConfigError(f"{folder / INDEX}: {error}; copy it again from where it was released") from error
        names = files.setdefault(file, [])
        assert names is not None
        names.append(tensor)
    if missing := [file for file in sorted(files) if not (folder / file).is_file()]:
        raise MissingError(
            f"checkpoint = {folder}: {len(missing)} of the {len(files)} files that {INDEX} names are missing "
            f"({few(missing)}); download them into this folder"
        )
    return dict(sorted(files.items()))


def _what_is_there_instead(folder: Path) -> str:
    if (folder / "config.yaml").is_file() and any((folder / name).exists() for name in ("policy.pt", "checkpoints")):
        return f"it is the folder of a run; write polyrhythm policies export {folder} --out NEW, and name NEW"
    if (folder / ADAPTER_CONFIG).is_file():
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "another folder"
        return (
            f"it holds adapters of {base!r}, not a model; write polyrhythm policies merge {folder} --base FOLDER "
            "--out NEW, and name NEW"
        )
    snapshots = sorted(path for path in folder.glob("snapshots/*") if path.is_dir())
    if snapshots:
        return f"it is a download cache; name the folder in it: {snapshots[-1]}"
    if (folder / "params" / "_METADATA").is_file() or (folder / "_METADATA").is_file():
        return "it holds a checkpoint of JAX; convert it to PyTorch with openpi's own script"
    if shards := sorted(folder.glob("model-*-of-*.safetensors")):
        return f"it holds {len(shards)} shards but no {INDEX}; download that file too"
    if others := sorted(path.name for ending in ("bin", "pt", "pth") for path in folder.glob(f"*.{ending}")):
        remedy = _convert(folder, others)
        return f"it holds {few(others)} but no safetensors, and files of torch.save can run code; {remedy}"
    inner = sorted(path.parent for name in (*SINGLE, INDEX) for path in folder.glob(f"*/{name}"))
    return f"it holds no safetensors; name {inner[0]}" if inner else f"it holds no safetensors; {_NO_SAFETENSORS}"


def _convert(folder: Path, files: list[str]) -> str:
    """The remedy for torch.save files: convert them to safetensors without running their code."""
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if "model_type" in config and "auto_map" not in config:
        load, new = f"from_pretrained({json.dumps(str(folder))})", 'save_pretrained("NEW")'
        imported = "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T"
        lines = f"{imported}; M.{load}.{new}; T.{load}.{new}"
        return f"convert them: python -c {shlex.quote(lines)}, and name NEW"
    if len(files) > 1:
        return f"save the weights as safetensors ({_NO_SAFETENSORS})"
    source, target = (json.dumps(str(folder / name)) for name in (files[0], SINGLE[0]))
    load = f"torch.load({source}, weights_only=True)"
    lines = f"import torch, safetensors.torch as s; s.save_file({load}, {target})"
    return f"convert it: python -c {shlex.quote(lines)}"


def side_files(folder: Path) -> dict[str, Path]:
    """Module -> the file of its tensors: of the last training step, safetensors preferred."""
    found = {}
    for module in SIDE_MODULES:
        files = [
            path
            for path in (*folder.glob(f"{module}.*"), *folder.glob(f"{module}--*"))
            if path.suffix in (".safetensors", ".pt")
        ]
        if files:
            found[module] = max(files, key=lambda path: (_step(path), path.suffix == ".safetensors", path.name))
    return found


def _step(path: Path) -> int:
    """`action_head--150000_checkpoint.pt` -> 150000; -1 without a number."""
    found = _STEP.search(path.name)
    return int(found.group(1)) if found else -1


def statistics_files(folder: Path) -> tuple[Path, ...]:
    """Files with normalisation statistics, by openpi, OpenVLA, GR00T and lerobot."""
    openpi = [path for depth in range(5) for path in sorted(folder.glob("*/" * depth + "norm_stats.json"))]
    named = [folder / "dataset_statistics.json", folder / "experiment_cfg" / "metadata.json", folder / "metadata.json"]
    lerobot = [*folder.glob("policy_p*processor*.json"), *folder.glob("policy_p*processor*.safetensors")]
    dataset = [folder / "meta" / "stats.json", folder / "stats.json"]  # of the LeRobot dataset it was trained on
    return tuple(path for path in (*openpi, *named, *sorted(lerobot), *dataset) if path.is_file())


def tokenizer_folder(folder: Path) -> Path | None:
    """The folder with the tokenizer's files: the checkpoint's own, or one named `tokenizer` in it."""
    for place in (folder, folder / "tokenizer"):
        if any((place / name).is_file() for name in _TOKENIZER):
            return place
    return None


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether the name matches one of these `fnmatch` patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def value_of(found: Any, key: str, origin: str) -> Any:
    """The value of a key. ConfigError: the key is missing, or `found` is not a mapping."""
    if not isinstance(found, Mapping) or key not in found:
        held = few([*found]) if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise ConfigError(f"{origin} has no {key!r} but {held or 'nothing'}; copy it again from its release")
    return found[key]


def mapping_in(found: Mapping[str, Any], key: str, origin: str) -> Mapping[str, Any]:
    """The mapping under a key, empty if the key is absent. ConfigError: it is not a mapping."""
    inner = found.get(key, {})
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{origin} has a {type(inner).__name__} as {key!r}; copy it again from its release")
    return inner


def number_pair(stats: Any, first: str, second: str, origin: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Two statistics of an array. ConfigError: one is missing or not a list of numbers, or their lengths differ."""
    a, b = (_numbers(value_of(stats, name, origin), f"{origin}.{name}") for name in (first, second))
    if a.shape != b.shape:
        raise ConfigError(
            f"{origin} has {len(a)} numbers in {first} and {len(b)} in {second}; copy it again from its release"
        )
    return a, b


def _numbers(found: Any, origin: str) -> NDArray[np.float64]:
    try:
        array = np.asarray(found, np.float64).reshape(-1)
    except (TypeError, ValueError):
        array = np.array([np.nan])
    if not np.isfinite(array).all():
        raise ConfigError(f"{origin} is not a list of finite numbers; copy it again from its release")
    return array


def check_link(path: Path, inside: Path) -> None:
    """ConfigError: `path` is a link that leads out of the folder `inside`, or to a folder.

    Links of a download cache, from its folder `snapshots/REVISION` to the files in `blobs` beside `snapshots`, are
    allowed.
    """
    if not path.is_symlink():
        return
    home, real = inside.resolve(), path.resolve()
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    if real.is_dir() or not any(real.is_relative_to(one) for one in homes):
        raise ConfigError(
            f"{path} is a link to {real}, which is not copied; if it belongs to the folder, name a copy of the folder "
            "with what its links lead to (cp -rL)"
        )


def copy_inner(source: Path, target: Path, inside: Path) -> None:
    """Copy a file of the folder `inside`, or a subfolder with its files. ConfigError: a link as in `check_link`."""
    check_link(source, inside)
    if source.is_dir():
        target.mkdir()
        for path in sorted(source.iterdir()):
            copy_inner(path, target / path.name, inside)
    elif source.is_file():
        shutil.copyfile(source, target)
