"""Record demonstrations of the environment's scripted expert, and print its success rate per task."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from polyrhythm.cli import show
from polyrhythm.cli.numbers import count
from polyrhythm.cli.recipe_arguments import IMITATION, add_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "--out FILE.npz [--episodes-per-task N] [--json]")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.npz", help="a new file to write them to")
    parser.add_argument(
        "--episodes-per-task", type=count, metavar="N", help="episodes per task (default: the recipe's, else 8)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.config.load import load_config
    from polyrhythm.observe.run_folder import take_file

    episodes = arguments.episodes_per_task
    overrides = [f"demonstrations.episodes_per_task={episodes}"] if episodes else []
    config = load_config(arguments.recipe, [*IMITATION, *arguments.overrides, *overrides])
    take_file(arguments.out)
    from polyrhythm.pipeline.observers.live import live_terminal
    from polyrhythm.pipeline.sft import refuse_without_expert
    from polyrhythm.pipeline.validation.check import validate_run
    from polyrhythm.pipeline.warm_start.demos import record

    policy = validate_run(config, trainer=False).policy
    refuse_without_expert(config)
    assert config.demonstrations is not None
    with live_terminal(sys.stderr) as live:
        if live:
            live.phase("demonstrations", time.monotonic())
        recorded = record(config, config.demonstrations, policy.chunk)
    recorded.demonstrations.save(arguments.out)
    result = {"file": str(arguments.out), **recorded.summary()}
    print(json.dumps(result, indent=2) if arguments.json else show.lines(show.flat(result)))
    return 0
