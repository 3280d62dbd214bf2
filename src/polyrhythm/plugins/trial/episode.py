"""Plays an episode of a text environment before a run, for checks of code that is called only after one.

Other environments are not stepped, since random actions may break what they move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyrhythm.conformance import ContractViolation
from polyrhythm.envs.base import StepResult
from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.trial.checked_env import Arrays, CheckedEnv
from polyrhythm.plugins.trial.env_contract import trial_seed
from polyrhythm.specs import EnvSpec, Trajectory

#: Seed of the episode.
SEED = trial_seed(1)
#: Maximum number of expert messages; a longer episode is cut.
_MESSAGES = 8
#: Maximum tokens of a message without an expert: short, so that it overflows no context.
_WORDS = 4


class TrialEpisode(NamedTuple):
    """The sample, and a description of it."""

    sample: Trajectory
    said: str


def is_text(spec: EnvSpec) -> bool:
    """Whether actions are messages that answer a prompt of tokens."""
    return bool(spec.action.stops) and {"tokens", "length"} <= spec.observation.keys()


def play_episode(env: CheckedEnv, *, expert: bool) -> TrialEpisode:
    """Play a training episode of row 0 and the first task; the fields that a policy would add are 0.

    expert: use the expert's messages, if there is one; otherwise a single message of a few words of the prompt.
    ContractViolation, with the user's source line, or PolyrhythmError: the environment fails.
    """
    every = range(env.rows)
    env.reset(every, [0] * env.rows, [trial_seed(1 + row) for row in every])
    rows = [0] if env.spec.step_rows else list(every)
    seen, chosen, results, over = [env.observe(every)], [], list[StepResult](), False
    for _ in range(min(_MESSAGES, env.spec.max_steps)):
        found = _expert_messages(env, rows) if expert else None
        actions = _words_of_prompts(env, rows, seen[-1]) if found is None else found
        chosen.append(actions[:1])
        results.append(env.step(rows, actions))
        seen.append(env.observe(every))
        over = bool(results[-1].terminated[0] or results[-1].truncated[0])
        if over or found is None:
            break
    count, by = len(results), "the prompt's own words" if found is None else "the expert"
    said = f"an episode of {count} message{'s' * (count > 1)}, answered by {by}{'' if over else ', cut there'}"
    return TrialEpisode(_sample(env, seen, np.concatenate(chosen), results), said)


def _expert_messages(env: CheckedEnv, rows: Sequence[int]) -> NDArray[np.int64] | None:
    """[n,C,1]; None if there is no expert, or it raises, which the recording of demonstrations reports."""
    try:
        found = env.expert_actions(rows)
    except (ContractViolation, PolyrhythmError):
        return None
    return None if found is None else found.astype(np.int64)


def _words_of_prompts(env: CheckedEnv, rows: Sequence[int], seen: Arrays) -> NDArray[np.int64]:
    """The first tokens of each prompt as its answer: [n,C,1]."""
    stops = env.spec.action.stops
    message = np.full((len(rows), env.spec.chunk, 1), stops[0], np.int64)
    for place, row in enumerate(rows):
        own = [token for token in seen["tokens"][row, : seen["length"][row]] if token not in stops]
        own = own[: min(_WORDS, env.spec.chunk - 1)]
        message[place, : len(own), 0] = own
    return message


def _sample(
    env: CheckedEnv, seen: Sequence[Arrays], actions: NDArray[np.generic], results: Sequence[StepResult]
) -> Trajectory:
    steps, last = len(results), results[-1]
    valid = np.ones((steps, env.spec.chunk), bool)
    rewards = np.zeros((steps, env.spec.chunk), np.float32)
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
        success=any(result.success[0] > 0 for result in results),
        env_steps=steps,
        ticket=0,
        group=0,
        task=0,
    )
