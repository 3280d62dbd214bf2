"""The public API: the commands as functions, and a trained policy for a robot. See docs/python-api.md.

It prints nothing: runs write to `logging` and to their folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from polyrhythm.config.load import load_config
from polyrhythm.config.registry import in_main
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError, PolyrhythmError
from polyrhythm.observe.run_folder import find_run
from polyrhythm.pipeline import train as running
from polyrhythm.pipeline.callbacks import Callback, Callbacks, EvaluationResult, StopTraining
from polyrhythm.pipeline.evaluation import standalone as evaluating
from polyrhythm.pipeline.persistence.phases import command_of
from polyrhythm.pipeline.persistence.resume_rules import (
    config_to_resume,
    naming_where_it_began,
    new_folder,
    started,
)
from polyrhythm.pipeline.trained_policy import StandalonePolicy, export_policy, load_standalone
from polyrhythm.pipeline.validation import check as checking
from polyrhythm.pipeline.validation.check import ValidatedRun
from polyrhythm.plugin import load
from polyrhythm.sources import fetched_folder

__all__ = [
    "Callback",
    "EvaluationResult",
    "PolyrhythmError",
    "RunConfig",
    "StandalonePolicy",
    "StopTraining",
    "TrainResult",
    "ValidatedRun",
    "check",
    "evaluate",
    "export",
    "load_policy",
    "load_recipe",
    "report",
    "resume",
    "train",
]

#: A recipe: its name or path, its sections as a mapping, or the result of `load_recipe`.
Recipe = str | Path | Mapping[str, Any] | RunConfig


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of a run.

    folder: of the run; summary: content of its summary.json, empty unless it is finished; finished: False if a callback
    stopped it, so that it can be resumed.
    """

    folder: Path
    summary: Mapping[str, Any] = field(repr=False)
    finished: bool


P = ParamSpec("P")
R = TypeVar("R")

#: What a caller may mean by a keyword that a function does not take.
_MEANT = {
    "out_dir": "out=FOLDER is the run's folder; the setting, a folder for runs, is 'out_dir=FOLDER' after the recipe",
    "overrides": "write settings after the first argument, as on the command line: 'section.key=value'",
}


def _coded(function: Callable[P, R]) -> Callable[P, R]:
    """Add a note to an error of a user, which tracebacks print: its codes, and the command that explains them; or what
    was meant by a keyword that the function does not take."""
    takes = {name for name, one in signature(function).parameters.items() if one.kind is not one.VAR_POSITIONAL}

    @wraps(function)
    def noted(*args: P.args, **kwargs: P.kwargs) -> R:
        wrong = next((name for name in _MEANT if name in kwargs and name not in takes), None)
        with _noting_codes():
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if wrong is not None:
                    error.add_note(_MEANT[wrong])
                raise

    return noted


@contextmanager
def _noting_codes() -> Iterator[None]:
    try:
        yield
    except PolyrhythmError as error:
        codes = tuple(dict.fromkeys(error.codes))
        note = f"{', '.join(codes)}: cause and remedy are printed by: polyrhythm explain {codes[0]}"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


@_coded
def load_recipe(recipe: Recipe, *overrides: str | Mapping[str, Any]) -> RunConfig:
    """Load and validate a recipe with overrides, applied in order.

    recipe: the name of a shipped recipe, the path of a YAML file, its sections as a mapping (also `extends` and
    `preset`), or a loaded recipe; overrides: "section.key=value", or sections. `env` and `policy` may be settings
    objects: {"env": MyEnvSettings(...)}. ConfigError: a setting is invalid.
    """
    return load_config(recipe.model_dump(mode="json") if isinstance(recipe, RunConfig) else recipe, overrides)


@_coded
def check(recipe: Recipe, *overrides: str | Mapping[str, Any]) -> ValidatedRun:
    """Check whether the recipe can be run here; return its settings, the environment's spec and the untrained policy.

    overrides: as in `load_recipe`. ConfigError or StartError: it cannot.
    """
    return checking.validate_run(started(_config(recipe, overrides), None)[0])


@_coded
def train(
    recipe: Recipe, *overrides: str | Mapping[str, Any], out: str | Path | None = None, callbacks: object = ()
) -> TrainResult:
    """Run a recipe to its end.

    overrides: as in `load_recipe`; out: an empty or new folder for the run (default: <out_dir>/<name>/<time>);
    callbacks: one, or a list; each has methods of `Callback`, or is a function of an update's metrics. They are called
    in this thread between two events.
    PolyrhythmError: the recipe cannot be run or the run cannot continue; KeyboardInterrupt: it was interrupted; and any
    exception of a callback.
    """
    own_callbacks, named = Callbacks(callbacks), None if out is None else Path(out)
    config, folder = started(_config(recipe, overrides), named)
    checked = checking.validate_run(config, begun=folder is not None)
    if folder is None:
        folder = new_folder(config, named)
    return _train_in(folder, checked, own_callbacks)


def _train_in(folder: Path, checked: ValidatedRun, callbacks: Callbacks) -> TrainResult:
    try:
        return TrainResult(folder, running.train(checked, folder, callbacks=callbacks), finished=True)
    except StopTraining:
        return TrainResult(folder, {}, finished=False)


