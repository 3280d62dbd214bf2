"""Saves a run in two steps: a snapshot between two events, and files written by another thread while the run continues.

The snapshot copies the conductor's state and hard-links the trainer's; samples stay in the arena and are handed over.
`persistence.checkpoints` defines and reads the files; `restore_run` loads them into memory. Invariant: a folder gets
its final name after its content has reached the disk, so a saved run is whole or absent.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.conductors import restore_conductor
from polyrhythm.errors import RunFolderError, RunHalted
from polyrhythm.files import link_or_copy, name_in_errors
from polyrhythm.pipeline.persistence.checkpoints import (
    CHECKSUM,
    PART,
    PUBLISHED_FILE,
    RUN_FILE,
    SAMPLES_FILE,
    TRAINER_FILE,
    TRAINER_FOLDER,
    SavedRun,
    checksum_of,
    next_run,
    saved_runs,
)
from polyrhythm.runtime.launcher import ArenaPayloads, Launcher
from polyrhythm.runtime.memory.tensors import State
from polyrhythm.runtime.memory.weights import Weights
from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.settings import SchedulerSettings
from polyrhythm.specs import Trajectory
from polyrhythm.stations.trainer_states import TrainerStates
from polyrhythm.training.checkpoint import save_state


class SampleHandover:
    """Samples of these payload ids as of now, to be read once while their blocks remain in use.

    The writing thread copies one block after another; main copies a block that it needs sooner
    (`runtime.memory.in_flight`). After one failed read (its host is lost) none is read. Invariant: each sample is
    copied once, before its block can be overwritten, and one at a time; so main waits for at most two copies or one
    failed read.
    """

    def __init__(self, payloads: ArenaPayloads, payload_ids: Sequence[str]) -> None:
        self._payloads, self._payload_ids = payloads, tuple(payload_ids)
        self._pending = {int(payload_id) for payload_id in payload_ids}
        self._copies: dict[int, Trajectory] = {}
        self._lock = threading.Lock()
        self._failure: OSError | None = None

    def is_pending(self, block: int) -> bool:
        """Whether the sample in this block is not copied yet."""
        return block in self._pending

    def copy_now(self, block: int) -> None:
        """Copy the sample in this block if needed. Main calls this before it reuses the block."""
        with self._lock:
            self._copy(block)

    def samples(self) -> Iterator[tuple[str, Trajectory]]:
        """Yield payload id and sample; called by the writing thread. OSError: a sample cannot be read."""
        for payload_id in self._payload_ids:
            block = int(payload_id)
            with self._lock:
                self._copy(block)
                if self._failure is not None:
                    raise self._failure
                sample = self._copies.pop(block)
            yield payload_id, sample

    def give_up(self) -> None:
        """Drop all samples: they will not be written."""
        with self._lock:
            self._pending.clear()
            self._copies.clear()

    def _copy(self, block: int) -> None:
        if block in self._pending:
            try:
                self._copies[block] = copy.deepcopy(self._payloads.read(str(block)))
                self._pending.remove(block)
            except OSError as error:
                self._pending.clear()
                self._failure = error


log = logging.getLogger(__name__)


def read_newest(weights: Weights, what: str, *, needed: bool) -> tuple[int, State] | None:
    """The newest published weights, to write the file `what`.

    If their host does not answer: RunHalted if `needed`, else None with a warning, since the run is ending for another
    reason.
    """
    try:
        return weights.read()
    except ConnectionError as silent:
        why = f"{what} is not written: {silent}, and the newest weights lie there; resume the run from its last save"
        if needed:
            raise RunHalted(why) from silent
        log.warning("%s", why)
        return None


def reader_of(weights: Weights, version: int) -> tuple[int, Callable[[], State]]:
    """A published version, or the newest if that is gone, and a function that returns its tensors.

    Weights on another host are fetched only by that function, in the writing thread, since the link may be slow. It
    raises OSError if the version is gone by then.
    """
    if not weights.fetches:
        found, state = weights.read(version)
        return found, lambda: state

    def fetch() -> State:
        try:
            found, state = weights.read(version)
        except RuntimeError as overwritten:
            raise OSError(str(overwritten)) from overwritten
        if found != version:
            raise OSError(f"version {version} was replaced by {found} before it was fetched")
        return state

    return version, fetch


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run between two events, ready to be written by another thread.

    part: folder to write to, which already has the trainer's state. samples: finished ones. version: of the published
    weights; published: returns them, None if they are the trainer's.
    """

    part: Path
    conductor: dict[str, Any]
    counts: dict[str, Any]
    samples: SampleHandover
    version: int
    published: Callable[[], State] | None


