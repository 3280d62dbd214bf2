"""An episode of an environment before a run, for what is only called once one has been played.

A text environment gets its expert's messages, or else its own prompt as the answer; others get random actions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyrhythm.conformance import ContractViolation
from polyrhythm.envs.base import StepResult
from polyrhythm.envs.checked_env import Arrays, CheckedEnv
from polyrhythm.envs.conformance import random_actions
from polyrhythm.errors import PolyrhythmError
from polyrhythm.specs import Trajectory, split_seed

#: Seed of the episode's ticket.
SEED = 1
#: Most steps that are played; a longer episode counts as cut.
_STEPS = 8


def play_episode(env: CheckedEnv) -> Trajectory:
    """The sample of a training episode of row 0, of its first task, with what a policy would add left at 0. Raises
    ContractViolation, with the user's line, or PolyrhythmError."""
    every = range(env.rows)
    env.reset(every, [0] * env.rows, [split_seed(env.spec, SEED + row, held_out=False) for row in every])
    rng, rows = np.random.default_rng(0), [0] if env.spec.step_rows else list(every)
    seen, chosen, results = [env.observe(every)], [], list[StepResult]()
    most = min(_STEPS, env.spec.max_steps)
    while len(results) < most and not (results and (results[-1].terminated[0] or results[-1].truncated[0])):
        actions = _message(env, rows, seen[-1]) if env.spec.action.stops else random_actions(env, len(rows), rng)
        chosen.append(actions[:1])
        results.append(env.step(rows, actions))
        seen.append(env.observe(every))
    return _sample(env, seen, np.concatenate(chosen), results)


def _message(env: CheckedEnv, rows: Sequence[int], seen: Arrays) -> NDArray[np.int64]:
    """What a model might say: [n,C,1]. The prompt as an answer, where there is no expert or it has none."""
    try:
        found = env.expert_actions(rows)
    except (ContractViolation, PolyrhythmError):
        found = None  # a run without demonstrations does not need it
    if found is not None:
        return found.astype(np.int64)
    message = np.full((len(rows), env.spec.chunk, 1), env.spec.action.stops[0], np.int64)
    for place, row in enumerate(rows):
        own = [token for token in seen["tokens"][row, : seen["length"][row]] if token not in env.spec.action.stops]
        own = own[: env.spec.chunk - 1]
        message[place, : len(own), 0] = own
    return message


def _sample(
    env: CheckedEnv, seen: Sequence[Arrays], actions: NDArray[np.generic], results: Sequence[StepResult]
) -> Trajectory:
    """actions: [T,...] of row 0."""
    steps, chunk, last = len(results), env.spec.chunk or 1, results[-1]
    actions = actions.reshape(steps, chunk, -1)
    valid = np.ones((steps, chunk), bool)
    rewards = np.zeros((steps, chunk), np.float32)
    for step, result in enumerate(results):
        if result.executed is not None:
            valid[step] = result.executed[0]
        rewards[step, int(valid[step].sum()) - 1] = result.reward[0]
    terminated = bool(last.terminated[0])
    return Trajectory(
        obs={name: np.stack([arrays[name][0] for arrays in seen]) for name in seen[0]},
        actions=actions,
        logprob=np.zeros(actions.shape, np.float32),
        value=np.zeros(steps, np.float32),
        forward_inputs={},
        rewards=rewards,
        valid=valid,
        version=np.zeros(steps, np.int64),
        terminated=terminated,
        truncated=not terminated,
        success=any(bool(result.success[0]) for result in results),
        env_steps=int(valid.sum()) if env.spec.chunk == 0 else steps,
        ticket=0,
        group=0,
        task=0,
    )
