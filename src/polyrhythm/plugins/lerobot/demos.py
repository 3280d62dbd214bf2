"""Record demonstrations of the environment's expert, or of a run's policy, and print the success rate per task."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrhythm.cli import show
from polyrhythm.cli.arguments import add_recipe, count
from polyrhythm.cli.export import add_push, push_source
from polyrhythm.plugins.demonstrations.command import IMITATION

if TYPE_CHECKING:
    from polyrhythm.config.schema import RunConfig
    from polyrhythm.plugins.demonstrations.recording import OnProgress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "--out FOLDER|FILE.npz [--episodes-per-task N] [--policy RUN] [--fps N] [--json]")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="PATH",
        help="a folder for a LeRobot dataset (v3.0), where a stopped recording goes on; or a new FILE.npz",
    )
    parser.add_argument(
        "--episodes-per-task", type=count, metavar="N", help="episodes per task (default: the recipe's, else 8)"
    )
    parser.add_argument(
        "--policy", type=Path, metavar="RUN", help="record this run's policy, acting greedily, not the expert (folder)"
    )
    parser.add_argument(
        "--fps", type=count, default=10, metavar="N", help="frames per second that a folder's timestamps say (10)"
    )
    add_push(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.config.load import load_config

    episodes, out, policy = arguments.episodes_per_task, arguments.out, arguments.policy
    overrides = [f"demonstrations.episodes_per_task={episodes}"] if episodes else []
    config = load_config(arguments.recipe, [*IMITATION, *arguments.overrides, *overrides])
    to_file = out.suffix == ".npz"
    source = push_source(arguments.push, public=arguments.public)
    if source is not None:
        if to_file:
            from polyrhythm.errors import ConfigError

            raise ConfigError(f"--push = {arguments.push}: a folder is uploaded, not {out}; name a folder with --out")
        source.check_push(arguments.push, "dataset")
    if to_file:
        from polyrhythm.errors import ConfigError
        from polyrhythm.observe.run_folder import take_file

        if policy:
            raise ConfigError(f"--policy = {policy}: a policy is recorded in a folder; name one with --out")
        take_file(out)
    from polyrhythm.pipeline.hooks import open_display

    with open_display(sys.stderr) as live:
        if live:
            live.phase("demonstrations", time.monotonic())
        on_progress = live.count_episodes if live is not None else lambda *_: None
        if to_file:
            result = _record_file(config, out, on_progress)
        else:
            from polyrhythm.plugins.lerobot.recording import record_folder

            try:
                result = {"folder": str(out), **record_folder(config, out, policy, arguments.fps, on_progress)}
            except KeyboardInterrupt as interrupt:
                interrupt.add_note(f"{out} keeps what is complete; the same command goes on")
                raise
    if source is not None:
        result["pushed"] = source.push(out, arguments.push, "dataset", public=arguments.public)
    print(json.dumps(result, indent=2) if arguments.json else show.lines(show.flat(result)))
    return 0


def _record_file(config: RunConfig, file: Path, on_progress: OnProgress) -> dict[str, Any]:
    from polyrhythm.plugins.demonstrations.recording import record
    from polyrhythm.plugins.demonstrations.warm_start import refuse_without_expert, validate_imitation

    policy = validate_imitation(config).policy
    refuse_without_expert(config)
    assert config.demonstrations is not None
    recorded = record(config, config.demonstrations, policy.chunk, on_progress)
    recorded.demonstrations.save(file)
    return {"file": str(file), **recorded.summary()}
