"""The public API: the commands train and eval as functions, and a trained policy for a robot. See docs/python-api.md.

Nothing here prints: what a run says goes to `logging` and into its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyrhythm.config.load import load_config
from polyrhythm.config.objects import in_main
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError, PolyrhythmError
from polyrhythm.pipeline import train as running
from polyrhythm.pipeline.callbacks import Callback, Callbacks, EvaluationResult, StopTraining
from polyrhythm.pipeline.evaluation import standalone as evaluating
from polyrhythm.pipeline.persistence.resume_rules import new_folder, run_to_resume
from polyrhythm.pipeline.trained_policy import StandalonePolicy, load_standalone
from polyrhythm.pipeline.validation import check as checking
from polyrhythm.pipeline.validation.check import ValidatedRun

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
    "load_policy",
    "load_recipe",
    "train",
]

#: A recipe by name or path, as the sections that a file would have, or as `load_recipe` gave it.
Recipe = str | Path | Mapping[str, Any] | RunConfig


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A run that has ended.

    folder: where everything of it lies; summary: the content of its summary.json, empty unless it is finished;
    finished: false where a callback has stopped it, so that it can go on by `resume`.
    """

    folder: Path
    summary: Mapping[str, Any]
    finished: bool


def load_recipe(recipe: Recipe, *overrides: str | Mapping[str, Any]) -> RunConfig:
    """The validated settings of a recipe, each override laid over what stands before it.

    recipe: the name of one that ships with polyrhythm, the path of a YAML file, sections as such a file has them
    (`extends` and `preset` too), or a loaded recipe; overrides: "section.key=value", or sections. `env` and `policy`
    may be the settings object itself: {"env": MyEnvSettings(...)}. ConfigError: what is wrong, and what to do.
    """
    return load_config(recipe.model_dump(mode="json") if isinstance(recipe, RunConfig) else recipe, overrides)


def check(recipe: Recipe) -> ValidatedRun:
    """Whether the recipe can be run here: its settings, the environment's spec and the policy, untrained.

    ConfigError, StartError: it cannot.
    """
    return checking.validate_run(_config(recipe))


def train(recipe: Recipe, *, out: str | Path | None = None, callbacks: object = ()) -> TrainResult:
    """Run a recipe to its end.

    out: an empty or new folder for the run (default: <out_dir>/<name>/<time>); callbacks: one, or a list: each has
    methods of `Callback`, or is a function of an update's metrics; they are called in this thread between two events.
    Raises PolyrhythmError where the recipe cannot be run or the run cannot go on, KeyboardInterrupt where it was
    interrupted, and what a callback raises.
    """
    heard, config = Callbacks(callbacks), _config(recipe)
    named = None if out is None else Path(out)
    folder = run_to_resume(config, named)
    checked = checking.validate_run(config)
    if folder is None:
        folder = new_folder(config, named)
    try:
        return TrainResult(folder, running.train(checked, folder, callbacks=heard), finished=True)
    except StopTraining:
        return TrainResult(folder, {}, finished=False)


def evaluate(
    run: str | Path | TrainResult,
    *,
    episodes: int | None = None,
    seed: int | None = None,
    greedy: bool = True,
    swap_instructions: bool = False,
    video: str | Path | None = None,
    video_episodes: int = 9,
) -> EvaluationResult:
    """Success rate with its interval, and mean return, of a run's newest policy, of a checkpoint or a policy file.

    episodes, seed: as in the run's own evaluation unless given; greedy: let the policy act without noise;
    swap_instructions: show each task another's sentence, so that a policy that listens fails; video: a .gif or .mp4 to
    make of the first `video_episodes` of the episodes.
    """
    if video_episodes < 1:
        raise ConfigError(f"video_episodes = {video_episodes}: it must be at least 1")
    shown = None if video is None else evaluating.Video(Path(video), video_episodes)
    found = evaluating.evaluate(_path(run), episodes, seed, greedy, swap_instructions, video=shown)
    return EvaluationResult.of("evaluation", found)


def load_policy(run: str | Path | TrainResult, *, device: str = "cpu") -> StandalonePolicy:
    """A run's newest policy, or that of a checkpoint or a policy file, ready to `act`: no simulator is needed."""
    return load_standalone(_path(run), device)


def _config(recipe: Recipe) -> RunConfig:
    """The settings. ConfigError: processes of their own would have to import what only this one has."""
    config = recipe if isinstance(recipe, RunConfig) else load_config(recipe)
    for path, address in in_main(config.model_dump(mode="json")) if config.launcher == "local" else ():
        name = address.partition(":")[2]
        raise ConfigError(
            f"{path} = {address}: {name} is defined in this script or notebook, which the processes of launcher local "
            "cannot import; put it into a module (say own.py) and import it from there, or set launcher to inline"
        )
    return config


def _path(run: str | Path | TrainResult) -> Path:
    return run.folder if isinstance(run, TrainResult) else Path(run)
