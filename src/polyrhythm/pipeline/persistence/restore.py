"""Puts a saved run back into a conductor and the memory of a new launcher."""

from __future__ import annotations

from collections.abc import Iterable

from polyrhythm.conductors import restore_conductor
from polyrhythm.errors import RunFolderError
from polyrhythm.pipeline.persistence.checkpoints import SavedRun
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.settings import SchedulerSettings


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
