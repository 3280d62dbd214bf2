"""Runs the warm start alone: a run without RL whose weights other runs can use (`init_from`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.learning import DatasetSettings
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.files import atomic_write
from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.observe.run_folder import SUMMARY_FILE, lock_run_folder
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.observers.live import LiveDisplay
from polyrhythm.pipeline.persistence.checkpoints import DEMONSTRATIONS_FILE
from polyrhythm.pipeline.persistence.phases import PhaseJournal
from polyrhythm.pipeline.persistence.resume import refuse_misplaced, save_settings
from polyrhythm.pipeline.validation.check import ValidatedRun, validate_run
from polyrhythm.pipeline.warm_start.demos import check_expert, dataset_format, has_expert, refuse_misfit
from polyrhythm.pipeline.warm_start.initial_policy import prepare_initial_policy
from polyrhythm.training.sft import Demonstrations


def settings_of(path: Path, config: RunConfig) -> DatasetSettings:
    """Settings of a dataset folder named on the command line, with the recipe's filters."""
    given = config.demonstrations.dataset if config.demonstrations else None
    found = given.model_dump() if given else {}
    return DatasetSettings.model_validate({**found, "folder": str(path)})


def sft_config(config: RunConfig) -> RunConfig:
    """The configuration of a recipe's warm start as a separate run: <name>-sft."""
    if config.init_from:
        raise ConfigError(f"init_from = {config.init_from}: sft makes the initial weights; leave it out")
    return config.model_copy(update={"name": f"{config.name}-sft"})


def validate_imitation(config: RunConfig) -> ValidatedRun:
    """`validate_run` without the reward function: only later evaluations use it."""
    return validate_run(config.model_copy(update={"scoring": None}), trainer=False)._replace(config=config)


def check_demonstrations(file: Path | None, checked: ValidatedRun) -> None:
    """Raise ConfigError or RunFolderError unless there are demonstrations: a fitting file or folder, the recipe's
    dataset, or an expert. Only a dataset's small files are read."""
    config = checked.config
    dataset = config.demonstrations.dataset if config.demonstrations else None
    if file is not None and file.is_dir():
        dataset = settings_of(file, config)
    elif file is not None:
        fitting_demonstrations(file, checked)
        return
    if dataset is not None:
        dataset_format(dataset).check_dataset(dataset, checked.spec, config.rollout.action_repeat)
    else:
        refuse_without_expert(config)
        if config.demonstrations is not None:
            check_expert(env_settings(config), config.demonstrations)


def refuse_without_expert(config: RunConfig) -> None:
    """Raise ConfigError if the environment has no scripted expert."""
    if not has_expert(env_settings(config)):
        raise ConfigError(
            f"env.type = {config.env_type}: this environment has no scripted expert; "
            "choose one that has, such as metaworld"
        )


def _refuse_absent(path: Path) -> None:
    if not path.exists():
        kind = "file" if path.suffix == ".npz" else "folder"
        raise RunFolderError(
            f"--demos = {path}: there is no such {kind}; if it was moved, name where it is now, or record it: "
            f"polyrhythm demos RECIPE --out {path}"
        )


def fitting_demonstrations(file: Path, checked: ValidatedRun) -> Demonstrations:
    """Demonstrations of a file or dataset folder. RunFolderError: there are none; ConfigError: they do not fit this
    run."""
    _refuse_absent(file)
    if file.is_dir():
        dataset = settings_of(file, checked.config)
        return dataset_format(dataset).read_demonstrations(
            dataset, checked.spec, checked.policy.chunk, checked.config.rollout.action_repeat
        )
    found = Demonstrations.load(file)
    refuse_misfit(found, checked.spec, checked.policy.chunk, checked.config.rollout.action_repeat)
    return found


def imitate(checked: ValidatedRun, folder: Path, file: Path | None, live: LiveDisplay | None = None) -> dict[str, Any]:
    """Record demonstrations, or load those in `file`, and imitate them; return the content of summary.json.

    Finished phases are not repeated. live: progress display. RunFolderError: another process uses the folder.
    """
    refuse_misplaced(folder)
    with lock_run_folder(folder):
        return _imitate(checked, folder, file, live)


def _imitate(checked: ValidatedRun, folder: Path, file: Path | None, live: LiveDisplay | None) -> dict[str, Any]:
    progress = PhaseJournal(folder, live.phase if live else None, command="sft")
    if file is not None and progress.result("demonstrations") is None:
        found = fitting_demonstrations(file, checked)
        found.save(folder / DEMONSTRATIONS_FILE)
        progress.commit("demonstrations", {"file": str(file), "decisions": len(found)})
    save_settings(checked.config, folder)  # from here on the run can be resumed without the file
    with MetricsWriter(folder) as metrics:
        prepare_initial_policy(checked, folder, progress, metrics)
    results = [progress.result(phase) or {} for phase in ("warm_start", "demonstrations")]
    summary = {**results[0], **results[1], "wall_s": progress.summary()}
    with atomic_write(folder / SUMMARY_FILE) as unfinished:
        unfinished.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary
