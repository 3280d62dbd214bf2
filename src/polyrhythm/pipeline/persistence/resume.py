"""Prepares the folder of a run, new or resumed, and its first weights: from `init_from`, by its warm start, or its own.

Invariant: refusals come before any change of the run, except that a damaged checkpoint may be renamed.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from torch import Tensor

from polyrhythm.config.load import save_config, validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import RunFolderError, StartError
from polyrhythm.observe.metrics import MetricsWriter, rewind
from polyrhythm.observe.run_folder import (
    CHANGES_FILE,
    CONFIG_FILE,
    EVALUATIONS_FILE,
    LEDGER_FILE,
    LOCK_FILE,
    METRICS_FILE,
    PROGRESS_FILE,
    SUMMARY_FILE,
    find_run,
    note_changes,
)
from polyrhythm.pipeline.hooks import run_hooks
from polyrhythm.pipeline.persistence.checkpoints import (
    BEST_FILE,
    DEMONSTRATIONS_FILE,
    POLICY_FILE,
    STATES,
    SavedRun,
    load_policy,
    newest_run,
    read_policy_settings,
    save_policy,
)
from polyrhythm.pipeline.persistence.phases import PhaseJournal, has_begun
from polyrhythm.pipeline.persistence.resume_rules import (
    as_written,
    differences,
    naming_where_it_began,
    saved_config,
)
from polyrhythm.plugin import load
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import load_published, published_state
from polyrhythm.policies.traits import policy_traits, released_folder
from polyrhythm.readable import counted
from polyrhythm.specs import EnvSpec

log = logging.getLogger(__name__)

#: Settings whose changes are not recorded: they tell where the run is, not how it works.
_NOT_NOTED = frozenset({"resume", "out_dir"})
#: Files and folders that a run writes.
_FILES = (
    *(CONFIG_FILE, SUMMARY_FILE, POLICY_FILE, LOCK_FILE, PROGRESS_FILE, METRICS_FILE, CHANGES_FILE),
    *(DEMONSTRATIONS_FILE, EVALUATIONS_FILE, BEST_FILE, LEDGER_FILE),
)
_FOLDERS = (STATES, "logs")


def _files() -> tuple[str, ...]:
    return (*_FILES, *(name for hooks in run_hooks() for name in hooks.files))


def _folders() -> tuple[str, ...]:
    return (*_FOLDERS, *(name for hooks in run_hooks() for name in hooks.folders))


def refuse_misplaced(folder: Path) -> None:
    """Raise RunFolderError if a folder has the name of a file that a run writes, or a file that of a folder."""
    for name in _files():
        if (folder / name).is_dir():
            raise RunFolderError(f"{folder / name} is a folder, but a run writes a file there; move it away")
    for name in _folders():
        if (folder / name).exists() and not (folder / name).is_dir():
            raise RunFolderError(f"{folder / name} is a file, but a run has a folder there; move it away")


@contextmanager
def remove_if_refused(folder: Path, *, named: bool) -> Iterator[None]:
    """If a StartError in this block refuses a new run before its first phase, remove the files that it made.

    Only settings and untrained weights are lost. The folder itself is removed if it is then empty and the user has not
    named it; a folder that held other files than the lock at the start is left alone.
    """
    new = all(path.name == LOCK_FILE for path in folder.iterdir())
    try:
        yield
    except StartError:
        if new and not has_begun(folder):
            _remove_run(folder, keep=named)
        raise


def _remove_run(folder: Path, *, keep: bool) -> None:
    for name in _folders():
        shutil.rmtree(folder / name, ignore_errors=True)
    try:
        for name in _files():
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        log.warning("what the refused run has made is still in %s: %s", folder, error.strerror)
        return
    if not keep:
        with suppress(OSError):  # not empty, or a link
            folder.rmdir()
            log.info("removed the run's folder: it had nothing to resume")


def take_up(checked: tuple[RunConfig, EnvSpec, Policy], folder: Path, progress: PhaseJournal) -> SavedRun | None:
    """Prepare the folder for a new or resumed run; returns the saved run to resume, if any.

    Metrics of updates that will be repeated are removed, phases after training are reopened if there are more versions
    to train than before, changed settings are recorded, and the policy gets the saved weights. RunFolderError: the run
    cannot be resumed, or not with these settings.
    """
    config, spec, policy = checked
    if not (folder / CONFIG_FILE).is_file():
        log.info("the run's folder: %s", folder)
        save_settings(config, folder)
        return None
    before = saved_config(folder)
    trained = progress.result("rl") is not None
    extended = trained and config.training.versions > before.training.versions
    saved = newest_run(folder / STATES) if extended or not trained else None
    version = before.training.versions if trained else saved.version if saved else 0
    if config.training.versions < version:
        raise RunFolderError(
            f"training.versions = {config.training.versions}: the run in {folder} has trained "
            f"{counted(version, 'version')} already; set it to {version} to end there, or higher to go on"
        )
    if saved is not None and saved.counts.get("data", spec.data) != spec.data:
        raise RunFolderError(
            f"env: the data changed since the run in {folder} was trained; restore them, or begin another run with "
            "init_from"
        )
    if saved is not None:
        give_weights(policy, saved.policy, saved.trainer.parent)
    elif extended or not trained:
        _refuse_without_state(folder, progress)
    update = saved.updates if saved else version * config.freshness.sync_interval
    if extended:
        progress.reopen("rl", "evaluation_after", "best")
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
    trees = before.model_dump(mode="json"), config.model_dump(mode="json")
    changes = {path: (left, right) for path, left, right in differences(*trees, free=_NOT_NOTED)}
    note_changes(folder, update, changes, datetime.now().astimezone())
    save_settings(config, folder)
    if saved is not None:
        log.info("going on in %s after %s", folder, counted(saved.updates, "update"))
    if saved is not None or not trained:
        updates, version = (saved.updates, saved.version) if saved is not None else (0, 0)
        rewind(folder, updates, version)
        for hooks in run_hooks():
            hooks.rewind(folder, version)
    return saved


def save_settings(config: RunConfig, folder: Path) -> None:
    """Write config.yaml with resume=never, so that as a recipe of `train` it starts a separate run."""
    save_config(config.model_copy(update={"resume": "never"}), folder / CONFIG_FILE)


def _refuse_without_state(folder: Path, progress: PhaseJournal) -> None:
    """Raise RunFolderError if versions were trained, but no trainer state is left to resume from."""
    if progress.result("warm_start") is None:
        return
    _, _, version = load_policy(folder / POLICY_FILE)
    if version > 0:
        raise RunFolderError(
            f"{folder / STATES} holds no saved run to go on with after {counted(version, 'version')}: the optimizer's "
            f"state is gone; begin another run, with the weights of this one by init_from={folder}"
        )


def prepare_initial_policy(
    checked: tuple[RunConfig, EnvSpec, Policy], folder: Path, progress: PhaseJournal, metrics: MetricsWriter
) -> int:
    """Load or learn the policy's initial weights; return their version."""
    config, spec, policy = checked
    file = folder / POLICY_FILE
    if progress.result("warm_start") is not None:
        _, weights, version = load_policy(file)
        give_weights(policy, weights, file)
        return version
    learned: dict[str, float] = {}
    if config.init_from:
        load_init_weights(config, policy)
        log.info("initial weights: %s", config.init_from)
    elif config.supervised is not None:
        learned = load("pipeline", "demonstrations").learn(checked, folder, progress, metrics)
    save_policy(published_state(as_module(policy)), config, file, 0, spec)
    progress.commit("warm_start", learned)
    return 0


