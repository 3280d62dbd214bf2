"""Replays some of an evaluation's episodes for a video: one env batch in this process, one row per episode.

The evaluation's stations store no pictures, so memory does not grow with the number of episodes. The replay uses the
same seeds, noise and order of calls; it differs only if the environment or the policy's arithmetic depends on the other
rows of the batch. An episode that fails here is shown up to the failure, whereas the evaluation retries it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from polyrhythm.config.base import type_name
from polyrhythm.conformance import violation_of
from polyrhythm.envs.base import EnvBatch, EnvSettings, FullEnvBatch, FullEnvSettings, batch_traits, traits_of
from polyrhythm.errors import ConfigError, PolyrhythmError, RunHalted
from polyrhythm.pipeline.array_specs import shown
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.runtime.memory.tensors import as_array, as_tensors
from polyrhythm.scheduler.records import Episode
from polyrhythm.scheduler.rollout.evaluation import noise_stream
from polyrhythm.specs import INSTRUCTION, PROGRESS, ArraySpec, EnvSpec
from polyrhythm.specs.finite import ENVIRONMENT, POLICY, describe_not_finite, first_not_finite
from polyrhythm.specs.hashing import mix_array
from polyrhythm.stations.simulator.chunk import ChunkResult, Step, stepper, whole_batch
from polyrhythm.stations.simulator.guard import EnvFault, GuardedEnv
from polyrhythm.stations.simulator.slot import StepSettings

log = logging.getLogger(__name__)

#: Seconds between two log lines on the progress of a video.
_TELL_S = 10.0

#: Longer edge of an episode's picture, in pixels.
EDGE = 192
#: uint8 [H,W,3].
Picture = NDArray[np.uint8]


@dataclass(slots=True)
class PlayedEpisode:
    """A replayed episode: its outcome and its pictures (first state, some in between, last state).

    success: None if not reported. failure: why it ended early, else ""; an episode that failed at its reset has no
    pictures.
    """

    episode: Episode
    pictures: list[Picture] = field(default_factory=list)
    success: bool | None = None
    episode_return: float = 0.0
    env_steps: int = 0
    failure: str = ""


def play(
    settings: EnvSettings, policy: Policy, episodes: Sequence[Episode], step: StepSettings, pictures: int, rows: int
) -> Iterator[PlayedEpisode]:
    """Play these episodes, at most `rows` in parallel, with at most `pictures` pictures each, plus the last.

    rows: batch size of a run; memory grows with it, and not with the number of episodes. ConfigError: the environment
    has no pictures or cannot be built. RunHalted: it fails while it draws.
    """
    kind = type_name(settings)
    batch = _build_visible(settings, kind, min(len(episodes), rows), rows)
    try:
        every = -(-step.episode_steps(batch.spec.max_steps) // pictures)
        for first in range(0, len(episodes), batch.rows):
            yield from _Playback(batch, policy, episodes[first : first + batch.rows], step, every).run()
    except EnvFault as fault:
        raise RunHalted(
            f"env.type = {kind}: {fault}, while its episodes were replayed for a video; fix it, or leave --video out"
        ) from fault
    finally:
        batch.close()


def _build_visible(settings: EnvSettings, kind: str, wanted: int, rows: int) -> EnvBatch:
    """Build a batch with pictures, of `wanted` rows, or of `rows` if the environment refuses that number."""
    drawn, call, batch = picture_of(settings.spec()) is None, "rendering", None
    try:
        changes = drawn and traits_of(settings).rendering
        found = cast(FullEnvSettings, settings).rendering() if changes else settings
        call = "build"
        if found:
            batch = _build(found, wanted, rows)
    except PolyrhythmError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"env.type = {kind}: {violation_of(call, error)}") from error
    if batch is None or (drawn and not batch_traits(batch).draws_rows):
        raise ConfigError(
            f"env.type = {kind}: it has no pictures: no observation is an image (uint8 [H,W,3]), and it does not "
            "render its rows; leave --video out, or give its batch a render(row) (a Gymnasium environment: render() "
            "and rgb_array among its render_modes)"
        )
    return batch


def _build(settings: EnvSettings, wanted: int, rows: int) -> EnvBatch:
    try:
        return settings.build(wanted)
    except Exception:
        if rows == wanted:
            raise
        return settings.build(rows)


def picture_of(spec: EnvSpec) -> str | None:
    """Name of the first observation that is an image; None if there is none."""
    return next((name for name, array in spec.observation.items() if _as_rgb(array) is not None), None)


class _Playback:
    """Replays episode i in row i; rows whose episode has ended are not stepped. every: chunk steps between pictures."""

    def __init__(
        self, batch: EnvBatch, policy: Policy, episodes: Sequence[Episode], step: StepSettings, every: int
    ) -> None:
        self._env, self._batch, self._every, self._step = GuardedEnv(batch), batch, every, step
        self._spec, self._policy = batch.spec, policy
        as_module(policy).eval()
        self._advance: Step = self._env.step if self._spec.step_rows else whole_batch(self._env)
        self._played = [PlayedEpisode(episode) for episode in episodes]
        self._obs = {name: np.zeros((len(episodes), *a.shape), a.dtype) for name, a in shown(self._spec).items()}
        self._obs[INSTRUCTION][:] = [episode.instruction for episode in episodes]
        self._greedy = np.array([episode.greedy for episode in episodes])
        self._noise = np.array([noise_stream(episode) for episode in episodes], np.int64)
        self._picture = _picture_function(batch)

    def run(self) -> list[PlayedEpisode]:
        episodes = [played.episode for played in self._played]
        running = np.arange(len(episodes))
        begun = [*episodes, *[episodes[-1]] * (self._batch.rows - len(episodes))]
        seeds = [episode.seed for episode in begun]
        with self._failing(running):
            self._env.reset(np.arange(len(begun)), [episode.task for episode in begun], seeds)
        self._fail_rows(running)
        self._observe(running)
        self._add_pictures(running)
        steps, told = 0, time.monotonic()
        while len(running := self._unfailed(running)):
            over = np.ones(len(running), np.bool_)
            with self._failing(running):
                over = self._act(running, steps)
            steps += 1
            self._observe(running)
            self._add_pictures(running[over] if steps % self._every else running)
            running = running[~over]
            if time.monotonic() - told >= _TELL_S:
                told = time.monotonic()
                done = f"{steps} of at most {self._step.episode_steps(self._spec.max_steps)} chunk steps"
                log.info("video: %s, %d of %d episodes have ended", done, len(episodes) - len(running), len(episodes))
        return self._played

    @contextmanager
    def _failing(self, rows: NDArray[np.intp]) -> Iterator[None]:
        """Fail the episodes of all these rows if an environment call raises, since the call does not name the row."""
        try:
            yield
        except EnvFault as fault:
            for row in self._unfailed(rows):
                self._fail(int(row), f"{fault}{fault.place}")

    def _fail(self, row: int, failure: str) -> None:
        episode = self._played[row].episode
        self._played[row].failure = failure
        log.warning("video: the episode of task %d, seed %d failed: %s", episode.task, episode.seed, failure)

    def _fail_rows(self, rows: NDArray[np.intp]) -> None:
        """Fail the episodes of those rows that the guard isolated as failed; failures of idle rows are discarded."""
        for row, fault in self._env.take_failed(rows).items():
            self._fail(row, f"{fault}{fault.place}")

    def _fail_nonfinite(self, rows: NDArray[np.intp], culprit: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        for place, what in first_not_finite({n: x for n, x in arrays.items() if x.dtype.kind == "f"}).items():
            if not self._played[row := int(rows[place])].failure:
                self._fail(row, describe_not_finite(culprit, what))
                if culprit == ENVIRONMENT:
                    self._env.discard(row)

    def _unfailed(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        return rows[np.array([not self._played[row].failure for row in rows], np.bool_)]

    def _act(self, rows: NDArray[np.intp], steps: int) -> NDArray[np.bool_]:
        """Do one chunk step of these rows; return which of them are over, [n]. steps: chunk steps done before."""
        cpu = torch.device("cpu")
        obs = as_tensors({name: array[rows] for name, array in self._obs.items()}, cpu)
        keys = as_tensors({"greedy": self._greedy[rows], "noise_key": mix_array(self._noise[rows], steps)}, cpu)
        with torch.inference_mode():
            actions = as_array(self._policy.act(obs, keys["greedy"], keys["noise_key"]).actions)
        self._fail_nonfinite(rows, POLICY, {"actions": actions})
        over, going = np.ones(len(rows), np.bool_), np.isin(rows, self._unfailed(rows))
        if (stepped := rows[going]).size:
            done = np.array([self._played[row].env_steps for row in stepped])
            step = stepper(self._spec, self._step.action_repeat)
            result = step(self._advance, stepped, actions[going], self._spec.max_steps - done)
            over[going] = result.terminated | result.truncated
            for i, row in enumerate(stepped):
                self._count(self._played[row], result, i)
            self._fail_rows(stepped[result.nan_rewards])
            self._fail_nonfinite(stepped, ENVIRONMENT, {"reward": result.rewards})
        return over

    @staticmethod
    def _count(played: PlayedEpisode, result: ChunkResult, place: int) -> None:
        if (success := int(result.success[place])) >= 0:
            played.success = bool(played.success or success)
        played.episode_return += float(result.rewards[place].sum())
        played.env_steps += int(result.steps[place])

    def _observe(self, rows: NDArray[np.intp]) -> None:
        """Observe the rows that have not failed, as the simulator station does after each chunk step."""
        if not (rows := self._unfailed(rows)).size:
            return
        seen = {name: np.empty((len(rows), *a.shape), a.dtype) for name, a in self._spec.observation.items()}
        with self._failing(rows):
            self._env.observe(rows, seen)
            for name, array in seen.items():
                self._obs[name][rows] = array
            self._fail_nonfinite(rows, ENVIRONMENT, {f"observation {name}": array for name, array in seen.items()})
        self._obs[PROGRESS][rows] = [self._played[row].env_steps / self._spec.max_steps for row in rows]

    def _add_pictures(self, rows: NDArray[np.intp]) -> None:
        for row in self._unfailed(rows):
            self._played[row].pictures.append(reduced(self._picture(self._obs, int(row))))


def reduced(picture: Picture) -> Picture:
    """The picture, scaled down to a tile's size if it is larger."""
    factor = EDGE / max(picture.shape[:2])
    if factor >= 1:
        return picture
    size = round(factor * picture.shape[1]), round(factor * picture.shape[0])
    return np.asarray(Image.fromarray(picture).resize(size))


