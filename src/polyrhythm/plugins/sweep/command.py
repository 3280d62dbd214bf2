"""Train a recipe with many settings, several runs at once; the settings are ranked by what another run would show.

  polyrhythm sweep RECIPE training.optimizer.lr=1e-4,3e-4 algorithm.gamma=0.97,0.99 --seeds 3
  polyrhythm sweep RECIPE training.optimizer.lr=1e-5..1e-3:log --random 16 --halving
  polyrhythm sweep RECIPE training.optimizer.lr=1e-5..1e-3:log --optuna 20

A setting with commas has several values: all combinations are run, or N random ones. A setting with LOW..HIGH is a
range, of integers if both are, of logarithms with :log. Put a value that has a comma of its own into quotes of its
own, as in "placement.trainer.devices='0,1'". --halving trains all a little, and of each round the better half twice as
long, by continuing their runs. Settings are ranked by the lower end of the 95% interval of success over the seeds (of
return, where no success is reported); where the intervals of the first and the others overlap, no difference is shown.

Every combination is checked before the first run starts. The same command again goes on where it was killed, and tries
failed runs again. Exit status 0: all runs are finished; 1: some failed; 2: something is wrong, and nothing started.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import logging
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrhythm.cli import show
from polyrhythm.cli.arguments import add_recipe, count
from polyrhythm.errors import ConfigError, PolyrhythmError, RunFolderError
from polyrhythm.imports import count_cores
from polyrhythm.observe.run_folder import CONFIG_FILE, lock_run_folder
from polyrhythm.plugin import table
from polyrhythm.plugins.sweep import plan as planning
from polyrhythm.plugins.sweep import space
from polyrhythm.plugins.sweep.runs import Sweep, SweepJournal, take_sweep_folder
from polyrhythm.readable import few
from polyrhythm.sources import names, pinning_once

if TYPE_CHECKING:
    from polyrhythm.config.schema import RunConfig

log = logging.getLogger(__name__)

PAGE_FILE = "comparison.html"
#: Settings in which a run in the sweep's folder may differ from what the sweep would begin today; with --halving also
#: training.versions.
_FREE = frozenset({"out_dir", "resume"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser, "[option ...]")
    parser.add_argument("--seeds", type=count, default=1, metavar="N", help="runs of each combination (default: 1)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--random", type=count, metavar="N", help="N random combinations instead of all")
    how.add_argument("--optuna", type=count, metavar="N", help="N combinations that Optuna's TPE proposes")
    parser.add_argument("--halving", action="store_true", help="successive halving over training.versions")
    parser.add_argument(
        "--at-once", type=count, metavar="N", help="runs at the same time (default: as many as cores or devices allow)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the sweep (default: <out_dir>/sweep-<recipe>-<its settings>)"
    )
    parser.add_argument("--json", action="store_true", help="print the ranking as JSON")


@pinning_once()
def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.plugins.sweep.room import slots, visible_devices

    fixed, settings = space.parse(arguments.overrides)
    _refuse_contradictions(arguments, settings)
    base = _load(arguments.recipe, [*fixed, *(f"{one.path}={one.ends()[0]}" for one in settings)])
    folder = arguments.out or Path(base.out_dir) / _folder_name(arguments, base.name)
    seeds = [base.seed + number for number in range(arguments.seeds)]
    candidates = _candidates(arguments, settings, base.seed)
    configs = _checked(arguments, fixed, candidates)
    at_once = slots(configs, count_cores(), visible_devices(), arguments.at_once)
    wanted = list(zip(candidates, configs, strict=True))
    free = _FREE | ({"training.versions"} if arguments.halving else set())
    _refuse_other_runs(folder, fixed, seeds, wanted, free)
    take_sweep_folder(folder)
    with lock_run_folder(folder):
        journal = SweepJournal.open(folder, arguments.recipe)
        if arguments.optuna:
            known = _proposed(journal, settings)
            configs = [_load(arguments.recipe, _words(fixed, one, None, None)) for one in known]
            _refuse_other_runs(folder, fixed, seeds, list(zip(known, configs, strict=True)), free)
        plan = _plan(arguments, settings, candidates, seeds, journal, base.training.versions)

        def name_of(job: planning.SweepJob) -> str:
            return f"{space.key(plan.combinations[job.combination], fixed)}-s{job.seed}"

        @functools.cache
        def settings_of(job: planning.SweepJob) -> tuple[list[str], int]:
            """Its words, with the revisions that this process has read, and its versions."""
            words = _words(fixed, plan.combinations[job.combination], job.seed, job.versions)
            config = _load(arguments.recipe, words)
            return [*words, *(f"{path}={name}" for path, name in names(config).items())], config.training.versions

        def words_of(job: planning.SweepJob) -> list[str]:
            return [arguments.recipe, *settings_of(job)[0]]

        def versions_of(job: planning.SweepJob) -> int:
            return settings_of(job)[1]

        sweep = Sweep(journal, plan, name_of, words_of, versions_of, at_once)
        log.info("sweep in %s: %d runs at once", folder, len(at_once))
        try:
            sweep.run()
        except KeyboardInterrupt as error:
            error.add_note("to go on with the sweep: the same command")
            raise
        found = _ranking(plan, sweep)
        found |= {"folder": str(folder), "page": _write_page(folder, found)}
    print(json.dumps(found, indent=2) if arguments.json else _as_text(found))
    return 1 if any(one["failures"] for one in found["combinations"]) else 0


def _refuse_contradictions(arguments: argparse.Namespace, settings: Sequence[space.SweptSetting]) -> None:
    if not settings and arguments.seeds == 1:
        raise ConfigError("sweep: no setting varies; give one several values, as in training.optimizer.lr=1e-4,3e-4")
    drawing = arguments.random or arguments.optuna
    if drawing and not settings:
        raise ConfigError("sweep: no setting varies, so nothing can be drawn; leave --random or --optuna out")
    if not drawing and (ranged := next((one for one in settings if one.is_range), None)):
        raise ConfigError(f"{ranged.path}: a range has no list of values; add --random N or --optuna N")
    if arguments.optuna:
        from polyrhythm.plugins.sweep.proposals import check_installed

        check_installed()
    if arguments.optuna and arguments.halving:
        raise ConfigError("--halving with --optuna: a proposal needs the result of a whole run; leave one of them out")
    if own := next((one.path for one in settings if one.path.rpartition(".")[2] == "seed"), None):
        raise ConfigError(
            f"{own} varies: a seed is not a setting to choose; give one or none, and --seeds N trains each combination "
            "with N seeds"
        )
    if own := next((one.path for one in settings if one.path in ("resume", "out_dir", "name")), None):
        raise ConfigError(f"{own}: the sweep chooses it for each run; leave it out")
    if arguments.halving and any(one.path == "training.versions" for one in settings):
        raise ConfigError("training.versions varies, and --halving chooses it; leave one of them out")


def _load(recipe: str, words: Sequence[str]) -> RunConfig:
    from polyrhythm.config.load import load_config

    return load_config(recipe, words)


def _folder_name(arguments: argparse.Namespace, name: str) -> str:
    """The same for the same command; more seeds or draws go on in the same folder, except with halving, whose rounds
    depend on them."""
    how = "optuna" if arguments.optuna else "random" if arguments.random else "all"
    drawn = (arguments.random, arguments.seeds) if arguments.halving else None
    text = repr((arguments.recipe, sorted(arguments.overrides), how, drawn))
    return f"sweep-{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _candidates(
    arguments: argparse.Namespace, settings: Sequence[space.SweptSetting], seed: int
) -> list[space.Combination]:
    """The combinations; for Optuna those of the ends of ranges, to be checked before it proposes others."""
    if arguments.random:
        return space.drawn(settings, arguments.random, seed)
    if arguments.optuna:
        settings = [replace(one, values=one.ends()) for one in settings]
    return list(space.grid(settings))


def _words(fixed: Sequence[str], combination: space.Combination, seed: int | None, versions: int | None) -> list[str]:
    words = [*fixed, *(f"{path}={value}" for path, value in combination.items())]
    if seed is not None:
        words = [word for word in words if word.partition("=")[0].strip() != "seed"] + [f"seed={seed}"]
    return words + ([f"training.versions={versions}"] if versions is not None else [])


def _checked(
    arguments: argparse.Namespace, fixed: Sequence[str], candidates: Sequence[space.Combination]
) -> list[RunConfig]:
    """Settings of every combination. ConfigError: a problem for each that cannot be run."""
    from polyrhythm.pipeline.validation.check import examine

    configs: list[RunConfig] = []
    problems: list[str] = []
    for combination in candidates:
        try:
            config = _load(arguments.recipe, _words(fixed, combination, None, None))
            if not (config.evaluation.episodes and (config.evaluation.greedy or config.evaluation.sampled)):
                raise ConfigError(
                    "evaluation.episodes = 0: runs are ranked by their evaluation after training; raise it"
                )
            if config.placement.start == "plan":
                raise ConfigError(
                    "placement.start = plan: each run of a sweep would be planned anew, on other devices; set "
                    "placement.start=recipe, and the settings that `polyrhythm plan` prints"
                )
            if config.training.versions < 1:
                raise ConfigError("training.versions = 0: nothing would be trained; raise it")
            if arguments.halving:
                for versions in planning.rounds(len(candidates), config.training.versions):
                    _load(arguments.recipe, _words(fixed, combination, None, versions))
            found = [finding for _, finding in examine(config, "machine") if finding.state in ("failed", "missing")]
            problems += [f"{space.label(combination)}: {finding.detail}" for finding in found]
            configs.append(config)
        except PolyrhythmError as error:
            problems += [f"{space.label(combination)}: {one}" for one in getattr(error, "problems", (str(error),))]
    if problems:
        raise ConfigError(*problems, origin=f"sweep of {arguments.recipe}")
    return configs


def _refuse_other_runs(
    folder: Path,
    fixed: Sequence[str],
    seeds: Sequence[int],
    wanted: Sequence[tuple[space.Combination, RunConfig]],
    free: frozenset[str],
) -> None:
    """ConfigError: a run of this sweep is there with other settings, since the recipe was changed."""
    from polyrhythm.pipeline.persistence.resume_rules import differences, saved_config

    problems = []
    for combination, config in wanted:
        for seed in seeds:
            run = folder / f"{space.key(combination, fixed)}-s{seed}"
            if not (run / CONFIG_FILE).is_file():
                continue
            today = config.model_dump(mode="json") | {"seed": seed}
            if other := differences(saved_config(run).model_dump(mode="json"), today, free=free):
                path, then, now = other[0]
                problems.append(f"{run}: {path} was {then} and is {now} now; name another --out, or remove that run")
    if problems:
        raise ConfigError(*problems)


def _proposed(journal: SweepJournal, settings: Sequence[space.SweptSetting]) -> list[space.Combination]:
    """Combinations that Optuna has proposed. RunFolderError: they are of other settings, or of other values of them."""
    for combination in journal.proposed:
        other = combination.keys() ^ {one.path for one in settings}
        other |= {one.path for one in settings if one.path in combination and not one.has(combination[one.path])}
        if other:
            raise RunFolderError(
                f"folder {journal.folder} holds a sweep that proposed {space.label(combination)}, which this one would "
                f"not ({', '.join(sorted(other))} differs); name another --out"
            )
    return list(journal.proposed)


def _plan(
    arguments: argparse.Namespace,
    settings: Sequence[space.SweptSetting],
    candidates: list[space.Combination],
    seeds: Sequence[int],
    journal: SweepJournal,
    versions: int,
) -> planning.SweepPlan:
    if arguments.halving:
        return planning.Halving(candidates, seeds, versions)
    if not arguments.optuna:
        return planning.Every(candidates, seeds)
    from polyrhythm.plugins.sweep.proposals import Proposals

    proposals = Proposals(settings, seeds[0], journal)
    return planning.Proposed(arguments.optuna, seeds, proposals.propose, proposals.report)


def _ranking(plan: planning.SweepPlan, sweep: Sweep) -> dict[str, Any]:
    """Combinations, best first: those of a later round of a halving before those of an earlier one, those with a failed
    run last. worse: whether it is shown that the first is better; None if it is not, they were not trained as long, or
    one has no result."""
    latest: dict[int, dict[planning.SweepJob, planning.JobResult]] = {}
    for job, result in sweep.results.items():
        own = latest.setdefault(job.combination, {})
        if own and (job.versions or 0) > max(other.versions or 0 for other in own):
            own.clear()
        own[job] = result
    trained = {number: max(job.versions or 0 for job in own) for number, own in latest.items()}
    results = {number: list(own.values()) for number, own in latest.items()}
    scores = planning.scores(results)
    ranked = sorted(planning.rank(results), key=lambda number: -trained[number])
    first = scores[ranked[0]]
    combinations = []
    for number in ranked:
        score, as_long = scores[number], trained[number] == trained[ranked[0]]
        below = first and score and as_long and first.low >= score.low
        worse = planning.differ(first, score) if below and first and score else None
        described = _described(sweep, latest[number], score)
        combinations.append({"settings": dict(plan.combinations[number]), **described, "worse": worse})
    return {"combinations": combinations, "runs": dict(sweep.origins)}


def _described(
    sweep: Sweep, results: Mapping[planning.SweepJob, planning.JobResult], found: planning.SeedScore | None
) -> dict[str, Any]:
    runs = [
        {"folder": str(sweep.folder_of(job)), "seed": job.seed, "result": result.tally, "failure": result.failure}
        for job, result in results.items()
    ]
    return {
        "versions": next(iter(results)).versions,
        "score": None if found is None else {"of": "success" if found.is_rate else "return", **found._asdict()},
        "failures": sum(result.tally is None for result in results.values()),
        "wall_s": sum(result.wall_s for result in results.values()),
        "runs": runs,
    }


def _write_page(folder: Path, found: Mapping[str, Any]) -> str | None:
    """Compare the finished runs on one page. None: fewer than two, or it could not be written, which is logged."""
    runs = [run["folder"] for one in found["combinations"] for run in one["runs"] if run["result"] is not None]
    if len(runs) < 2 or "compare" not in table("command"):
        return None
    page = folder / PAGE_FILE
    words = [sys.executable, "-m", "polyrhythm", "compare", *runs, "--out", str(page)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)  # noqa: S603
    if done.returncode:
        log.warning("no comparison page: %s", (done.stderr.strip().splitlines() or ["no reason given"])[-1])
        return None
    return str(page)


def _as_text(found: Mapping[str, Any]) -> str:
    names = space.short_names(list(found["combinations"][0]["settings"]))
    rows = []
    for place, one in enumerate(found["combinations"], 1):
        row = {"": str(place), **{names[path]: value for path, value in one["settings"].items()}}
        if one["versions"] is not None:
            row["versions"] = str(one["versions"])
        row["runs"] = f"{len(one['runs']) - one['failures']} of {len(one['runs'])}"
        seconds = one["wall_s"]
        took = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
        rows.append({**row, **_score_in_words(one["score"]), "time": took})
    texts = [show.records(rows), *_failures(found)]
    if found["page"]:
        texts.append(f"page: {found['page']}")
    texts.append(f"runs: {', '.join(f'{count} {origin}' for origin, count in found['runs'].items())}")
    return "\n\n".join([*texts, *conclusion(found["combinations"])])


def conclusion(ranked: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The best of several combinations, or those between which the intervals show no difference. ranked: `_ranking`."""
    first, tied = ranked[0], [place for place, one in enumerate(ranked, 1) if one["worse"] is False]
    words = shlex.join(f"{path}={value}" for path, value in first["settings"].items())
    if len(ranked) == 1 or first["score"] is None:
        return
    as_long = [(place, one) for place, one in enumerate(ranked, 1) if one["versions"] == first["versions"]]
    if above := [str(place) for place, one in as_long if one["score"] and one["score"]["low"] > first["score"]["low"]]:
        yield f"no best: {few(above)} did better where a run failed; the same command tries it again"
        return
    if first["score"]["low"] == first["score"]["high"]:
        yield "no difference shown: a return of one seed, or equal returns, have no interval; add --seeds 3"
    elif len(tied) > 1:
        places = f"{', '.join(map(str, tied[:-1]))} and {tied[-1]}"
        yield f"no difference shown between {places}: their intervals overlap that of 1; more --seeds would narrow them"
    elif any(one["worse"] for one in ranked):
        yield f"best: {words}; chosen by this result, which is therefore biased upward"
    elif first["versions"] is None:
        yield "no difference shown: no other combination has a result"
    else:
        yield f"left by --halving: {words}; its rounds choose by results whose intervals may overlap"


def _score_in_words(score: Mapping[str, Any] | None) -> dict[str, str]:
    if score is None:
        return {"result": "-"}
    if score["of"] == "success":
        low, high = (f"{100 * score[name]:.0f}" for name in ("low", "high"))
        return {"success": f"{100 * score['mean']:.0f}% [{low}, {high}]"}
    width = "" if score["low"] == score["high"] else f" [{score['low']:.4g}, {score['high']:.4g}]"
    return {"return": f"{score['mean']:.4g}{width}"}


def _failures(found: Mapping[str, Any]) -> Iterator[str]:
    lines = [
        f"{run['folder']}: {run['failure']}" for one in found["combinations"] for run in one["runs"] if run["failure"]
    ]
    if lines:
        yield "\n".join(["failed (the same command tries them again):", *lines])
