"""Keeps evaluations in the run's folder, and uses one again where all that it is known to depend on is the same.

    RUN/evaluated/<key>.json        the evaluation's result with every episode

The key is a hash of weights, all settings, episodes, the files of this package, the versions of all installed packages,
Python, the processor, devices and their driver, and variables of libraries that compute, as they were before the first
evaluation, which may set some (MUJOCO_GL). An evaluation is never kept if it depends on something that the key does not
hold: an environment or policy that is not of this package, a setting of theirs or of the scoring that names a module, a
file, a folder or an address, pictures (they depend on the libraries that draw), a launcher that uses other hosts, or
another package that is not in a folder of installed packages.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import torch

import polyrhythm
from polyrhythm.config.schema import RunConfig
from polyrhythm.files import trouble, write_json
from polyrhythm.observe.run_folder import find_run, run_of
from polyrhythm.pipeline.persistence.checkpoints import SavedPolicy
from polyrhythm.runtime.memory.tensors import count_devices
from polyrhythm.specs import EnvSpec

log = logging.getLogger(__name__)

FOLDER = "evaluated"
#: Settings that an evaluation does not read: where a run is, how it trains and what it saves.
_UNREAD = {
    "name",
    "out_dir",
    "resume",
    "init_from",
    "checkpoint",
    "demonstrations",
    "supervised",
    "training",
    "algorithm",
}
#: Folders of installed packages, and the file there that names an editable one.
_INSTALLED, _ORIGIN = {"site-packages", "dist-packages"}, "direct_url.json"
#: Beginnings of the variables of libraries that compute, and of those that choose these libraries.
_VARIABLES = (
    "ATEN",
    "BLIS",
    "CUBLAS",
    "CUDA",
    "CUDNN",
    "DNNL",
    "GOMP",
    "KMP",
    "LD_",
    "MKL",
    "MUJOCO",
    "NVIDIA_",
    "OMP",
    "ONEDNN",
    "OPENBLAS",
    "TORCH",
)


def variables() -> dict[str, str]:
    """Variables of libraries that compute."""
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}


def measured(
    path: Path, config: RunConfig, saved: SavedPolicy, asked: Mapping[str, Any], measure: Callable[[], Any]
) -> tuple[dict[str, Any], bool]:
    """The result of this evaluation, and whether it was there already. asked: what chooses episodes and actions, and
    the command's `variables`."""
    folder = _folder(path)
    if folder is None or not _is_self_contained(config) or _sees_pictures(saved.spec):
        return measure(), False
    file = folder / f"{_key(config, saved.weights, asked)}.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["per_episode"]:
            return found, True
    except (OSError, ValueError, LookupError, TypeError):
        pass
    found = measure()
    try:
        folder.mkdir(exist_ok=True)
        write_json(file, found)
    except OSError as error:
        log.warning("%s; the result is not kept for a later comparison", trouble(error) or error)
    return found, False


def _folder(path: Path) -> Path | None:
    """Folder of kept results: in that of the run; None for a file outside a run."""
    run = run_of(find_run(path).resolve())
    return None if run is None else run / FOLDER


def _is_self_contained(config: RunConfig) -> bool:
    ours = all(type(section).__module__.startswith("polyrhythm.") for section in (config.env, config.policy))
    named = config.model_dump(mode="json", include={"env", "policy", "scoring"})
    if not ours or config.launcher not in ("inline", "local") or any("/" in x or ":" in x for x in _texts(named)):
        return False
    return all(_is_installed(one) for one in distributions() if not one.name.startswith("polyrhythm"))


def _is_installed(package: Distribution) -> bool:
    """False for an editable installation, also a legacy one, and for a package on PYTHONPATH: its version says little
    about its files."""
    folder = Path(str(package.locate_file("")))
    return bool(_INSTALLED & set(folder.parts)) and '"editable": true' not in (package.read_text(_ORIGIN) or "")


def _sees_pictures(spec: EnvSpec | None) -> bool:
    """Also where nothing says that it does not."""
    return spec is None or any(one.dtype == "uint8" or len(one.shape) > 2 for one in spec.observation.values())


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _texts(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _texts(value)
    elif isinstance(tree, str):
        yield tree


def _key(config: RunConfig, weights: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        own = torch.as_tensor(tensor).detach().cpu().contiguous()
        found.update(f"{name} {own.dtype} {tuple(own.shape)}\n".encode())
        found.update(own.reshape(-1).view(torch.uint8).numpy().data)
    plain = {
        "package": _package(),
        "config": config.model_dump(mode="json", exclude=_UNREAD),
        "asked": dict(asked),
        "packages": sorted(f"{one.name} {one.version}" for one in distributions()),
        "machine": [sys.version, platform.machine(), _processor(), *_devices()],
    }
    found.update(json.dumps(plain, sort_keys=True).encode())
    return found.hexdigest()[:32]


@cache
def _package() -> str:
    """Hash of the files of this package, as this process found them first."""
    found, package = hashlib.sha256(), Path(polyrhythm.__file__).parent
    for file in sorted(package.rglob("*")):
        if file.is_file() and file.parent.name != "__pycache__":
            found.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return found.hexdigest()


def _devices() -> list[str]:
    try:
        driver = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        driver = ""
    return [driver, *(torch.cuda.get_device_name(number) for number in range(count_devices()))]


def _processor() -> str:
    """Name and features of the processor, by which libraries choose their arithmetic."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
