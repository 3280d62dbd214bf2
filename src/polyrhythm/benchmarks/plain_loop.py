"""What one would write by hand: one loop that steps, records and trains, with no stations and no messages.

Same environment, policy, learner and arrays as a run's, every row in every step, one update after another.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray

from polyrhythm.pipeline.build import answer_specs, env_settings, shown
from polyrhythm.pipeline.check import Checked
from polyrhythm.runtime.messages import ACTIONS, FORWARD_INPUTS, LOGPROB, VALUE
from polyrhythm.specs import INSTRUCTION, PROGRESS, Trajectory
from polyrhythm.training.learner import Learner
from polyrhythm.training.steps import finish


class PlainLoop:
    """Rolls out one whole episode in each row, then trains on them; again and again.

    Arrays are [steps, rows, ...] as the loop fills them; there is one more observation than steps.
    training_s: seconds spent in the learner so far.
    """

    def __init__(self, checked: Checked) -> None:
        config, spec, policy = checked
        rows, steps = config.rollout.rows, spec.max_steps
        self.policy, self.updates, self.training_s = policy, 0, 0.0
        self._env = env_settings(config).build(rows)
        self._learner = Learner(
            policy, config.algorithm, config.training, total_updates=config.training.versions, seed=config.seed
        )
        self._noise = np.random.default_rng(config.seed)
        self._every, self._tasks = np.arange(rows), [0] * rows
        self._obs = {name: np.zeros((steps + 1, rows, *a.shape), a.dtype) for name, a in shown(spec).items()}
        self._answers = {
            name: np.zeros((steps, rows, *a.shape), a.dtype) for name, a in answer_specs(policy, spec).items()
        }
        self._rewards = np.zeros((steps, rows, 1), np.float32)
        self._valid = np.zeros((steps, rows, 1), bool)
        self._version = np.zeros((steps, rows), np.int64)

    def update(self) -> None:
        """One rollout of all rows, one update."""
        success = self._roll_out()
        begin = time.perf_counter()
        finish(self._learner.update([self._trajectory(row, success) for row in self._every.tolist()], self.updates))
        self.updates += 1
        self.training_s += time.perf_counter() - begin

    def _roll_out(self) -> NDArray[np.bool_]:
        env, every, rows, steps = self._env, self._every, len(self._every), len(self._rewards)
        env.reset(every, self._tasks, self._noise.integers(0, 2**62, rows).tolist())
        keys = self._noise.integers(0, 2**62, (steps, rows))
        greedy, success = torch.zeros(rows, dtype=torch.bool), np.zeros(rows, bool)
        for t in range(steps):
            self._observe(t)
            with torch.inference_mode():
                obs = {name: torch.from_numpy(array[t]) for name, array in self._obs.items()}
                act = self.policy.act(obs, greedy, torch.from_numpy(keys[t]))
            self._answers[ACTIONS][t] = act.actions.numpy()
            self._answers[LOGPROB][t] = act.logprob.numpy()
            self._answers[VALUE][t] = act.value.numpy()
            for name, tensor in act.forward_inputs.items():
                self._answers[FORWARD_INPUTS + name][t] = tensor.numpy()
            self._version[t] = self.updates
            result = env.step(every, self._answers[ACTIONS][t, :, 0])
            self._rewards[t, :, 0], self._valid[t] = result.reward, True
            success |= result.success
            assert not (result.terminated | result.truncated).any(), "episodes last as long as the rollout"
        self._observe(steps)
        return success

    def _observe(self, t: int) -> None:
        names = self._env.spec.observation
        self._env.observe(self._every, {name: self._obs[name][t] for name in names})
        self._obs[INSTRUCTION][t] = 0
        self._obs[PROGRESS][t] = t / len(self._rewards)

    def _trajectory(self, row: int, success: NDArray[np.bool_]) -> Trajectory:
        answers = self._answers
        inputs = [name for name in answers if name.startswith(FORWARD_INPUTS)]
        return Trajectory(
            obs={name: array[:, row] for name, array in self._obs.items()},
            actions=answers[ACTIONS][:, row],
            logprob=answers[LOGPROB][:, row],
            value=answers[VALUE][:, row],
            forward_inputs={name.removeprefix(FORWARD_INPUTS): answers[name][:, row] for name in inputs},
            rewards=self._rewards[:, row],
            valid=self._valid[:, row],
            version=self._version[:, row],
            terminated=False,
            truncated=True,
            success=bool(success[row]),
            env_steps=len(self._rewards),
            ticket=self.updates * len(self._every) + row,
            group=self.updates * len(self._every) + row,
            task=0,
        )
