"""Compare two policies on the same episodes: equal initial states, tasks, and noise where they sample.

Prints the difference B minus A of success and of return, over all and by task, each with a 95% interval that uses the
pairing: Newcombe's for paired rates (1998, method 10), and Student's of the paired differences for returns; and
McNemar's exact p. Episodes that one of the two did not end are left out, and counted.

With --at-least X the exit status decides: 0 if the lower end of the interval of success (of return, where no success is
reported) is at least X, 1 if it is not or cannot be decided, 2 if something is wrong. `--at-least 0`: B is not worse;
`--at-least -0.05`: B is worse by at most five points. A difference of return has no interval, and decides nothing, if
it is of one initial state or the same in all.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from polyrhythm.cli import show
from polyrhythm.cli.arguments import count, whole

if TYPE_CHECKING:
    from polyrhythm.pipeline.persistence.checkpoints import SavedPolicy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [option ...] A B [section.key=value ...]"
    what = "a run (its newest weights), its best.pt or policy.pt, one of its checkpoints/run-*, or an exported policy"
    parser.add_argument("a", metavar="A", help=f"{what}; or hf://owner/name")
    parser.add_argument("b", metavar="B", help="the same")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="settings of both, as in polyrhythm eval"
    )
    parser.add_argument(
        "--episodes", type=count, metavar="N", help="initial states over all tasks (default: A's evaluation, else 128)"
    )
    parser.add_argument("--seed", type=whole, metavar="S", help="seed of the held-out episodes (default: A's)")
    mode = parser.add_mutually_exclusive_group()
    greedy, sampled = "act without noise (default, unless a setting of sampling is given)", "sample actions"
    mode.add_argument("--greedy", action="store_const", const=True, help=greedy)
    mode.add_argument("--sampled", action="store_const", const=False, dest="greedy", help=sampled)
    parser.add_argument("--samples", type=count, metavar="N", help="sample each initial state N times (default: 1)")
    parser.add_argument(
        "--at-least", type=_number, metavar="X", help="lower end that the interval must have, a share of 1 for success"
    )
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON, with every pair")


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number, such as 0, 0.05 or -0.05")
    return number


class _Side(NamedTuple):
    """A policy to compare, with its run's settings."""

    path: Path
    config: Any
    saved: SavedPolicy


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.errors import RunHalted
    from polyrhythm.plugins.paired.differences import difference, pair_up
    from polyrhythm.plugins.paired.measured import variables
    from polyrhythm.sources import fetched_folder

    before = variables()
    paths = [fetched_folder(named, what="eval compare") for named in (arguments.a, arguments.b)]
    sides = [_load(path, arguments.overrides) for path in paths]
    env = _refuse_other_episodes(*sides)
    own = sides[0].config.evaluation
    seed = own.seed if arguments.seed is None else arguments.seed
    results = [_measure(side, arguments, seed, own.episodes, before) for side in sides]
    a, b = (result["per_episode"] for result, _ in results)
    pairs = pair_up(a, b)
    if not pairs:
        raise RunHalted("no episode ended in both evaluations; see the log for why")
    tasks = dict.fromkeys(pair.task for pair in pairs)
    found = difference(pairs)
    decided = found["success"] or found["return"]
    told = {
        **{name: _described(side, *own) for name, side, own in zip("ab", sides, results, strict=True)},
        **found,
        "unpaired": len(a) + len(b) - 2 * len(pairs),
        "tasks": {task: difference([pair for pair in pairs if pair.task == task]) for task in tasks},
        "seed": seed,
        "greedy": results[0][0]["greedy"],
        "env": env,
        "at_least": arguments.at_least,
        "met": _is_met(decided["low"], arguments.at_least),
    }
    if arguments.json:
        outcomes = [{"task": pair.task, "success": pair.success, "return": pair.returns} for pair in pairs]
        print(json.dumps({**told, "per_pair": outcomes}, indent=2))
    else:
        print(_as_text(told))
    return 0 if arguments.at_least is None or told["met"] else 1


def _is_met(low: float | None, at_least: float | None) -> bool | None:
    """None: nothing was asked, or there is no interval to decide by."""
    return None if low is None or at_least is None else low >= at_least


def _load(path: Path, overrides: Sequence[str]) -> _Side:
    from polyrhythm.config.load import validate
    from polyrhythm.observe.run_folder import find_run
    from polyrhythm.pipeline.evaluation.standalone import with_overrides
    from polyrhythm.pipeline.persistence.checkpoints import read_policy
    from polyrhythm.pipeline.persistence.resume_rules import naming_where_it_began, refuse_missing_folders

    path = find_run(path)
    with naming_where_it_began(path):
        saved = read_policy(path)
        config = with_overrides(validate(saved.config, origin=str(saved.file)), overrides)
    refuse_missing_folders(config, "eval compare", path)
    return _Side(path, config, saved)