def _picture_function(batch: EnvBatch) -> Callable[[dict[str, NDArray[Any]], int], Picture]:
    name = picture_of(batch.spec)
    if name is not None:
        rgb = _as_rgb(batch.spec.observation[name])
        assert rgb is not None
        return lambda obs, row: rgb(obs[name][row])
    return lambda _, row: _rendered(cast(FullEnvBatch, batch), row)


def _rendered(batch: FullEnvBatch, row: int) -> Picture:
    """The environment's rendering. EnvFault: it raises or returns another form."""
    try:
        picture = batch.render(row)
    except (PolyrhythmError, ImportError):
        raise
    except Exception as error:
        raise EnvFault(f"render: {type(error).__name__}: {error}") from error
    found = np.asarray(picture)
    if found.dtype != np.uint8 or found.ndim != 3 or found.shape[2] != 3:
        raise EnvFault(f"render returned {found.dtype} {list(found.shape)}, it must be uint8 [H,W,3]")
    return found


def _as_rgb(array: ArraySpec) -> Callable[[NDArray[Any]], Picture] | None:
    """Function that converts one row of an image array (grey or colour, channels last or first) to RGB; None if not an
    image."""
    shape = array.shape
    if array.dtype != "uint8" or len(shape) not in (2, 3) or min(sorted(shape)[-2:]) < 8:
        return None
    if len(shape) == 2:
        return lambda row: np.repeat(row[:, :, None], 3, 2)
    if shape[2] in (1, 3):
        return lambda row: np.broadcast_to(row, (*row.shape[:2], 3)).copy()
    if shape[0] in (1, 3):
        return lambda row: np.broadcast_to(row.transpose(1, 2, 0), (*row.shape[1:], 3)).copy()
    return None
