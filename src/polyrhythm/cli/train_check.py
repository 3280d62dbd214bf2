"""`polyrhythm train RECIPE --check`: what is in order, what is missing on this machine, what is wrong."""

from __future__ import annotations

import json
import sys

from polyrhythm.cli.check import line
from polyrhythm.config.schema import RunConfig

#: Exit status where something is missing and nothing is wrong.
MISSING = 3


def check_recipe(config: RunConfig, *, as_json: bool) -> int:
    """Print the findings and a summary. Returns 0: ready; 1: something is wrong; MISSING: something is missing."""
    from polyrhythm.pipeline.validation.static_checks import check_unstarted

    found = list(check_unstarted(config))
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
                print(line(finding, color=sys.stdout.isatty(), encoding=sys.stdout.encoding))
        print(_conclusion(len(lacking), len(failed)))
    return 1 if failed else MISSING if lacking else 0


def _conclusion(lacking: int, failed: int) -> str:
    if not lacking and not failed:
        return "ready to train; nothing was started"
    missing = f"{lacking} thing{'s' * (lacking > 1)} missing (?)" if lacking else ""
    wrong = f"{failed} wrong (✗)" if failed else ""
    rest = "" if failed else "; all else is in order"
    return ", ".join(part for part in (wrong, missing) if part) + rest
