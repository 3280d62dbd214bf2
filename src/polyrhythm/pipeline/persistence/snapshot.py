"""A run is saved in two steps: a snapshot between two events, and its files by another thread while the run goes on.

Taking the snapshot copies the conductor's state and makes hard links to the trainer's; the samples are handed over
where they lie. `persistence.checkpoints` has the files and reads them.

Invariant: a folder gets its final name after everything in it has reached the disk, so a saved run is whole or absent.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.files import link_or_copy, name_in_errors
from polyrhythm.pipeline.persistence.checkpoints import (
    CHECKSUM,
    PART,
    PUBLISHED_FILE,
    RUN_FILE,
    SAMPLES_FILE,
    TRAINER_FILE,
    TRAINER_FOLDER,
    checksum_of,
    next_run,
    saved_runs,
)
from polyrhythm.pipeline.persistence.handover import SampleHandover
from polyrhythm.pipeline.persistence.published import reader_of
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.runtime.memory.payloads import Payloads
from polyrhythm.runtime.memory.tensors import State
from polyrhythm.runtime.memory.weights import Weights
from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.specs import Trajectory
from polyrhythm.stations.trainer_states import TrainerStates
from polyrhythm.training.checkpoint import save_state

log = logging.getLogger(__name__)


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
    memory: tuple[Payloads, InFlight, Weights],
    states: TrainerStates,
    counts: dict[str, Any],
) -> RunSnapshot:
    """The run as it is now; its finished samples are handed over, so the snapshot must be written or given up before
    another is taken. OSError: there is no place for it.

    The trainer's newest state goes with it. Updates that it lacks are rolled back when the run is resumed.
    """
    payloads, pool, weights = memory
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
    pool.hand_over(samples)
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
