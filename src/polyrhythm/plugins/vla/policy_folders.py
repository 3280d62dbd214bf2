"""Released checkpoint folders on the command line: `polyrhythm policies inspect | merge | export`."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrhythm.cli.show import aligned, size_text
from polyrhythm.errors import ConfigError

if TYPE_CHECKING:
    from polyrhythm.plugins.vla.inspection import Inspection

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
    from polyrhythm.plugins.vla.adapters import Adapters
    from polyrhythm.plugins.vla.folder_files import ADAPTER_CONFIG
    from polyrhythm.plugins.vla.inspection import inspect

    if (folder / ADAPTER_CONFIG).is_file() and not any(folder.glob("model*.safetensors*")):
        return _inspect_adapters(Adapters.open(folder), arguments)
    if (told := _language_model(folder)) is not None:
        print(json.dumps(told, indent=2) if arguments.json else _language_lines(told))
        return 0
    found = inspect(folder)
    print(json.dumps(found.plain(), indent=2) if arguments.json else "\n".join(inspection_lines(found)))
    return 0 if found.fits else 1


def _language_model(folder: Path) -> dict[str, Any] | None:
    """What a folder of a causal language model holds; None if it is of another architecture, or of none that
    transformers knows. ConfigError: it is a model that cannot be used, such as an encoder."""
    from polyrhythm.plugins.language.causal_lm.network import is_known, open_config
    from polyrhythm.plugins.vla.checkpoint import Checkpoint

    if not (folder / "config.json").is_file():
        return None
    opened = Checkpoint.open(folder)
    if opened.architecture or not is_known(opened.config.get("model_type")):
        return None
    config = open_config(str(folder))
    return {
        "architecture": "causal_lm",
        "folder": str(folder),
        "model": config.model_type,
        "parameters": opened.parameters,
        "vocabulary": config.vocab_size,
        "context": getattr(config, "max_position_embeddings", None),
        "tokenizer": (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file(),
    }


def _language_lines(told: dict[str, Any]) -> str:
    folder = told["folder"]
    rows = {
        "architecture": f"causal_lm ({told['model']})",
        "tensors": f"{told['parameters']:,} numbers",
        "tokens": f"{told['vocabulary']:,} in its vocabulary, a context of {told['context'] or 'any number'}",
        "tokenizer": "here" if told["tokenizer"] else "none: training needs one in this folder",
    }
    recipe = f"policy: {{type: causal_lm, checkpoint: {folder}}}\nenv:\n  tokenizer: {folder}   # of a text environment"
    return f"{aligned(rows.items())}\n\n{recipe}"


def inspection_lines(found: Inspection) -> list[str]:
    """An inspection in words."""
    from polyrhythm.cli.policies import memory_lines

    dtypes = ", ".join(f"{count / found.parameters:.0%} {dtype}" for dtype, count in found.dtypes.items())
    assumed = " (assumed: no config.json)" * found.horizon_assumed
    rows = {
        "architecture": found.architecture,
        "tensors": f"{found.parameters:,} numbers ({dtypes}), {size_text(found.file_bytes)} in {_count(found.files)}",
        "actions": f"{found.horizon}{assumed} predicted, of {found.action_dim} entries",
        "robots": ", ".join(found.robots) or _robots_without_keys(found),
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


def _robots_without_keys(found: Inspection) -> str:
    if found.statistics:
        return "one without a key: leave policy.robot out"
    return "none: no normalisation statistics were found"


def _count(files: int) -> str:
    return "1 file" if files == 1 else f"{files} files"


def _inspect_adapters(found: Any, arguments: argparse.Namespace) -> int:
    told = {
        "adapters": len(found.modules),
        "rank": max(found.ranks.values(), default=0),
        "alpha": found.config.get("lora_alpha"),
        "base": found.base,
        "whole tensors": len(found.whole),
        "modules": list(found.modules),
    }
    if arguments.json:
        print(json.dumps({"folder": str(found.folder), **told}, indent=2))
        return 0
    rows = [(name, str(value)) for name, value in told.items() if name != "modules"]
    base = shlex.quote(found.base or "FOLDER")
    merge = f"polyrhythm policies merge {found.folder} --base {base} --out NEW"
    print(aligned([*rows, ("to use it", merge)]))
    return 0


def _merge(folder: Path, out: Path, arguments: argparse.Namespace) -> int:
    from polyrhythm.cli.export import tell
    from polyrhythm.plugins.language.causal_lm import folders
    from polyrhythm.plugins.vla.adapters import Adapters, merge
    from polyrhythm.plugins.vla.architectures import architecture
    from polyrhythm.plugins.vla.checkpoint import Checkpoint
    from polyrhythm.plugins.vla.fitting import check_whole

    adapters = Adapters.open(folder)
    if not (base := arguments.base):
        named = f"add --base {shlex.quote(adapters.base)}" if adapters.base else "add --base FOLDER"
        raise ConfigError(f"{folder}: the base is opened only where the command names it; {named}")
    opened = Checkpoint.open(base)
    if adapters.base and Path(adapters.base).expanduser().resolve() != opened.folder.resolve():
        log.warning("the adapters were trained on %s (adapter_config.json) and are merged into %s", adapters.base, base)
    if opened.architecture:
        check_whole(opened)
        merge(adapters, opened, architecture(opened.architecture), out)
    else:
        folders.merge(adapters, opened, out)
    count = len(adapters.modules)
    merged = count if arguments.json else f"{count} matri{'x' if count == 1 else 'ces'}"
    tell({"merged": merged, "base": base, "out": str(out)}, as_json=arguments.json)
    return 0


def _export(path: Path, out: Path, arguments: argparse.Namespace) -> int:
    from polyrhythm.cli.export import tell
    from polyrhythm.pipeline.export import export

    tell(export(path, out, arguments.base), as_json=arguments.json)
    return 0
