"""Check whether this machine can run the quickstart, by trying each part; name what is missing and how to fix it.

With ENV, such as `maniskill`: check instead what this environment needs. Exit status 0 if it can run, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyrhythm.conformance import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("env", nargs="?", metavar="ENV", help="an environment's type (also: module:Class)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.pipeline.validation.doctor import examine, examine_env

    findings = []
    for finding in examine_env(arguments.env) if arguments.env else examine():
        findings.append(finding)
        if not arguments.json:
            print(line(finding), flush=True)
    missing = [finding.name for finding in findings if finding.state == "missing"]
    if arguments.json:
        print(json.dumps({"ready": not missing, "checks": list(map(plain, findings))}, indent=2))
    else:
        print(f"missing: {', '.join(missing)}" if missing else f"ready for {arguments.env or 'the quickstart'}")
    return 1 if missing else 0


def plain(finding: Finding) -> dict[str, str]:
    """The fields by name. `said` and `mend` are older names of `detail` and `fix`, kept for scripts."""
    return {**finding._asdict(), "said": finding.detail, "mend": finding.fix}


def line(finding: Finding) -> str:
    """`ok       python            3.11.7, …`, and below it the command to run, if any."""
    fix = f"\n{'':27}run: {finding.fix}" if finding.fix else ""
    return f"{finding.state:9}{finding.name:18}{finding.detail}{fix}"
