"""Check a recipe without training: its settings, this machine, the contracts of environment and policy.

Exit status 0 if all checks pass, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from typing import TYPE_CHECKING

from polyrhythm.cli.arguments import add_recipe
from polyrhythm.cli.show import columns
from polyrhythm.errors import ConfigError
from polyrhythm.readable import visible

if TYPE_CHECKING:
    from polyrhythm.checks import Examined
    from polyrhythm.config.schema import RunConfig
    from polyrhythm.conformance import Finding

_MARKS = {"ok": "✓", "note": "!", "missing": "?", "failed": "✗"}
_PLAIN_MARKS = {"ok": "+", "note": "!", "missing": "?", "failed": "x"}
_COLORS = {"ok": "\033[32m", "note": "\033[33m", "missing": "\033[33m", "failed": "\033[31m"}
_WIDTH = 110
_INDENT = 34
#: Exit status if something is missing and nothing is wrong.
MISSING = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "[--json]")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.config.load import load_config

    config = load_config(arguments.recipe, arguments.overrides)
    from polyrhythm.pipeline.validation.all_checks import examine

    found: list[Examined] = []
    for examined in examine(config):
        if not arguments.json:
            if not found or found[-1].part != examined.part:
                print(examined.part)
            print(line(examined.finding, color=sys.stdout.isatty(), encoding=sys.stdout.encoding), flush=True)
        found.append(examined)
    failed = [f"{part}: {finding.name}" for part, finding in found if finding.state == "failed"]
    if arguments.json:
        checks = [{"part": part, **finding._asdict()} for part, finding in found]
        print(json.dumps({"ready": not failed, "seats": _seats(config), "checks": checks}, indent=2))
    else:
        print(f"\n{len(failed)} of {len(found)} checks failed: {', '.join(failed)}" if failed else _ready(found))
    return 1 if failed else 0


def _seats(config: RunConfig) -> dict[str, dict[str, str | int]] | None:
    from polyrhythm.pipeline.placed import describe_seats, place

    try:
        return describe_seats(place(config).seats)
    except ConfigError:
        return None


def line(finding: Finding, *, color: bool = False, encoding: str | None = "utf-8") -> str:
    """`  ✓ act                          actions [2, 1, 4] …`, and below it the fix, if any."""
    mark = (_MARKS if _shows_marks(encoding) else _PLAIN_MARKS)[finding.state]
    head = f"  {_COLORS[finding.state]}{mark}\033[0m" if color else f"  {mark}"
    text = [visible(finding.detail)] * bool(finding.detail) + [visible(f"fix: {finding.fix}")] * bool(finding.fix)
    lines = [part for one in text for part in textwrap.wrap(one, columns(_WIDTH) - _INDENT, break_long_words=False)]
    return (
        f"{head} {finding.name:{_INDENT - 5}} " + f"\n{'':{_INDENT}}".join(lines) if lines else f"{head} {finding.name}"
    )


def _shows_marks(encoding: str | None) -> bool:
    try:
        "".join(_MARKS.values()).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _ready(found: list[Examined]) -> str:
    notes = sum(finding.state == "note" for _, finding in found)
    return f"\nall {len(found)} checks passed" + f", {notes} with a note" * bool(notes)


# ------------------------------------------------------------ train --check


def check_unstarted(config: RunConfig, *, as_json: bool) -> int:
    """Implements `polyrhythm train RECIPE --check`: print the findings and a conclusion.

    Returns 0: ready; 1: something is wrong; MISSING: something is missing.
    """
    from polyrhythm.pipeline.validation.all_checks import examine

    found = list(examine(config, "machine"))
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
