"""`polyrhythm plan`: what limited a finished run; what asynchronous training would gain, by ROLL Flash's bounds."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polyrhythm.cli import show
from polyrhythm.config.recipes import recipe_names
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.observe.run_folder import CONFIG_FILE, find_run, refuse_no_run
from polyrhythm.plugin import load
from polyrhythm.plugins.memory_estimate import command as plan_memory
from polyrhythm.plugins.planning import own_workflow
from polyrhythm.plugins.planning.theory import Layout, StageTimes, Workload, advise, expected_longest, stage_times
from polyrhythm.readable import three_digits
from polyrhythm.specs.distributions import Constant, Distribution, parse_distribution, parse_duration

#: Upper limit of max_lag.
_LAGS = 1_000_000
_NEEDED = ("samples", "workers", "rollout", "train", "max_lag")
_THEORY = (*_NEEDED, "longest", "epochs")
_PLACING = ("nodes", "profile")
_SPLITS = {"best_share": "by β*", "equal_pace": "at equal pace"}
_LIMITS = {
    "segment_steps": "rollout.segment_steps",
    "max_steps": "env.max_steps",
    "metrics": "the largest mean of an update, a lower bound, since no limit is known",
}


def run(arguments: argparse.Namespace) -> int:
    _check_options(arguments)
    if arguments.memory:
        return plan_memory.run(arguments)
    if arguments.gpus is not None and own_workflow.is_function(arguments.run):
        return own_workflow.run(arguments)
    if arguments.gpus is not None:
        from polyrhythm.plugins.planning import placing

        return placing.run(arguments)
    if not arguments.theory:
        if own_workflow.is_function(arguments.run):
            raise ConfigError(f"plan {arguments.run}: it is a workflow; add --gpus N")
        if _is_recipe(arguments.run):
            raise ConfigError(f"plan {arguments.run}: it is a recipe; add --gpus N (0: on the CPU) or --memory")
        if arguments.run is None or arguments.overrides:
            raise ConfigError(
                "plan: name the folder of one run, or add --gpus N, --theory or --memory (see plan --help)"
            )
        load("pipeline", "advice")(arguments.run, as_json=arguments.json)
        return 0
    if arguments.overrides:
        raise ConfigError(f"plan --theory: {arguments.overrides[0]!r} is not an option; it takes the folder of one run")
    try:
        result = _predict(arguments)
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from None
    print(json.dumps(result, indent=2) if arguments.json else formatted(result))
    return 0


def _is_recipe(word: str | None) -> bool:
    """Whether it is a recipe's name or file, not a run."""
    if word is None:
        return False
    path = Path(word)
    own = path.is_file() and path.suffix in (".yaml", ".yml")
    return own or (word in recipe_names() and not path.exists())


def _check_options(arguments: argparse.Namespace) -> None:
    """ConfigError: an option belongs to another kind of plan and would have no effect."""
    for other, names in (("theory", _THEORY), ("memory", plan_memory.OPTIONS), ("gpus", _PLACING)):
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]
        if given and getattr(arguments, other) in (False, None):
            placing = " --gpus" if arguments.gpus is not None else " RUN"
            own = " --memory" if arguments.memory else " --theory" if arguments.theory else placing
            add = "add --gpus N, or " if other == "gpus" and own == " RUN" else ""
            raise ConfigError(f"plan{own}: {', '.join(given)} is for --{other}; {add}leave it out")


def formatted(result: dict[str, Any]) -> str:
    """The result as text: the inputs, the paper's bounds, and the bounds for whole numbers of workers."""
    given, measured = result["given"], result["measured"]
    from_run = measured and given["longest_s"] == measured["longest_s"]
    limit = f" ({_LIMITS[measured['limit']]})" if from_run else ""
    passes = f", {given['passes']} times" if given["passes"] > 1 else ""
    longest, pool_longest = _seconds(given["longest_s"]), _seconds(given["pool_longest_s"])
    if given["longest_s"] != given["pool_longest_s"]:
        longest = f"of {given['samples']} {longest}, of all concurrent samples {pool_longest}"
    rows = {
        "samples of a version": f"{given['samples']}",
        "workers": f"{given['workers']}",
        "a sample's rollout": f"{_seconds(given['rollout_s'])}, the longest {longest}{limit}",
        "its training": f"{_seconds(given['train_s'])}{passes}",
        "": "",
        "T_sync": f"{_seconds(result['t_sync_s'])} a version at most, {_seconds(result['t_sync_floor_s'])} at least",
        f"T_async, max_lag {given['max_lag']:g}": f"{_seconds(result['t_async_s'])}, with β* = {result['share']:.3f}",
        "speed-up": f"{result['speed_up']:.2f}, and {result['speed_up_limit']:.2f} however large max_lag is",
    }
    if measured:
        rows["measured"] = f"{_seconds(measured['version_s'])} a version in that run"
    if given["max_lag"] < 1:
        rows["warning"] = "below max_lag 1 rollout and training hardly overlap: only `with pacing` holds"
    width = max(map(len, rows))
    lines = [f"{name:{width}}  {text}".rstrip() for name, text in rows.items()]
    splits = {
        _SPLITS[name]: {
            "workers that train": f"{split['training']}",
            "that generate": f"{split['generating']}",
            "T_async at least": _seconds(split["t_async_floor_s"]),
            "T_async, (9)": _seconds(split["t_async_s"]),
            "with pacing": _seconds(split["paced_s"]),
            "speed-up": f"{split['speed_up_least']:.2f} to {split['speed_up_most']:.2f}",
        }
        for name, split in result["splits"].items()
    }
    return "\n".join([*lines, "", show.table(splits)])


