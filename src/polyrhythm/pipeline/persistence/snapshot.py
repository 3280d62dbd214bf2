"""A run is saved in two steps: a snapshot between two events, and its files by another thread while the run goes on.

Taking the snapshot copies the conductor's state and makes hard links to the trainer's; the samples are handed over
where they lie. `persistence.checkpoints` has the files and reads them; `restore_run` puts one back into memory.

Invariant: a folder gets its final name after everything in it has reached the disk, so a saved run is whole or absent.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
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
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.runtime.memory.payloads import Payloads
from polyrhythm.runtime.memory.tensors import State
from polyrhythm.runtime.memory.weights import Weights
from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.settings import SchedulerSettings
from polyrhythm.specs import Trajectory
from polyrhythm.stations.trainer_states import TrainerStates
from polyrhythm.training.checkpoint import save_state


class SampleHandover:
    """The samples of these payload ids, as they are now, to be read once, while their blocks go on being used.

    The thread that writes copies one block after another; a block that main needs sooner is copied by main
    (`runtime.memory.in_flight`). If one cannot be read, as its host is lost, none is read any more. Invariant: each
    sample is copied once, before its block can be overwritten, and at most one copy is being made at a time: main never
    waits for longer than two take, or one that cannot be read.
    """

    def __init__(self, payloads: Payloads, payload_ids: Sequence[str]) -> None:
        self._payloads, self._payload_ids = payloads, tuple(payload_ids)
        self._pending = {int(payload_id) for payload_id in payload_ids}
        self._copies: dict[int, Trajectory] = {}
        self._lock = threading.Lock()
        self._failure: OSError | None = None

    def is_pending(self, block: int) -> bool:
        """Whether the sample in this block has yet to be copied."""
        return block in self._pending

    def copy_now(self, block: int) -> None:
        """Copy the sample in this block, unless that is done. Called by main, which is about to reuse the block."""
        with self._lock:
            self._copy(block)

    def samples(self) -> Iterator[tuple[str, Trajectory]]:
        """Payload id and sample, one after another. Called by the thread that writes. OSError: one cannot be read."""
        for payload_id in self._payload_ids:
            block = int(payload_id)
            with self._lock:
                self._copy(block)
                if self._failure is not None:
                    raise self._failure
                sample = self._copies.pop(block)
            yield payload_id, sample

    def give_up(self) -> None:
        """Copy nothing more: the samples are not going to be written."""
        with self._lock:
            self._pending.clear()
            self._copies.clear()

    def _copy(self, block: int) -> None:
        """Copy the sample in this block if it is pending."""
        if block in self._pending:
            try:
                self._copies[block] = _copy_of(self._payloads.read(str(block)))
                self._pending.remove(block)
            except OSError as error:
                self._pending.clear()
                self._failure = error


def _copy_of(sample: Trajectory) -> Trajectory:
    """The same sample in memory of its own."""
    own: dict[str, Any] = {}
    for field in fields(sample):
        value = getattr(sample, field.name)
        if isinstance(value, dict):
            own[field.name] = {name: array.copy() for name, array in value.items()}
        elif hasattr(value, "copy"):
            own[field.name] = value.copy()
    return replace(sample, **own)


log = logging.getLogger(__name__)


def read_newest(weights: Weights, what: str, *, needed: bool) -> tuple[int, State] | None:
    """The newest version, for the file `what`. If its host does not answer: RunHalted where it is needed; else None and
    a warning, since the run ends already, for another reason."""
    try:
        return weights.read()
    except ConnectionError as silent:
        why = f"{what} is not written: {silent}, and the newest weights lie there; resume the run from its last save"
        if needed:
            raise RunHalted(why) from silent
        log.warning("%s", why)
        return None


def reader_of(weights: Weights, version: int) -> tuple[int, Callable[[], State]]:
    """The version that is there now, or the newest if it is gone; and what gives its tensors to the thread that writes
    them. From another host they are fetched only then, since that takes as long as the link needs. OSError: the version
    is gone by then."""
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
    """A run as it is at a moment between two events, ready to be written by another thread.

    part: the folder to write to, which holds the trainer's state already. samples: the finished ones. version: of the
    published weights; published: gives these, where they are not the trainer's.
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
    payloads: Payloads,
    weights: Weights,
    states: TrainerStates,
    counts: dict[str, Any],
) -> RunSnapshot:
    """The run as it is now; its finished samples are handed over, so the snapshot must be written or given up before
    another is taken. OSError: there is no place for it.

    The trainer's newest state goes with it. Updates that it lacks are rolled back when the run is resumed.
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
        # A newer one there may be of updates that were undone.
        version, published = reader_of(weights, versions.published)
    finished = [sample for sample in conductor.rollout.samples.values() if sample.payload_id]
    waiting = [sample.payload_id for sample in finished if not sample.ticket.evaluation]
    samples = SampleHandover(payloads, waiting)
    payloads.in_flight.hand_over(samples)
    return RunSnapshot(part, conductor.save(), counts, samples, version, published)


def write_snapshot(snapshot: RunSnapshot, keep: int) -> Path:
    """Write it beside older saved runs, of which the newest `keep` stay, this one included; its path.

    OSError: it cannot be written; then nothing of it is left, and the older ones stay.
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
    _write_samples(part / SAMPLES_FILE, snapshot.samples)
    if snapshot.published is not None:
        save_state({"policy": snapshot.published()}, part / PUBLISHED_FILE)
    content = {"conductor": snapshot.conductor, "counts": snapshot.counts, "version": snapshot.version}
    content |= {CHECKSUM: checksum_of(content)}
    (part / RUN_FILE).write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    for path in part.rglob("*"):
        _sync(path)


def _write_samples(path: Path, samples: SampleHandover) -> None:
    """As `numpy.savez` would, but one sample in memory at a time."""
    with zipfile.ZipFile(path, "w") as archive:
        for payload_id, sample in samples.samples():
            for name, array in _flat(payload_id, sample).items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)


def _flat(payload_id: str, trajectory: Trajectory) -> dict[str, NDArray[Any]]:
    """The trajectory's arrays by `<handle>/<field>` or `<handle>/<field>/<name>`; a field that is None has none."""
    arrays: dict[str, NDArray[Any]] = {}
    for part in fields(trajectory):
        value = getattr(trajectory, part.name)
        if isinstance(value, dict):
            arrays |= {f"{payload_id}/{part.name}/{name}": array for name, array in value.items()}
        elif value is not None:
            arrays[f"{payload_id}/{part.name}"] = np.asarray(value)
    return arrays


def _sync(path: Path) -> None:
    """To the disk, so that a power cut leaves it whole."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def restore_run(saved: SavedRun, settings: SchedulerSettings, launcher: Launcher, versions: int) -> AnyConductor:
    """Restore the saved run's conductor, without stations, and put its samples into the arena. versions: the target,
    which may be lower than when the run was saved."""
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
    blocks = _assign_blocks(saved.samples, launcher.payloads.arena.layout.blocks)
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


def _assign_blocks(payload_ids: Iterable[str], blocks: int) -> dict[str, str]:
    """The arena block of each saved sample: the old one, or the first blocks if there are fewer than before."""
    own = list(payload_ids)
    if all(int(payload_id) < blocks for payload_id in own):
        return {payload_id: payload_id for payload_id in own}
    return {payload_id: str(block) for block, payload_id in enumerate(own)}
