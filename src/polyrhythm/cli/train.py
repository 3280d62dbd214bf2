"""Train a policy with a recipe; section.key=value overrides a setting.

With --check nothing is started: settings, environment, policy, checkpoint and memory are compared in seconds. Exit
status 0: ready; 3: something is missing on this machine (weights, a package, a device, memory); 1: something is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.cli import show
from polyrhythm.cli.arguments import add_cluster, cluster_settings, note_resume_command
from polyrhythm.config.recipes import recipe_names
from polyrhythm.plugin import load, table
from polyrhythm.readable import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from polyrhythm.checks import Examined
    from polyrhythm.config.schema import RunConfig
    from polyrhythm.pipeline.validation.check import ValidatedRun

#: Exit status if something is missing and nothing is wrong.
MISSING = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(recipe_names())
    parser.usage = "%(prog)s [option ...] recipe [section.key=value ...]"
    parser.set_defaults(usage_error=parser.error)
    parser.add_argument("recipe", nargs="?", help=f"one of {names}; or the path of a YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings that differ from the recipe"
    )
    parser.add_argument(
        "--check", action="store_true", help="start nothing; say what is missing (status 3) or wrong (status 1)"
    )
    parser.add_argument(
        "--simulated-devices",
        type=int,
        metavar="N",
        help="take this machine, or each node of a cluster, to have N devices, which compute on the CPU "
        "(placement.simulated_devices)",
    )
    add_cluster(parser, "--check: ")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of this run (default: runs/<recipe>/<time>)")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    for name in _instead():
        load("command", name).add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.recipe is None:
        arguments.usage_error(f"name a recipe: {', '.join(recipe_names())}; or the path of a YAML file")
    if arguments.simulated_devices is not None:
        arguments.overrides += [f"placement.simulated_devices={arguments.simulated_devices}"]
    if arguments.cluster is not None and not arguments.check:
        arguments.usage_error(f"--cluster {arguments.cluster} is for --check; leave it out, and set ray.address")
    arguments.overrides += cluster_settings(arguments.cluster)
    for name in _instead():
        status: int | None = load("command", name).run(arguments)
        if status is not None:
            return status
    from polyrhythm.config.load import load_config

    config = load_config(arguments.recipe, arguments.overrides)
    # Imported late, so that an invalid key is reported before torch is loaded.
    from polyrhythm.pipeline.persistence.resume_rules import new_folder, started
    from polyrhythm.pipeline.validation.check import validate_run

    config, folder = started(config, arguments.out)
    if arguments.check:
        return check_unstarted(config, as_json=arguments.json)
    checked = validate_run(config, begun=folder is not None)
    if folder is None:
        folder = new_folder(config, arguments.out)
    return train_in(folder, checked, as_json=arguments.json)


def _instead() -> list[str]:
    """Plugin commands that may act instead of training here: `train --NAME`, whose `run` returns None otherwise."""
    return [name for name in table("command") if name.startswith("train --")]


def train_in(folder: Path, checked: ValidatedRun, *, as_json: bool) -> int:
    """Train in the folder, which may hold an earlier part of the run, and print the result."""
    from polyrhythm.observe.run_folder import REPORT_FILE, SUMMARY_FILE
    from polyrhythm.pipeline.hooks import open_display
    from polyrhythm.pipeline.train import train

    with note_resume_command(folder), open_display(sys.stderr) as live:
        summary = train(checked, folder, live)
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        print(show.run_lines(summary))
        print(f"summary: {folder / SUMMARY_FILE}")
        if (folder / REPORT_FILE).is_file():
            print(f"report: {folder / REPORT_FILE}")
    return 0


def check_unstarted(config: RunConfig, *, as_json: bool) -> int:
    """Implements `polyrhythm train RECIPE --check`: print the findings and a conclusion.

    Returns 0: ready; 1: something is wrong; MISSING: something is missing.
    """
    from polyrhythm.pipeline.validation.check import examine

    return print_findings(list(examine(config, "machine")), as_json=as_json)


def print_findings(
    found: Sequence[Examined], *, as_json: bool, ready: str = "ready to train; nothing was started"
) -> int:
    """Print findings and a conclusion, `ready` if nothing is missing or wrong. Returns as `check_unstarted`."""
    lacking, failed = ([finding for _, finding in found if finding.state == state] for state in ("missing", "failed"))
    if as_json:
        checks = [{"part": part, **finding._asdict()} for part, finding in found]
        told = {
            "ready": not (lacking or failed),
            "missing": [finding.detail for finding in lacking],
            "failed": [finding.detail for finding in failed],
            "checks": checks,
        }
        print(json.dumps(told, indent=2))
    else:
        for _, finding in found:
            if finding.detail or finding.state != "ok":
                print(show.finding_line(finding, color=sys.stdout.isatty(), encoding=sys.stdout.encoding))
        print(_conclusion(len(lacking), len(failed)) or ready)
    return 1 if failed else MISSING if lacking else 0


def _conclusion(lacking: int, failed: int) -> str:
    if not lacking and not failed:
        return ""
    missing = f"{counted(lacking, 'thing')} missing (?)" if lacking else ""
    wrong = f"{failed} wrong (✗)" if failed else ""
    rest = "" if failed else "; all else is in order"
    return ", ".join(part for part in (wrong, missing) if part) + rest