def _seconds(value: float) -> str:
    return f"{three_digits(value)} s"


def _predict(arguments: argparse.Namespace) -> dict[str, Any]:
    """Predictions from the options, and from the measured times of a run where no option is given."""
    measured, max_lag = None, arguments.max_lag
    if arguments.run is None:
        if missing := [f"--{name.replace('_', '-')}" for name in _NEEDED if getattr(arguments, name) is None]:
            raise ValueError(f"{', '.join(missing)} missing; give all of them, or the folder of a finished run")
    elif arguments.epochs and arguments.train is None:
        raise ValueError("--epochs without --train; a run's training time includes all epochs, so leave it out")
    else:
        measured, own_lag = _measured(Path(arguments.run), arguments.workers)
        max_lag = own_lag if max_lag is None else max_lag
    given = {
        "samples": arguments.samples,
        "workers": arguments.workers,
        "train_s": None if arguments.train is None else _duration("--train", arguments.train),
    }
    chosen = given if measured is None else {**asdict(measured), **{k: v for k, v in given.items() if v is not None}}
    samples = chosen["samples"]
    mean_s, longest_s, pool_s, reached_s = _rollout(arguments, measured, samples, max_lag)
    work = Workload(samples, chosen["workers"], mean_s, longest_s, chosen["train_s"], arguments.epochs or 1)
    return advise(work, max_lag, pool_s, reached_s, measured)


def _rollout(
    arguments: argparse.Namespace, measured: StageTimes | None, samples: int, max_lag: float
) -> tuple[float, float, float, float]:
    """Mean, longest of a version, longest of all concurrent samples, and the expected longest of a version (or 0)."""
    longest = None if arguments.longest is None else _duration("--longest", arguments.longest)
    if arguments.rollout is None:
        assert measured is not None
        found = measured.longest_s if longest is None else longest
        return measured.rollout_s, found, found, 0.0
    text = arguments.rollout
    try:
        times: Distribution = parse_distribution(text) if ":" in text else Constant(parse_duration(text))
    except ValueError as error:
        raise ValueError(f"--rollout: {error}") from None
    if longest is not None:
        return times.mean, longest, longest, 0.0
    if not 0 <= max_lag < _LAGS:
        raise ValueError(f"max_lag is {max_lag:g}; make it 0 or more, and less than {_LAGS:,}")
    of_version = expected_longest(times, samples)
    return times.mean, of_version, expected_longest(times, (int(max_lag) + 1) * samples), of_version


def _duration(name: str, text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _measured(folder: Path, workers: int | None) -> tuple[StageTimes, float]:
    """The stage times of a finished run, and its own max_lag."""
    from polyrhythm.config.load import load_config
    from polyrhythm.plugins.planning.from_run import finished_files

    folder = find_run(folder)
    refuse_no_run(folder)
    summary, lines = finished_files(folder)
    config = load_config(folder / CONFIG_FILE)
    rollout, training = config.rollout, config.training
    layout = Layout(
        version_samples=training.batch_size * config.freshness.sync_interval,
        versions=training.versions,
        simulators=rollout.simulators,
        parts=rollout.env_batches,
        mean_over=rollout.env_batches if config.launcher != "inline" else 1,
        generators=rollout.generators,
        rows=rollout.simulators * rollout.env_batches * rollout.rows,
        segment_steps=rollout.segment_steps,
        max_steps=getattr(config.env, "max_steps", 0),
    )
    try:
        return stage_times(layout, summary, lines, workers), config.freshness.max_lag
    except ValueError as error:
        raise RunFolderError(f"folder {str(folder)!r}: {error}") from None
