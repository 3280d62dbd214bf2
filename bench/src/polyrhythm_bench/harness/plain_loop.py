"""A plain training loop: it steps, records and trains in one thread, without stations or messages.

Same environment, policy, learner and recorded arrays as a run's. All rows step together; a row whose episode ends is
reset at once; an update takes one rollout: whole episodes and cut ones.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from polyrhythm.pipeline.array_specs import answer_specs, shown
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.validation.check import ValidatedRun
from polyrhythm.runtime.messages import ACTIONS, FORWARD_INPUTS, LOGPROB, VALUE
from polyrhythm.specs import INSTRUCTION, PROGRESS, Trajectory
from polyrhythm.training.learner import Learner
from polyrhythm.training.steps import finish


@dataclass(frozen=True, slots=True)
class _Piece:
    """Steps first..stop-1 of a row. last: the observation after them, if the next episode's stands in its place."""

    row: int
    first: int
    stop: int
    terminated: bool
    success: bool
    last: dict[str, NDArray[np.generic]] | None


class PlainLoop:
    """Rolls out as many steps as the longest episode has, then trains on them; again and again.

    Arrays are [steps, rows, ...], as the loop fills them; there is one more observation than steps.
    training_s: seconds spent in the learner so far; mean_return: of the episodes that ended in the last rollout.
    """

    def __init__(self, checked: ValidatedRun) -> None:
        config, spec, policy = checked
        rows, steps = config.rollout.rows, spec.max_steps
        self.updates, self.training_s, self.mean_return = 0, 0.0, 0.0
        self._policy, self._env, self._steps = policy, env_settings(config).build(rows), steps
        self._learner = Learner(
            policy, config.algorithm, config.training, total_updates=config.training.versions, seed=config.seed
        )
        self._random = np.random.default_rng(config.seed)
        self._every, self._greedy = np.arange(rows), torch.zeros(rows, dtype=torch.bool)
        self._obs = {name: np.zeros((steps + 1, rows, *a.shape), a.dtype) for name, a in shown(spec).items()}
        answers = answer_specs(policy, spec)
        self._answers = {name: np.zeros((steps, rows, *a.shape), a.dtype) for name, a in answers.items()}
        self._rewards = np.zeros((steps, rows, 1), np.float32)
        self._valid = np.zeros((steps, rows, 1), bool)
        self._version = np.zeros((steps, rows), np.int64)
        self._first, self._episode_steps = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._return, self._success = np.zeros(rows), np.zeros(rows, bool)
        self._reset(self._every, 0)

    def update(self) -> None:
        """One rollout, one update."""
        pieces = self._roll_out()
        begin = time.perf_counter()
        finish(self._learner.update([self._trajectory(piece) for piece in pieces], self.updates))
        self.updates += 1
        self.training_s += time.perf_counter() - begin

    def _roll_out(self) -> list[_Piece]:
        pieces: list[_Piece] = []
        returns: list[float] = []
        keys = self._random.integers(0, 2**62, (self._steps, len(self._every)))
        self._first[:] = 0
        self._observe(0)
        for t in range(self._steps):
            self._act(t, keys[t])
            result = self._env.step(self._every, self._answers[ACTIONS][t, :, 0])
            self._rewards[t, :, 0], self._valid[t], self._version[t] = result.reward, True, self.updates
            self._episode_steps += 1
            self._return += result.reward
            self._success |= result.success
            self._observe(t + 1)
            over = result.terminated | result.truncated | (self._episode_steps >= self._steps)
            if over.any():
                ended = np.flatnonzero(over)
                returns += self._return[ended].tolist()
                pieces += [self._piece(row, t + 1, terminated=bool(result.terminated[row])) for row in ended.tolist()]
                self._reset(ended, t + 1)
        cut = np.flatnonzero(self._first < self._steps).tolist()
        self.mean_return = sum(returns) / max(1, len(returns))
        return pieces + [self._piece(row, self._steps, terminated=False) for row in cut]

    def _act(self, t: int, keys: NDArray[np.int64]) -> None:
        with torch.inference_mode():
            obs = {name: torch.from_numpy(array[t]) for name, array in self._obs.items()}
            act = self._policy.act(obs, self._greedy, torch.from_numpy(keys))
        answers = self._answers
        answers[ACTIONS][t] = act.actions.numpy()
        answers[LOGPROB][t] = act.logprob.numpy()
        answers[VALUE][t] = act.value.numpy()
        for name, tensor in act.forward_inputs.items():
            answers[FORWARD_INPUTS + name][t] = tensor.numpy()

    def _observe(self, t: int) -> None:
        self._env.observe(self._every, {name: self._obs[name][t] for name in self._env.spec.observation})
        self._obs[INSTRUCTION][t] = 0
        self._obs[PROGRESS][t] = self._episode_steps / self._steps

    def _piece(self, row: int, stop: int, *, terminated: bool) -> _Piece:
        """The row's steps since its last piece. Its next episode overwrites the place of the last observation."""
        last = {name: array[stop, row].copy() for name, array in self._obs.items()} if stop < self._steps else None
        piece = _Piece(row, int(self._first[row]), stop, terminated, bool(self._success[row]), last)
        self._first[row] = stop
        return piece

    def _reset(self, rows: NDArray[np.intp], t: int) -> None:
        self._env.reset(rows, [0] * len(rows), self._random.integers(0, 2**62, len(rows)).tolist())
        self._episode_steps[rows], self._return[rows], self._success[rows] = 0, 0.0, False
        if t < self._steps:
            self._observe(t)

    def _trajectory(self, piece: _Piece) -> Trajectory:
        row, part, answers = piece.row, slice(piece.first, piece.stop), self._answers
        obs = {name: array[piece.first : piece.stop + 1, row] for name, array in self._obs.items()}
        if piece.last is not None:
            obs = {name: np.concatenate([array[:-1], piece.last[name][None]]) for name, array in obs.items()}
        inputs = [name for name in answers if name.startswith(FORWARD_INPUTS)]
        number = self.updates * len(self._every) + row
        return Trajectory(
            obs=obs,
            actions=answers[ACTIONS][part, row],
            logprob=answers[LOGPROB][part, row],
            value=answers[VALUE][part, row],
            forward_inputs={name.removeprefix(FORWARD_INPUTS): answers[name][part, row] for name in inputs},
            rewards=self._rewards[part, row],
            valid=self._valid[part, row],
            version=self._version[part, row],
            terminated=piece.terminated,
            truncated=not piece.terminated,
            success=piece.success,
            env_steps=piece.stop - piece.first,
            ticket=number,
            group=number,
            task=0,
        )