def give_weights(policy: Policy, weights: Mapping[str, Tensor], origin: Path) -> None:
    """Load weights of the policy's own run, read from `origin`. RunFolderError: they no longer fit."""
    try:
        load_published(as_module(policy), weights)
    except ValueError as error:
        raise RunFolderError(
            f"{origin}: {error}; if you changed the code of the policy, undo that, or start another run"
        ) from error


def check_init_settings(config: RunConfig) -> None:
    """Raise RunFolderError if the existing weights of `init_from` belong to other settings; reads no weights."""
    path = Path(config.init_from)
    _refuse_other_settings(config, validate(read_policy_settings(path), origin=str(path)))


def _refuse_other_settings(config: RunConfig, theirs: RunConfig) -> None:
    saved, current = (section.model_dump(mode="json") for section in (theirs.policy, config.policy))
    differing = differences(saved, current, "policy.", frozenset())
    if differing:
        key, has, own = differing[0]
        raise RunFolderError(
            f"init_from = {config.init_from}: {key} is {as_written(own)} here but {as_written(has)} in the policy of "
            "those weights; make them equal, or name other weights"
        )


def load_init_weights(config: RunConfig, policy: Policy) -> None:
    """Load the weights of `init_from` into the policy.

    Frozen tensors that the file lacks come from the checkpoint, or from the seed. RunFolderError, with the policy
    unchanged: there are no weights, or they belong to other settings.
    """
    path = Path(config.init_from)
    if "://" in config.init_from:
        raise RunFolderError(
            f"init_from = {config.init_from}: it takes a run or a file of this machine; names such as hf://owner/name "
            "are taken by policy.checkpoint"
        )
    if not path.exists():
        raise RunFolderError(f"init_from = {path}: it does not exist; name the folder of a run or its policy.pt")
    path = find_run(path)
    with naming_where_it_began(path):
        theirs, weights, _ = load_policy(path)
    _refuse_other_settings(config, theirs)
    part = policy_traits(policy).publishes_part and len(weights) < len(policy.state_dict())
    if part and not released_folder(config.policy) and theirs.seed != config.seed:
        raise RunFolderError(
            f"init_from = {path}: seed is {config.seed} here but {theirs.seed} there, and that file lacks the frozen "
            "tensors, which are drawn from the seed; make the seeds equal, or give both runs a policy.checkpoint"
        )
    try:
        load_published(as_module(policy), weights)
    except ValueError as error:
        raise RunFolderError(f"init_from = {path}: {error}; name weights of a policy for this environment") from error