@_coded
def evaluate(  # noqa: PLR0913 - options of a command, by keyword
    run: str | Path | TrainResult,
    *overrides: str | Mapping[str, Any],
    episodes: int | None = None,
    seed: int | None = None,
    greedy: bool | None = None,
    samples: int | None = None,
    swap_instructions: bool = False,
    variants: Sequence[str] = (),
    video: str | Path | None = None,
    video_episodes: int = 9,
    conversations: int | None = None,
) -> EvaluationResult:
    """Evaluate a run's newest policy, a checkpoint, a policy file or hf://owner/name: success rate with its interval,
    and mean return.

    episodes, seed: default to the run's own evaluation. greedy: act without noise (default, unless overrides have a
    sampling setting, or there are several samples). samples: sampled episodes of each initial state, for mean@n and
    pass@k (`at`). swap_instructions: show each task another's instruction; a policy that follows instructions then
    fails. variants: names of environment variants, or `all`; each plays the same episodes in addition. video: a .gif or
    .mp4 file to write with the first `video_episodes` episodes. conversations: number of first episodes of a text
    environment whose transcripts are in the result (default: the run's).

    overrides: of moved released folders, "policy.checkpoint=FOLDER"; of a language model's engine,
    {"policy.engine.type": "vllm"}, or sampling, {"policy.temperature": 0.6} (also top_k, top_p); of the environment,
    {"env.max_steps": 200}, which the result lists as `env`. ConfigError: an override of another setting.
    """
    if conversations is not None and conversations < 0:
        raise ConfigError(f"conversations = {conversations}: it must be at least 0")
    if samples is not None and samples < 1:
        raise ConfigError(f"samples = {samples}: it must be at least 1")
    if video_episodes < 1:
        raise ConfigError(f"video_episodes = {video_episodes}: it must be at least 1")
    shown = None if video is None else evaluating.Video(Path(video), video_episodes)
    conditions = evaluating.Conditions(swap_instructions, tuple(variants), conversations, samples)
    words = _words(overrides)
    found = evaluating.evaluate(_path(run), episodes, seed, greedy, conditions, video=shown, overrides=words)
    return EvaluationResult.of("evaluation", found)


@_coded
def resume(run: str | Path | TrainResult, *overrides: str | Mapping[str, Any], callbacks: object = ()) -> TrainResult:
    """Resume a run in its own folder: an interrupted one, or a finished one with more `training.versions`.

    run: its folder, or a folder of runs, of which the newest is taken; overrides: "section.key=value" or
    {"section.key": value}, of the settings that a resumed run may change (`polyrhythm resume --help`); callbacks: as in
    `train`. Raises what `train` raises.
    """
    folder = find_run(_path(run))
    if (command := command_of(folder)) != "train":
        raise ConfigError(f"resume = {folder}: polyrhythm {command} began it; go on with: polyrhythm resume {folder}")
    config = config_to_resume(folder, _words(overrides))
    with naming_where_it_began(folder):
        checked = checking.validate_run(_config(config), begun=True)
    return _train_in(folder, checked, Callbacks(callbacks))


@_coded
def report(*runs: str | Path | TrainResult, out: str | Path | None = None) -> Path:
    """Write the HTML report of a run, or the comparison of several; return the file.

    out: the file (default: report.html of the run, or comparison.html beside the first). RunFolderError: a path is not
    a run.
    """
    if not runs:
        raise ConfigError("report: no run is named; give the folder of one or more")
    hooks, file = load("observer", "report"), None if out is None else Path(out)
    written: Path = hooks.write(_path(runs[0]), file) if len(runs) == 1 else hooks.compare(list(map(_path, runs)), file)
    return written


@_coded
def export(run: str | Path | TrainResult, out: str | Path, *, base: str | Path | None = None) -> Path:
    """Write the policy of a run, a checkpoint or a policy file into the new folder `out`; return that folder.

    A released policy is written in its own layout; `load_policy`, `evaluate` and `init_from` accept the folder of any
    other. base: the released folder that was trained, if it was moved. ConfigError: the policy has no released layout
    for `base`.
    """
    export_policy(_path(run), Path(out), None if base is None else str(base))
    return Path(out)


def _words(overrides: Sequence[str | Mapping[str, Any]]) -> tuple[str, ...]:
    found = list[str]()
    for one in overrides:
        if isinstance(one, str):
            found.append(one)
        else:
            found += [f"{name}={json.dumps(value, default=str)}" for name, value in one.items()]
    return tuple(found)


@_coded
def load_policy(run: str | Path | TrainResult, *, device: str = "cpu") -> StandalonePolicy:
    """Load a run's newest policy, or that of a checkpoint, a policy file or hf://owner/name, without a simulator."""
    return load_standalone(_path(run), device)


def _config(recipe: Recipe, overrides: Sequence[str | Mapping[str, Any]] = ()) -> RunConfig:
    """Load the recipe. ConfigError: station processes would have to import a class of `__main__`."""
    config = recipe if isinstance(recipe, RunConfig) and not overrides else load_recipe(recipe, *overrides)
    for path, address in in_main(config.model_dump(mode="json")) if config.launcher != "inline" else ():
        name, is_id = address.rpartition(":")[2], ":" not in address
        defined, use = ("registered", f"write own:{name}") if is_id else ("defined", "import it from there")
        raise ConfigError(
            f"{path} = {address}: {name} is {defined} in this script or notebook, which the processes of launcher "
            f"local cannot import; put it into a module (say own.py) and {use}, or set launcher to inline"
        )
    return config


def _path(run: str | Path | TrainResult) -> Path:
    return run.folder if isinstance(run, TrainResult) else fetched_folder(run, what="run")