def take_snapshot(
    folder: Path,
    conductor: AnyConductor,
    payloads: ArenaPayloads,
    weights: Weights,
    states: TrainerStates,
    counts: dict[str, Any],
) -> RunSnapshot:
    """Take a snapshot of the run, which must be written or given up before the next one.

    It includes the trainer's newest state; updates that this state lacks are rolled back on resume. OSError: the folder
    cannot be written, or no trainer state is left.
    """
    whole = next_run(folder)
    part = whole.with_name(whole.name + PART)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    if not (saved := states.paths()):
        raise OSError(f"there is no {states.pattern} any more")
    state, versions = saved[-1], conductor.versions
    link_or_copy(state, part / (TRAINER_FOLDER if state.is_dir() else TRAINER_FILE))  # replaced, never changed
    version, published = versions.trained, None
    if versions.in_version or states.updates(state) != versions.updates:
        # The trainer's state may be newer, of updates that were undone.
        version, published = reader_of(weights, versions.published)
    finished = [sample for sample in conductor.rollout.samples.values() if sample.payload_id]
    waiting = [sample.payload_id for sample in finished if not sample.ticket.evaluation]
    samples = SampleHandover(payloads, waiting)
    payloads.in_flight.hand_over(samples)
    return RunSnapshot(part, conductor.save(), counts, samples, version, published)


def write_snapshot(snapshot: RunSnapshot, keep: int) -> Path:
    """Write a snapshot, delete all but the newest `keep` saved runs, and return its path.

    OSError: it cannot be written; its files are then removed and the older saved runs stay.
    """
    part = snapshot.part
    whole = part.with_name(part.name.removesuffix(PART))
    try:
        with name_in_errors(part):
            _write_files(snapshot)
        part.replace(whole)
    except BaseException:
        snapshot.samples.give_up()
        shutil.rmtree(part, ignore_errors=True)
        raise
    _sync(whole.parent)
    for old in saved_runs(whole.parent)[:-keep]:
        try:
            shutil.rmtree(old)
        except OSError as error:
            log.warning("the older saved run %s cannot be removed: %s", old, error)
    return whole


def _write_files(snapshot: RunSnapshot) -> None:
    part = snapshot.part
    with zipfile.ZipFile(part / SAMPLES_FILE, "w") as archive:  # as `numpy.savez`, with one sample in memory at a time
        for payload_id, sample in snapshot.samples.samples():
            for name, array in _flat(payload_id, sample).items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)
    if snapshot.published is not None:
        save_state({"policy": snapshot.published()}, part / PUBLISHED_FILE)
    content = {"conductor": snapshot.conductor, "counts": snapshot.counts, "version": snapshot.version}
    content |= {CHECKSUM: checksum_of(content)}
    (part / RUN_FILE).write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    for path in part.rglob("*"):
        _sync(path)


def _flat(payload_id: str, trajectory: Trajectory) -> dict[str, NDArray[Any]]:
    """The trajectory's arrays by `<payload id>/<field>` or `<payload id>/<field>/<name>`; None fields are left out."""
    arrays: dict[str, NDArray[Any]] = {}
    for part in fields(trajectory):
        value = getattr(trajectory, part.name)
        if isinstance(value, dict):
            arrays |= {f"{payload_id}/{part.name}/{name}": array for name, array in value.items()}
        elif value is not None:
            arrays[f"{payload_id}/{part.name}"] = np.asarray(value)
    return arrays


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def restore_run(saved: SavedRun, settings: SchedulerSettings, launcher: Launcher, versions: int) -> AnyConductor:
    """Restore the saved run's conductor, without stations, and put its samples into the arena.

    versions: the target, which may be lower than when the run was saved. RunFolderError: conductor or samples do not
    fit.
    """
    try:
        conductor = restore_conductor(settings, saved.conductor)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{saved.trainer.parent} cannot be resumed: it was saved by another version of polyrhythm "
            f"({type(error).__name__}: {error}); resume it with that version, or begin another run"
        ) from error
    conductor.detach()
    rollout = conductor.rollout
    rollout.admission.target = min(rollout.admission.target, versions)
    # The samples keep their blocks, or get the first ones if the arena has become smaller.
    smaller = any(int(payload_id) >= launcher.payloads.arena.layout.blocks for payload_id in saved.samples)
    blocks = {old: str(block) if smaller else old for block, old in enumerate(saved.samples)}
    try:
        for sample in rollout.samples.values():
            sample.payload_id = blocks[sample.payload_id] if sample.payload_id else ""
        for payload_id, trajectory in saved.samples.items():
            launcher.payloads.put(blocks[payload_id], trajectory)
    except (LookupError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{saved.trainer.parent} cannot be resumed: its samples do not fit policy and environment "
            f"({type(error).__name__}: {error}); if you changed their code, undo that, or begin another run"
        ) from error
    launcher.payloads.in_flight.restore(tuple(blocks.values()))
    saved.samples.clear()  # they are in the arena now
    return conductor
