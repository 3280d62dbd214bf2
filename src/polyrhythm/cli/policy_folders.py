"""Released checkpoint folders on the command line: `polyrhythm policies inspect | merge | export`."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrhythm.cli.show import aligned, size_text
from polyrhythm.errors import ConfigError, MissingError

if TYPE_CHECKING:
    from polyrhythm.pipeline.persistence.checkpoints import SavedPolicy
    from polyrhythm.policies.vla.checkpoint import Checkpoint
    from polyrhythm.policies.vla.inspection import Inspection

log = logging.getLogger(__name__)

#: Command -> how it is written.
COMMANDS = {
    "inspect": "polyrhythm policies inspect FOLDER [--json]",
    "merge": "polyrhythm policies merge ADAPTERS --base FOLDER --out FOLDER",
    "export": "polyrhythm policies export RUN --out FOLDER [--base FOLDER]",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="FOLDER", help="with merge and export: the released folder that was trained")
    parser.add_argument("--out", metavar="FOLDER", help="with merge and export: the new folder")


def refuse_options(arguments: argparse.Namespace) -> None:
    """ConfigError: an option of the commands on folders without one of them."""
    for name in ("base", "out"):
        if value := getattr(arguments, name):
            raise ConfigError(f"--{name} = {value}: it belongs to {' and to '.join(list(COMMANDS.values())[1:])}")


def run(arguments: argparse.Namespace) -> int:
    command = arguments.type
    folders = arguments.overrides
    if len(folders) != 1:
        raise ConfigError(f"policies {command} takes one folder, {len(folders)} are named; write {COMMANDS[command]}")
    if arguments.recipe:
        raise ConfigError(f"--recipe = {arguments.recipe}: policies {command} takes none; write {COMMANDS[command]}")
    folder = Path(folders[0]).expanduser()
    if command == "inspect":
        return _inspect(folder, arguments)
    if not arguments.out:
        raise ConfigError(f"policies {command} needs --out, the new folder; write {COMMANDS[command]}")
    out = Path(arguments.out).expanduser()
    return _merge(folder, out, arguments) if command == "merge" else _export(folder, out, arguments)


def _inspect(folder: Path, arguments: argparse.Namespace) -> int:
    from polyrhythm.policies.vla.adapters import Adapters
    from polyrhythm.policies.vla.folder_files import ADAPTER_CONFIG
    from polyrhythm.policies.vla.inspection import inspect

    if (folder / ADAPTER_CONFIG).is_file() and not any(folder.glob("model*.safetensors*")):
        return _inspect_adapters(Adapters.open(folder), arguments)
    found = inspect(folder)
    print(json.dumps(found.plain(), indent=2) if arguments.json else "\n".join(inspection_lines(found)))
    return 0 if found.fits else 1


def inspection_lines(found: Inspection) -> list[str]:
    """An inspection in words."""
    from polyrhythm.cli.policies import memory_lines

    dtypes = ", ".join(f"{count / found.parameters:.0%} {dtype}" for dtype, count in found.dtypes.items())
    assumed = " (assumed: no config.json)" * found.horizon_assumed
    rows = {
        "architecture": found.architecture,
        "tensors": f"{found.parameters:,} numbers ({dtypes}), {size_text(found.file_bytes)} in {_count(found.files)}",
        "actions": f"{found.horizon}{assumed} predicted, of {found.action_dim} entries",
        "robots": ", ".join(found.robots) or "none: no normalisation statistics were found",
        "cameras": ", ".join(found.cameras) or "not told by the folder",
        "statistics": ", ".join(found.statistics) or "none",
        "tokenizer": found.tokenizer or "none: name one as policy.tokenizer",
        **({"side files": ", ".join(found.side)} if found.side else {}),
        **({"ours": f"{len(found.ours)} tensors of critic and heads in polyrhythm.safetensors"} if found.ours else {}),
        "fit": found.misfit or f"whole: every tensor of {found.architecture} is there, and no other",
        "trainable": ", ".join(f"{train} {count:,}" for train, count in found.trainable.items()),
    }
    told = [aligned(rows.items()), "", *memory_lines(found.memory), ""]
    return [*told, found.recipe or "no lines for a recipe: training refuses a folder that does not fit"]


def _count(files: int) -> str:
    return "1 file" if files == 1 else f"{files} files"


def _inspect_adapters(found: Any, arguments: argparse.Namespace) -> int:
    told = {
        "adapters": len(found.modules),
        "rank": found.config["r"],
        "alpha": found.config.get("lora_alpha"),
        "base": found.base,
        "whole tensors": len(found.replaced),
        "modules": list(found.modules),
    }
    if arguments.json:
        print(json.dumps({"folder": str(found.folder), **told}, indent=2))
        return 0
    rows = [(name, str(value)) for name, value in told.items() if name != "modules"]
    merge = f"polyrhythm policies merge {found.folder} --base {found.base or 'FOLDER'} --out NEW"
    print(aligned([*rows, ("to use it", merge)]))
    return 0


def _merge(folder: Path, out: Path, arguments: argparse.Namespace) -> int:
    from polyrhythm.policies.vla.adapters import Adapters, merge
    from polyrhythm.policies.vla.building import check_whole

    adapters = Adapters.open(folder)
    if not (base := arguments.base or adapters.base):
        raise ConfigError(f"{folder}: its adapter_config.json names no base; add --base FOLDER")
    opened = _open_base(base, folder, arguments)
    check_whole(opened)
    if adapters.base and Path(adapters.base).expanduser().resolve() != opened.folder.resolve():
        log.warning("the adapters were trained on %s (adapter_config.json) and are merged into %s", adapters.base, base)
    merge(adapters, opened, out)
    count = len(adapters.modules)
    merged = count if arguments.json else f"{count} matri{'x' if count == 1 else 'ces'}"
    return _said(arguments, {"merged": merged, "base": base, "out": str(out)})


def _open_base(base: str, of: Path, arguments: argparse.Namespace) -> Checkpoint:
    """The base that the command names, or that the run or adapters `of` were trained on. ConfigError: not there."""
    from polyrhythm.policies.vla.checkpoint import Checkpoint

    if not arguments.base and not Path(base).expanduser().exists():
        raise MissingError(f"{of}: it was trained on {base}, which is not there; name where it is now: --base FOLDER")
    return Checkpoint.open(base)


def _export(path: Path, out: Path, arguments: argparse.Namespace) -> int:
    from polyrhythm.pipeline.persistence.checkpoints import read_policy
    from polyrhythm.policies.vla.adapters import is_adapter, save_adapters
    from polyrhythm.policies.vla.architectures import ARCHITECTURES, architecture
    from polyrhythm.policies.vla.saving import save_folder

    saved = read_policy(path)
    section: Mapping[str, Any] = saved.config["policy"]
    if section["type"] not in ARCHITECTURES:
        raise ConfigError(
            f"{path}: policy.type = {section['type']!r} has no released layout; those that have one are "
            f"{', '.join(ARCHITECTURES)}"
        )
    if not (base := arguments.base or section.get("checkpoint", "")):
        _export_new(path, out, saved)
        return _said(arguments, {"exported": "network", "version": saved.version, "out": str(out)})
    opened = _open_base(base, path, arguments)
    opened.require(section["type"])
    adapted = any(is_adapter(name) for name in saved.weights)
    if adapted:
        lora = section["lora"]
        save_adapters(saved.weights, out, alpha=lora["alpha"], base=str(base), also=tuple(lora.get("also", ())))
    else:
        save_folder(opened, architecture(section["type"]), saved.weights, out)
    what = "adapters" if adapted else "network"
    return _said(arguments, {"exported": what, "version": saved.version, "base": str(base), "out": str(out)})


def _export_new(path: Path, out: Path, saved: SavedPolicy) -> None:
    """The policy of a run that began from a seed: what its file lacks is drawn again."""
    from polyrhythm.config.load import validate
    from polyrhythm.policies.base import as_module, as_settings
    from polyrhythm.policies.vla.adapters import is_adapter
    from polyrhythm.policies.vla.architectures import architecture
    from polyrhythm.policies.vla.saving import save_new
    from polyrhythm.policies.vla.statistics import BOUNDS
    from polyrhythm.policies.vla.tokenizers import WORDS
    from polyrhythm.runtime.memory.tensors import apply_state

    if any(is_adapter(name) for name in saved.weights):
        raise ConfigError(
            f"{path}: it has adapters on a network from a seed, which is in no folder; export a run with another "
            "policy.train, or begin from a checkpoint"
        )
    if saved.spec is None:
        raise ConfigError(f"{path}: the file lacks the environment's form; resume the run once, which writes it again")
    config = validate(saved.config, origin=str(saved.file))
    policy = as_module(
        as_settings(config.policy).build(saved.spec, seed=config.seed, device="cpu", role="train")
    )
    apply_state(policy, saved.weights)
    network = policy.get_submodule("network")
    choices = {"tokenizer": WORDS, "robot": BOUNDS}
    save_new(architecture(saved.config["policy"]["type"]), network.size, policy.state_dict(), out, choices)


def _said(arguments: argparse.Namespace, told: Mapping[str, Any]) -> int:
    print(json.dumps(told, indent=2) if arguments.json else aligned((key, str(value)) for key, value in told.items()))
    return 0
