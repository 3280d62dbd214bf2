"""A run's warm start, as its first phases or alone: a run without RL whose weights others can use (`init_from`)."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.learning import DatasetSettings
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.files import write_json
from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.observe.run_folder import SUMMARY_FILE, lock_run_folder
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.hooks import Display, begin_parts
from polyrhythm.pipeline.persistence.checkpoints import DEMONSTRATIONS_FILE
from polyrhythm.pipeline.persistence.phases import PhaseJournal
from polyrhythm.pipeline.persistence.resume import prepare_initial_policy, refuse_misplaced, save_settings
from polyrhythm.pipeline.validation.check import ValidatedRun, validate_run
from polyrhythm.plugins.demonstrations.imitation import Demonstrations, SupervisedLearner
from polyrhythm.plugins.demonstrations.recording import check_expert, dataset_format, has_expert, record, refuse_misfit
from polyrhythm.policies.traits import released_folder
from polyrhythm.specs import EnvSpec
from polyrhythm.training.steps import finish

log = logging.getLogger(__name__)

#: Seconds between two log lines on the progress of the warm start.
_TELL_S = 15.0


def check_source(config: RunConfig, spec: EnvSpec, *, builds: bool = True) -> str:
    """Check where the run's demonstrations come from; returns a dataset's description. A resumed run needs no dataset.

    builds: also build a batch of one row, to see whether the environment has an expert.
    """
    settings = config.demonstrations
    assert settings is not None
    if (dataset := settings.dataset) is not None:
        if config.resume != "never":
            return ""
        return str(dataset_format(dataset).check_dataset(dataset, spec, config.rollout.action_repeat))
    env = env_settings(config)
    if builds and not has_expert(env):
        raise ConfigError(
            "demonstrations = set: this environment has no scripted expert; set demonstrations and supervised to null"
        )
    check_expert(env, settings)
    return ""


def learn(checked: ValidatedRun, folder: Path, progress: PhaseJournal, metrics: MetricsWriter) -> dict[str, float]:
    """Imitate the run's demonstrations; returns the metrics of the supervised phase."""
    config, _, policy = checked
    assert config.supervised is not None
    if released := released_folder(config.policy):
        words = "supervised training begins from the checkpoint %s; without it: supervised=null demonstrations=null"
        log.info(words, released)
    demonstrations = _demonstrations(checked, folder, progress)
    with progress.phase("supervised"):
        steps = SupervisedLearner(policy, config.supervised, seed=config.seed).steps(demonstrations)
        tell, of = Teller("supervised: %d of %d steps"), config.supervised.steps
        learned = finish(steps, lambda done: tell(done, of))
        metrics.log(0, learned, progress.summary()["total"])
    return learned


def _demonstrations(checked: ValidatedRun, folder: Path, progress: PhaseJournal) -> Demonstrations:
    config, spec, policy = checked
    file = folder / DEMONSTRATIONS_FILE
    if progress.result("demonstrations") is not None:
        return Demonstrations.load(file)
    assert config.demonstrations is not None
    if config.demonstrations.dataset is not None:
        dataset = config.demonstrations.dataset
        with progress.phase("demonstrations"):
            layout = dataset_format(dataset)
            found = layout.read_demonstrations(dataset, spec, policy.chunk, config.rollout.action_repeat)
            found.save(file)
        progress.commit("demonstrations", {"file": dataset.folder, "decisions": len(found)})
        return found
    with progress.phase("demonstrations"):
        recorded = record(config, config.demonstrations, policy.chunk, Teller("demonstrations: %d of %d episodes"))
        recorded.demonstrations.save(file)
    progress.commit("demonstrations", recorded.summary())
    return recorded.demonstrations


class Teller:
    """Logs progress every `_TELL_S` seconds; `words` has a %d for the count and one for the total."""

    def __init__(self, words: str) -> None:
        self._words, self._told = words, time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_S and done < of:
            log.info(self._words, done, of)
            self._told = now


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


def fitting_demonstrations(file: Path, checked: ValidatedRun) -> Demonstrations:
    """Demonstrations of a file or dataset folder. RunFolderError: there are none; ConfigError: they do not fit this
    run."""
    if not file.exists():
        kind = "file" if file.suffix == ".npz" else "folder"
        raise RunFolderError(
            f"--demos = {file}: there is no such {kind}; if it was moved, name where it is now, or record it: "
            f"polyrhythm demos RECIPE --out {file}"
        )
    if file.is_dir():
        dataset = settings_of(file, checked.config)
        return dataset_format(dataset).read_demonstrations(
            dataset, checked.spec, checked.policy.chunk, checked.config.rollout.action_repeat
        )
    found = Demonstrations.load(file)
    refuse_misfit(found, checked.spec, checked.policy.chunk, checked.config.rollout.action_repeat)
    return found


def imitate(checked: ValidatedRun, folder: Path, file: Path | None, live: Display | None = None) -> dict[str, Any]:
    """Record demonstrations, or load those in `file`, and imitate them; return the content of summary.json.

    Finished phases are not repeated. live: progress display. RunFolderError: another process uses the folder.
    """
    refuse_misplaced(folder)
    with lock_run_folder(folder), begin_parts(checked.config) as parts:
        progress = PhaseJournal(folder, live.phase if live else None, command="sft")
        if file is not None and progress.result("demonstrations") is None:
            found = fitting_demonstrations(file, checked)
            found.save(folder / DEMONSTRATIONS_FILE)
            progress.commit("demonstrations", {"file": str(file), "decisions": len(found)})
        save_settings(checked.config, folder)  # from here on the run can be resumed without the file
        for part in parts:
            part.on_start(folder)
        with MetricsWriter(folder, [part.on_metrics for part in parts]) as metrics:
            prepare_initial_policy(checked, folder, progress, metrics)
        results = [progress.result(phase) or {} for phase in ("warm_start", "demonstrations")]
        summary = {**results[0], **results[1], "wall_s": progress.summary()}
        write_json(folder / SUMMARY_FILE, summary)
        return summary
