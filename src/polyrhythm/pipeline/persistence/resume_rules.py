"""Chooses the folder of a run, new or resumed, and the settings that a resumed run may change."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polyrhythm.config.base import NotFound, written
from polyrhythm.config.load import load_config
from polyrhythm.config.recipes import read
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError, MissingError, RunFolderError
from polyrhythm.observe.run_folder import CONFIG_FILE, new_run_folder, refuse_no_run, refuse_taken, take_folder
from polyrhythm.pipeline.persistence.phases import began_in, command_of, is_finished
from polyrhythm.pipeline.placed import with_start
from polyrhythm.runtime.devices import Devices
from polyrhythm.sources import fetched_folder

#: Settings of the section `policy` that name folders of released files.
_FOLDERS = ("checkpoint", "tokenizer")
MOVABLE = frozenset(f"policy.{key}" for key in _FOLDERS)


def movable(before: Mapping[str, Any], after: Mapping[str, Any]) -> frozenset[str]:
    """Folder settings that name a folder both before and after, so that a change may be a move."""
    return frozenset(f"policy.{key}" for key in _FOLDERS if _is_folder(before.get(key)) and _is_folder(after.get(key)))


def refuse_missing_folders(config: RunConfig, command: str, run: Path) -> None:
    """MissingError with the remedy if a folder named by the policy's settings does not exist. Names of a source
    (`sources`) are downloaded.

    command: the one that needs the run, or its checkpoint, for the message.
    """
    for key in _FOLDERS:
        folder = getattr(config.policy, key, "")
        if not _is_folder(folder) or fetched_folder(folder, what=f"policy.{key}").exists():
            continue
        elsewhere = _began_elsewhere(run)
        start = f", or start this in {elsewhere}, where the run began" if elsewhere else ""
        words = shlex.join(["polyrhythm", command, str(run), f"policy.{key}=NEW"])
        raise MissingError(
            f"policy.{key} = {folder}: there is no such folder here; name where it is now: {words}{start}"
        )


def _is_folder(value: object) -> bool:
    return isinstance(value, str) and value not in ("", "words")


log = logging.getLogger(__name__)

#: Settings and sections that a resumed run may change: where and how it runs, its length, learning rates, measurement
#: and end conditions.
_FREE = frozenset(
    {
        *("launcher", "out_dir", "resume", "shutdown_s", "placement", "data_plane", "supervision", "checkpoint"),
        *("ray", "prometheus", "tracking", "join.address", "join.port", "join.reconnect_s", "join.min_simulators"),
        *("training.versions", "evaluation"),
        *("training.optimizer.lr", "training.optimizer.value_lr", "training.optimizer.lr_final_fraction"),
        *("training.optimizer.warmup_updates", "training.optimizer.warmup_steps"),
        "policy.engine",
        *("scoring.processes", "scoring.at_a_time", "scoring.max_attempts", "scoring.try_first"),
        *("rollout.max_attempts", "rollout.max_dropped", "rollout.quarantine_after", "rollout.reset_ahead"),
        *("training.on_nonfinite_gradient", "training.max_skipped_steps"),
        *("training.optimizer.offload", "training.precomputed_mib"),
    }
)
#: Location settings, which `polyrhythm resume` may not change.
_WHERE = frozenset({"out_dir", "resume"})
#: Settings that early runs lack, with the values that describe their behaviour.
_BEFORE = {"training.max_kl": None, "algorithm.normalize_rewards": False}
_SAMPLES = "training.mini_batch_samples"
_VALUE_LR = "training.optimizer.value_lr"


def config_to_resume(folder: Path, overrides: Sequence[str]) -> RunConfig:
    """Settings of the run in `folder` with the overrides applied.

    RunFolderError: there is no run to resume, or an override changes a fixed setting.
    """
    refuse_no_run(folder)
    for override in overrides:
        if (name := override.partition("=")[0].strip()) in _WHERE:
            raise goes_on_where_it_is(override, folder, name)
    with naming_where_it_began(folder):
        config = saved_config(folder, overrides)
        config = config.model_copy(update={"resume": str(folder)})
        _refuse_unfit(folder, config, overrides)
    elsewhere, paths = _began_elsewhere(folder), _relative_paths(config.model_dump(mode="json"))
    refuse_missing_folders(config, "resume", folder)
    if elsewhere and paths:
        words = "%s began in the folder %s: relative paths in its settings now mean others (%s)"
        log.warning(words, folder, elsewhere, ", ".join(paths))
    return config


def saved_config(folder: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Settings of the run in `folder`, with overrides. A setting that its version lacked gets the behaviour of that
    version, not today's default."""
    saved = read(folder / CONFIG_FILE)
    then: dict[str, Any] = {}
    for path, value in _BEFORE.items():
        section, _, key = path.partition(".")
        if isinstance(saved.get(section), dict) and key not in saved[section]:
            then[path] = value
    training = saved.get("training")
    if isinstance(training, dict) and "warmup_steps" not in training.get("optimizer", {}):
        # In that version `require_batches` only multiplied the update's size.
        batches = training.get("require_batches", 1)
        if batches > 1:
            then |= {"training.require_batches": 1, _SAMPLES: batches * training["mini_batch_samples"]}
    return load_config(folder / CONFIG_FILE, [then, *overrides])


