"""Write a run's policy as one folder of safetensors, whatever the trainer that saved it.

A policy with a released layout (the published VLA policies, a language model from a folder) is written in that layout,
or as adapters of its base; any other as model.safetensors, with the tensors by their names in the policy, and
policy.json, with its settings and the form of its environment; eval, init_from and load_policy take that folder. The
weights are the newest of the run; those of its best.pt, of a saved run or of a trainer's state, sharded over ranks or
not, where that is named.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyrhythm.cli.show import aligned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        metavar="RUN",
        help="folder of a run, its best.pt or policy.pt, one of its checkpoints/run-* or trainer-*",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="the new folder")
    parser.add_argument(
        "--base", metavar="FOLDER", help="the released folder that was trained (default: policy.checkpoint)"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(arguments: argparse.Namespace) -> int:
    export_and_tell(arguments.path, arguments.out, arguments.base, as_json=arguments.json)
    return 0


def export_and_tell(path: Path, out: Path, base: str | None, *, as_json: bool) -> None:
    """Write the policy of `path` into the new folder `out`, and print what was written."""
    from polyrhythm.pipeline.trained_policy import export_policy

    tell(export_policy(path.expanduser(), out.expanduser(), base), as_json=as_json)


def tell(told: Mapping[str, Any], *, as_json: bool) -> None:
    print(json.dumps(told, indent=2) if as_json else aligned((key, str(value)) for key, value in told.items()))
