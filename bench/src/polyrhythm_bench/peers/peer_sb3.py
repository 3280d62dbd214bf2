"""Runs a turn of Stable-Baselines3: PPO over SubprocVecEnv (sleeping), or an in-process vector environment (zero cost).

The policy sleeps for acting (`forward`) and for training (`evaluate_actions`, called once per optimizer step). Worker
processes start by a fork server, the peer's default, or by fork, which it advises against but which shares memory pages
and so needs the least memory.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from polyrhythm_bench.peers.turn import Meter, Work, main
from polyrhythm_bench.peers.workload import (
    CLIP,
    GAMMA,
    HIDDEN,
    LAMBDA,
    LEARNING_RATE,
    Drift,
    Sleeping,
    ZeroCost,
    gymnasium_sleeping,
)


class SleepingPolicy(ActorCriticPolicy):
    """A policy that sleeps in each acting pass and in each evaluation for the loss."""

    work: Sleeping

    def forward(self, obs: torch.Tensor, deterministic: bool = False) -> Any:
        time.sleep(self.work.acting_s(len(obs)))
        return super().forward(obs, deterministic)

    def evaluate_actions(self, obs: torch.Tensor, actions: torch.Tensor) -> Any:
        time.sleep(self.work.train_s * len(obs) / self.work.transitions)
        return super().evaluate_actions(obs, actions)


class DriftVecEnv(VecEnv):
    """`Drift` as an in-process vector environment; rows whose episode ended are reset at once."""

    def __init__(self, work: ZeroCost) -> None:
        observation = Box(-np.inf, np.inf, (work.observation_dim,), np.float32)
        super().__init__(work.rows, observation, Box(-1.0, 1.0, (work.action_dim,), np.float32))
        self._drift = Drift(work)
        self._none: list[dict[str, Any]] = [{} for _ in range(work.rows)]

    def reset(self) -> Any:
        return self._drift.reset()

    def step_async(self, actions: Any) -> None:
        self._actions = actions

    def step_wait(self) -> Any:
        state, reward, over = self._drift.step(self._actions)
        if not over:
            return state, reward, np.zeros(self.num_envs, bool), self._none
        infos = [{"terminal_observation": last, "TimeLimit.truncated": True} for last in state]
        return self._drift.reset(), reward, np.ones(self.num_envs, bool), infos

    def close(self) -> None:
        """Do nothing: there is nothing to free."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:  # noqa: ARG002
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:  # noqa: ARG002
        return [False] * self.num_envs


class Sb3Count(BaseCallback):
    """A callback that counts an update at each rollout's start, except the first."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter, self._first = meter, True

    def _on_rollout_start(self) -> None:
        if not self._first:
            self._meter.updated()
        self._first = False

    def _on_step(self) -> bool:
        return not self._meter.over


def run(work: Work, meter: Meter, choice: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    common: dict[str, Any] = {
        "learning_rate": LEARNING_RATE,
        "gamma": GAMMA,
        "gae_lambda": LAMBDA,
        "clip_range": CLIP,
        "n_steps": work.episode_steps,
        "device": "cpu",
    }
    network: dict[str, Any] = {"net_arch": {"pi": list(HIDDEN), "vf": list(HIDDEN)}}
    if isinstance(work, Sleeping):
        start = choice.get("start_method", "forkserver")
        SleepingPolicy.work = work
        makers = [lambda seed=seed: gymnasium_sleeping(work, seed) for seed in range(work.envs)]
        env: VecEnv = SubprocVecEnv(makers, start_method=start)
        own = {"batch_size": work.transitions, "n_epochs": 1}
        ppo = PPO(SleepingPolicy, env, **common, **own, policy_kwargs=network)
        kind = {"vec_env": "SubprocVecEnv", "start_method": start}
    else:
        env = DriftVecEnv(work)
        own = {"batch_size": work.minibatch, "n_epochs": work.epochs}
        ppo = PPO("MlpPolicy", env, **common, **own, policy_kwargs=network)
        kind = {"vec_env": "in the process"}
    try:
        ppo.learn((meter.total + 1) * work.transitions, callback=Sb3Count(meter))
    finally:
        env.close()
    return {**kind, **own}


if __name__ == "__main__":
    main(run, ("stable-baselines3", "torch", "gymnasium", "numpy"))