def _refuse_other_episodes(a: _Side, b: _Side) -> dict[str, Any]:
    """Settings of the environment, which both have. ConfigError: they differ, so that the episodes would."""
    from polyrhythm.errors import ConfigError
    from polyrhythm.pipeline.persistence.resume_rules import as_written, differences

    ours, theirs = (side.config.model_dump(mode="json")["env"] for side in (a, b))
    if differing := differences(ours, theirs, "env."):
        path, first, second = differing[0]
        remedy = "compare runs of one environment"
        if path != "env.type":
            remedy = f"give both the same, as {path}={as_written(first)}"
        more = f" (differ, too: {', '.join(other for other, _, _ in differing[1:])})" if differing[1:] else ""
        raise ConfigError(
            f"{path} is {as_written(first)} in {a.path} and {as_written(second)} in {b.path}{more}, so these would not "
            f"be the same episodes; {remedy}"
        )
    return dict(ours)


def _measure(
    side: _Side, arguments: argparse.Namespace, seed: int, own: int, variables: Mapping[str, str]
) -> tuple[dict[str, Any], bool]:
    """The evaluation's result, and whether it was there already. own: episodes of A's evaluation."""
    from polyrhythm.pipeline.evaluation.standalone import EPISODES, Conditions, acts_greedily, evaluate
    from polyrhythm.pipeline.hooks import open_display
    from polyrhythm.plugins.paired.measured import measured

    episodes = arguments.episodes or own or EPISODES
    acts = acts_greedily(arguments.greedy, arguments.overrides, arguments.samples)
    samples = 1 if acts else arguments.samples or 1

    def measure() -> dict[str, Any]:
        conditions = Conditions(conversations=0, samples=samples)
        with open_display(sys.stderr) as live:
            return evaluate(side.path, episodes, seed, acts, conditions, live, None, arguments.overrides)

    asked = {"episodes": episodes, "seed": seed, "greedy": acts, "samples": samples, "variables": dict(variables)}
    return measured(side.path, side.config, side.saved, asked, measure)


def _described(side: _Side, result: Mapping[str, Any], again: bool) -> dict[str, Any]:
    shown = {name: value for name, value in result.items() if name not in ("per_episode", "conversations")}
    return {"path": str(side.path), "used_again": again, **shown}


def _as_text(told: Mapping[str, Any]) -> str:
    lines = []
    for name in "ab":
        side = told[name]
        again = ", measured earlier" if side["used_again"] else ""
        lines.append((name.upper(), f"{side['path']}, version {side['version']}{again}: {show.result(side)}"))
    parts = {"all": told, **(told["tasks"] if len(told["tasks"]) > 1 else {})}
    rows = [_row(name, part) for name, part in parts.items()]
    texts = [show.aligned(lines), show.records(rows)]
    if told["success"] is not None:
        counts = "B alone succeeds in {only_b}, A alone in {only_a}, both in {both}, neither in {neither}"
        p = told["success"]["p"]
        texts.append(f"{counts.format(**told['success'])}{'' if p is None else f'; McNemar, exact: p = {p:.3g}'}")
    if told["unpaired"]:
        texts.append(f"{told['unpaired']} episodes ended in one evaluation alone and are left out")
    if told["at_least"] is not None:
        texts.append(f"at least {told['at_least']:g}: {_decision(told)}")
    return "\n\n".join(texts)


def _decision(told: Mapping[str, Any]) -> str:
    if told["met"] is None:
        why = "one initial state" if told["states"] < 2 else "all initial states differ by the same"
        return f"not decidable, the difference of return has no interval ({why}); play more or other episodes"
    kind = "success" if told["success"] is not None else "return"
    low = (told["success"] or told["return"])["low"]
    return f"{'met' if told['met'] else 'not met'}, the lower end of the difference of {kind} is {low:.4g}"


def _row(name: str, part: Mapping[str, Any]) -> dict[str, str]:
    row = {"task": name, "pairs": str(part["pairs"])}
    if (success := part["success"]) is not None:
        row |= {
            "A": f"{100 * success['a']:.0f}%",
            "B": f"{100 * success['b']:.0f}%",
            "B - A, points": _interval(success, 100, ".0f"),
        }
    earned = part["return"]
    row |= {"A, return": f"{earned['a']:.4g}", "B, return": f"{earned['b']:.4g}"}
    return {**row, "B - A, return": _interval(earned, 1, ".4g")}


def _interval(found: Mapping[str, Any], scale: int, form: str) -> str:
    if found["low"] is None:
        return f"{scale * found['difference']:+{form}}"
    low, high = (format(scale * found[name], form) for name in ("low", "high"))
    return f"{scale * found['difference']:+{form}} [{low}, {high}]"