def run_to_resume(config: RunConfig, named: Path | None) -> Path | None:
    """Folder of the run that `resume` selects; None for a new run.

    named: folder that the user gave for this run. RunFolderError: `resume` selects a folder that does not fit.
    """
    return _fitting(_selected(config, named), config)


def started(config: RunConfig, named: Path | None, devices: Devices | None = None) -> tuple[RunConfig, Path | None]:
    """The configuration with the settings of `placement.start`, and `run_to_resume`, which keeps those it began with.

    devices: of the machine that trains (None: find them). RunFolderError: from `refuse_taken`, before anything is
    planned; ConfigError: from `with_start`.
    """
    folder = _selected(config, named)
    if folder is None and named is not None:
        refuse_taken(named)
    if config.placement.start == "plan":
        config = with_start(config, None if folder is None else saved_config(folder), devices)
    return config, _fitting(folder, config)


def _selected(config: RunConfig, named: Path | None) -> Path | None:
    if config.resume == "never":
        return None
    if config.resume != "auto":
        if named is not None:
            raise goes_on_where_it_is(f"out = {named}", config.resume, "out")
        return _run_in(Path(config.resume))
    if named is not None and (named / CONFIG_FILE).is_file():
        return named
    if named is not None:
        log.info("resume = auto: %s holds no run, so this one is new", named)
        return None
    runs = sorted((Path(config.out_dir) / config.name).glob(f"*/{CONFIG_FILE}"), key=lambda path: path.stat().st_mtime)
    unfinished = [path.parent for path in runs if not is_finished(path.parent)]
    if not unfinished:
        log.info("resume = auto: %s/%s has no unfinished run, so this one is new", config.out_dir, config.name)
        return None
    return unfinished[-1]


def new_folder(config: RunConfig, named: Path | None) -> Path:
    """A folder for a new run: `named`, which must be empty or absent, or <out_dir>/<name>/<time>."""
    if named is not None:
        return take_folder(named)
    return new_run_folder(Path(config.out_dir), config.name, datetime.now().astimezone())


def _fitting(folder: Path | None, config: RunConfig) -> Path | None:
    if folder is not None:
        with naming_where_it_began(folder):
            _refuse_unfit(folder, config)
    return folder


def _run_in(folder: Path) -> Path:
    if not folder.exists():
        raise RunFolderError(f"resume = {folder}: it is not there; name another, or set resume=never")
    if not (folder / CONFIG_FILE).is_file():
        raise RunFolderError(
            f"resume = {folder}: that is not a run's folder, it has no {CONFIG_FILE}; name another, or set resume=never"
        )
    return folder


def goes_on_where_it_is(given: str, folder: Path | str, name: str) -> RunFolderError:
    return RunFolderError(f"{given}: the run in {folder} goes on where it is; leave out {name}")


