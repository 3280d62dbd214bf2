"""Run the scheduler on a simulated cluster, in virtual time: throughput, utilisation, waiting, lag, ledger.

The cluster is a YAML description's (FILE), or with --profile that of a recipe whose stations take what a profile says.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s [-h] [--trace PATH] [--json] (FILE | --profile PROFILE [--gpus N] RECIPE [section.key=value ...])"
    )
    parser.add_argument("file", metavar="FILE", help="YAML description of a cluster, or a shipped one; or a recipe")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="settings of the recipe")
    parser.add_argument("--profile", type=Path, metavar="PROFILE", help="what `polyrhythm profile` has measured")
    parser.add_argument("--gpus", type=int, metavar="N", help="devices of another machine (default: this one)")
    parser.add_argument("--trace", type=Path, metavar="PATH", help="write a timeline for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.cli import show
    from polyrhythm.config.load import load_config
    from polyrhythm.errors import ConfigError
    from polyrhythm.plugins.planning.cluster import CORES, cluster_settings
    from polyrhythm.plugins.planning.profile import load_profile, refuse_other_machine, this_machine
    from polyrhythm.plugins.virtual.simulate import find_cluster, load_cluster, rows, simulate_traced

    if arguments.profile is None:
        if extra := [*arguments.overrides, *["--gpus"] * (arguments.gpus is not None)]:
            raise ConfigError(f"simulate {arguments.file}: {extra[0]} is for a recipe; add --profile, or leave it out")
        settings = load_cluster(find_cluster(Path(arguments.file)))
    else:
        if arguments.gpus is not None and arguments.gpus < 0:
            raise ConfigError(f"--gpus = {arguments.gpus}: not a number of devices; write 0 or more")
        profile, config = load_profile(arguments.profile), load_config(arguments.file, arguments.overrides)
        if arguments.gpus is None:
            refuse_other_machine(profile, this_machine())
        settings = cluster_settings(profile, config, devices=arguments.gpus)
    summary = simulate_traced(settings, arguments.trace)
    if arguments.profile is not None:  # cores are devices of the simulation too
        numbers = {number for _, _, devices in settings.seats() for number in devices}
        summary["gpus"] = float(sum(number < CORES for number in numbers))
    print(json.dumps(summary, indent=2) if arguments.json else show.aligned(rows(summary)))
    return 0
