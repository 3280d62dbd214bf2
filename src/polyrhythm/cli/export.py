"""Write a run's policy as one folder of safetensors, whatever the trainer that saved it.

A policy with a released layout (the published VLA policies, a language model from a folder) is written in that layout,
or as adapters of its base; any other as model.safetensors, with the tensors by their names in the policy, and
policy.json, with its settings and the form of its environment; eval, init_from and load_policy take that folder. The
weights are the newest of the run; those of its best.pt, of a saved run or of a trainer's state, sharded over ranks or
not, where that is named.

With --push hf://owner/name it is uploaded with a model card, as a new revision; the settings in it name folders of
this machine by their last part.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from polyrhythm.cli.show import aligned

if TYPE_CHECKING:
    from polyrhythm.sources import FolderSource


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        metavar="RUN",
        help="folder of a run, its best.pt or policy.pt, one of its checkpoints/run-* or trainer-*",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="the new folder; may be left out with --push")
    add_push(parser)
    parser.add_argument(
        "--base", metavar="FOLDER", help="the released folder that was trained (default: policy.checkpoint)"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.errors import ConfigError
    from polyrhythm.pipeline.trained_policy import export_policy

    path, name = arguments.path.expanduser(), arguments.push
    source = push_source(name, public=arguments.public)
    if source is None:
        if arguments.out is None:
            raise ConfigError(
                "export: where to? name the new folder by --out, or a repository by --push hf://owner/name"
            )
        export_and_tell(path, arguments.out, arguments.base, as_json=arguments.json)
        return 0
    source.check_push(name, "model")
    with TemporaryDirectory() as temporary:
        out = (arguments.out or Path(temporary) / "policy").expanduser()
        told = export_policy(path, out, arguments.base)
        pushed = source.push(out, name, "model", public=arguments.public, run=path)
    if arguments.out is None:
        del told["out"]
    tell({**told, "pushed": pushed}, as_json=arguments.json)
    return 0


def add_push(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--push", metavar="hf://OWNER/NAME", help="upload it to this repository, with a card")
    parser.add_argument("--public", action="store_true", help="with --push: everyone may read a repository that is new")


def push_source(name: str | None, *, public: bool) -> FolderSource | None:
    """The source of the name of `--push`. ConfigError: it has none, or --public is given without a name."""
    from polyrhythm.errors import ConfigError
    from polyrhythm.sources import source

    if name is None and public:
        raise ConfigError("--public belongs to --push hf://OWNER/NAME; add that, or leave it out")
    return None if name is None else source(name, "--push")


def export_and_tell(path: Path, out: Path, base: str | None, *, as_json: bool) -> None:
    """Write the policy of `path` into the new folder `out`, and print what was written."""
    from polyrhythm.pipeline.trained_policy import export_policy

    tell(export_policy(path.expanduser(), out.expanduser(), base), as_json=as_json)


def tell(told: Mapping[str, Any], *, as_json: bool) -> None:
    print(json.dumps(told, indent=2) if as_json else aligned((key, str(value)) for key, value in told.items()))
