"""Run the supervised warm start alone: demonstrations and imitation, for `train RECIPE init_from=DIR`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.cli import show
from polyrhythm.cli.arguments import add_recipe, note_resume_command

if TYPE_CHECKING:
    from polyrhythm.config.schema import RunConfig
    from polyrhythm.pipeline.validation.check import ValidatedRun

#: Overrides that precede the user's, so that a recipe without demonstrations or supervised training gets their
#: defaults.
IMITATION = ("demonstrations={}", "supervised={}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "[--demos FILE.npz|FOLDER] [--out DIR] [--json]")
    parser.add_argument(
        "--demos", type=Path, metavar="PATH", help="demonstrations to imitate: a file or folder of polyrhythm demos"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of this run (default: runs/<recipe>-sft/<time>)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.config.load import load_config

    config = load_config(arguments.recipe, [*IMITATION, *arguments.overrides])
    from polyrhythm.pipeline.persistence.resume_rules import new_folder, run_to_resume
    from polyrhythm.plugins.demonstrations.warm_start import check_demonstrations, sft_config, validate_imitation

    checked = validate_imitation(sft_config(config))
    config = checked.config
    folder = run_to_resume(config, arguments.out)
    check_demonstrations(arguments.demos, checked)
    if folder is None:
        folder = new_folder(config, arguments.out)
    overrides = [word for word in arguments.overrides if not word.startswith("resume=")]
    words = [arguments.recipe, *overrides]
    return _imitate(folder, checked, arguments.demos, words, as_json=arguments.json)


def imitate_in(folder: Path, config: RunConfig, *, as_json: bool) -> int:
    from polyrhythm.pipeline.persistence.resume_rules import naming_where_it_began
    from polyrhythm.plugins.demonstrations.warm_start import validate_imitation

    with naming_where_it_began(folder):
        checked = validate_imitation(config)
    return _imitate(folder, checked, None, None, as_json=as_json)


def _imitate(folder: Path, checked: ValidatedRun, demos: Path | None, words: list[str] | None, *, as_json: bool) -> int:
    """Imitate in the folder and print the result. words: recipe and overrides of the training command to suggest."""
    from polyrhythm.pipeline.hooks import open_display
    from polyrhythm.pipeline.validation.fit import learns_from_rewards
    from polyrhythm.plugins.demonstrations.warm_start import imitate

    with note_resume_command(folder), open_display(sys.stderr) as live:
        summary = imitate(checked, folder, demos, live)
    if as_json:
        print(json.dumps({"folder": str(folder), **summary}, indent=2))
        return 0
    experts = {f"the expert, {task}": result for task, result in summary.pop("tasks", {}).items()}
    print(show.lines({**summary, **experts}))
    print(f"to evaluate: polyrhythm eval {folder}")
    if not learns_from_rewards(checked.spec, checked.policy):
        print("this policy cannot learn from rewards: its log-probs do not depend on its parameters")
    elif words is not None:
        print(f"to train: polyrhythm train {shlex.join([*words, f'init_from={folder}'])}")
    return 0
