"""Check a recipe without training: its settings, this machine, the contracts of environment and policy.

Exit status 0 if all checks pass, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from polyrhythm.cli.arguments import add_cluster, add_recipe, cluster_settings
from polyrhythm.cli.show import finding_line
from polyrhythm.errors import ConfigError

if TYPE_CHECKING:
    from polyrhythm.checks import Examined


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "[--cluster FILE] [--json]")
    add_cluster(parser, "")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.config.load import load_config

    config = load_config(arguments.recipe, [*arguments.overrides, *cluster_settings(arguments.cluster)])
    from polyrhythm.pipeline.persistence.resume_rules import started
    from polyrhythm.pipeline.placed import describe_seats, place
    from polyrhythm.pipeline.validation.check import examine

    config, _ = started(config, None)
    found: list[Examined] = []
    for examined in examine(config):
        if not arguments.json:
            if not found or found[-1].part != examined.part:
                print(examined.part)
            print(finding_line(examined.finding, color=sys.stdout.isatty(), encoding=sys.stdout.encoding), flush=True)
        found.append(examined)
    failed = [f"{part}: {finding.name}" for part, finding in found if finding.state == "failed"]
    if arguments.json:
        checks = [{"part": part, **finding._asdict()} for part, finding in found]
        try:
            seats = describe_seats(place(config).seats)
        except ConfigError:
            seats = None
        print(json.dumps({"ready": not failed, "seats": seats, "checks": checks}, indent=2))
    elif failed:
        print(f"\n{len(failed)} of {len(found)} checks failed: {', '.join(failed)}")
    else:
        notes = sum(finding.state == "note" for _, finding in found)
        noted = f", {notes} with a note" if notes else ""
        print(f"\nall {len(found)} checks passed{noted}")
    return 1 if failed else 0
