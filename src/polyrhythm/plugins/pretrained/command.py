"""Released checkpoint folders on the command line: `polyrhythm policies inspect | merge`."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.cli.export import tell
from polyrhythm.cli.show import aligned
from polyrhythm.errors import ConfigError

if TYPE_CHECKING:
    from polyrhythm.plugins.pretrained.adapters import Adapters
    from polyrhythm.policies.base import FolderFormat

log = logging.getLogger(__name__)


def _format_of(folder: Path) -> FolderFormat:
    """The format, among those of all policies, that recognises the folder. ConfigError: none does."""
    from polyrhythm.config.registry import known_types, resolve
    from polyrhythm.plugin import import_address
    from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
    from polyrhythm.policies.traits import settings_traits

    opened = Checkpoint.open(folder)
    for address in dict.fromkeys(settings_traits(resolve("policy", name)).folders for name in known_types("policy")):
        if address and (found := import_address(address)()).recognises(folder):
            return found  # type: ignore[no-any-return]
    opened.require("")
    raise AssertionError("a folder of a known architecture is recognised")


def inspect(folder: Path, arguments: argparse.Namespace) -> int:
    """Print a description of the folder; return 1 if tensors are missing or do not fit."""
    from polyrhythm.plugins.pretrained.adapters import Adapters
    from polyrhythm.plugins.pretrained.folder_files import ADAPTER_CONFIG

    if (folder / ADAPTER_CONFIG).is_file() and not any(folder.glob("model*.safetensors*")):
        return _inspect_adapters(Adapters.open(folder), arguments)
    found = _format_of(folder).inspect(folder)
    print(json.dumps(found.plain, indent=2) if arguments.json else found.text)
    return 0 if found.fits else 1


def _inspect_adapters(found: Adapters, arguments: argparse.Namespace) -> int:
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
    use = f"polyrhythm policies merge {found.folder} --base {base} --out NEW"
    print(aligned([*rows, ("to use it", use)]))
    return 0


def merge(folder: Path, arguments: argparse.Namespace) -> int:
    from polyrhythm.plugins.pretrained.adapters import Adapters

    adapters, out = Adapters.open(folder), Path(arguments.out).expanduser()
    if not (base := arguments.base):
        named = f"add --base {shlex.quote(adapters.base)}" if adapters.base else "add --base FOLDER"
        raise ConfigError(f"{folder}: the base is opened only where the command names it; {named}")
    into = Path(base).expanduser()
    how = _format_of(into)
    if adapters.base and Path(adapters.base).expanduser().resolve() != into.resolve():
        log.warning("the adapters were trained on %s (adapter_config.json) and are merged into %s", adapters.base, base)
    how.merge(folder, into, out)
    count = len(adapters.modules)
    merged = count if arguments.json else f"{count} matri{'x' if count == 1 else 'ces'}"
    tell({"merged": merged, "base": base, "out": str(out)}, as_json=arguments.json)
    return 0