def _refuse_unfit(folder: Path, config: RunConfig, overrides: Sequence[str] | None = None) -> None:
    """Raise RunFolderError if the run in `folder` cannot be resumed with this configuration.

    overrides: those of `polyrhythm resume`; None if a recipe's `resume` setting selected the run.
    """
    command, otherwise = command_of(folder), "set resume=never"
    if overrides is not None:
        words = shlex.join([command, str(folder / CONFIG_FILE), *overrides])
        otherwise = f"begin another run: polyrhythm {words} --out DIR"
    found = saved_config(folder)
    theirs, ours = found.model_dump(mode="json"), config.model_dump(mode="json")
    differing = differences(theirs, ours, free=_FREE | movable(theirs["policy"], ours["policy"]))
    rates = found.training.optimizer.value_lr, config.training.optimizer.value_lr
    if None in rates and rates[0] != rates[1]:
        differing.append((_VALUE_LR, *rates))  # the optimizer's state has other parameter groups
    if differing:
        path, has, wanted = differing[0]
        others = ", ".join(other for other, _, _ in differing[1:])
        more = f" (differ, too: {others})" if others else ""
        raise RunFolderError(
            f"resume = {folder}: {path} is {as_written(wanted)} here but {as_written(has)} in that run{more}; "
            f"{'give it the same settings' if overrides is None else 'leave it as it is'}, or {otherwise} "
            "(polyrhythm resume --help lists what may change)"
        )
    trains, versions = command == "train", found.training.versions
    if is_finished(folder) and (config.training.versions == versions or not trains):
        extend = f"set training.versions higher than {versions} to extend it" if trains else "name another"
        raise RunFolderError(f"resume = {folder}: that run is finished; {extend}, or {otherwise}")


def _relative_paths(tree: Any, path: str = "") -> list[str]:
    """Settings whose text looks like a relative path, except the location of the run."""
    if path in _WHERE:
        return []
    if isinstance(tree, dict):
        return [
            found for key, value in tree.items() for found in _relative_paths(value, f"{path}.{key}" if path else key)
        ]
    return [path] if isinstance(tree, str) and "/" in tree and not Path(tree).is_absolute() else []


def may_change() -> frozenset[str]:
    """Settings that a resumed run may change, for the help text."""
    return _FREE - _WHERE | MOVABLE


def as_written(value: object) -> str:
    """A setting's value in command-line syntax; an empty string is quoted."""
    return '""' if value == "" else written(value)


def differences(
    theirs: dict[str, Any], ours: dict[str, Any], prefix: str = "", free: frozenset[str] = _FREE
) -> list[tuple[str, Any, Any]]:
    """Dotted paths whose values differ, with both values, except those in `free`. Sections of different type yield only
    the type."""
    found = []
    keys = theirs.keys() | ours.keys() if theirs.get("type") == ours.get("type") else {"type"}
    for key in sorted(keys):
        path, left, right = f"{prefix}{key}", theirs.get(key), ours.get(key)
        if path in free or left == right:
            continue
        if isinstance(left, dict) and isinstance(right, dict):
            found += differences(left, right, f"{path}.", free)
        else:
            found.append((path, left, right))
    return found


@contextmanager
def naming_where_it_began(path: Path) -> Iterator[None]:
    """Extend not-found errors in this block by the run's original working folder, which may have the missing class or
    file. path: the run's folder, or weights or a checkpoint in it."""
    try:
        yield
    except ConfigError as error:
        elsewhere = _began_elsewhere(path) if _is_not_found(error) else None
        if elsewhere is None:
            raise
        raise RunFolderError(
            f"{error}; that run began in the folder {elsewhere}, and what its settings name may be there: start this "
            "from there"
        ) from error


def _is_not_found(error: BaseException | None) -> bool:
    if error is None or isinstance(error, NotFound | ImportError | FileNotFoundError):
        return error is not None
    if isinstance(error, ValidationError):  # if there is another problem, the folder would not help
        return all(_is_not_found(detail.get("ctx", {}).get("error")) for detail in error.errors(include_url=False))
    return _is_not_found(error.__cause__ or error.__context__)


def _began_elsewhere(path: Path) -> str | None:
    """Original working folder of the run that is, or has, this path; None if unknown or the current one."""
    found = next(filter(None, map(began_in, (path, *path.resolve().parents[:2]))), None)
    return None if found is None or Path(found) == Path.cwd() else found
