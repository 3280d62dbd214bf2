"""Runs a turn of Sample Factory: asynchronous PPO (APPO).

Sleeping: the policy worker's forward sleeps, and the learner's with gradients. A rollout worker steps its environments
one after the other, so the number of workers is a setting. Zero cost: batched sampling, in which a
worker steps all rows in one call.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import asdict, replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.utils.context import global_model_factory
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.model.actor_critic import ActorCriticSeparateWeights
from sample_factory.train import make_runner

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


class SleepingActorCritic(ActorCriticSeparateWeights):
    """A network whose acting pass sleeps by its rows, and whose training pass (with gradients) as long as training."""

    def __init__(self, obs_space: Any, action_space: Any, cfg: Any) -> None:
        super().__init__(global_model_factory(), obs_space, action_space, cfg)
        self._work = Sleeping(**cfg.work)

    def forward(self, normalized_obs_dict: Any, rnn_states: torch.Tensor, values_only: bool = False) -> Any:
        if not values_only:
            time.sleep(self._work.acting_s(len(rnn_states)))
        return super().forward(normalized_obs_dict, rnn_states, values_only)

    def forward_head(self, normalized_obs_dict: Any) -> Any:
        if torch.is_grad_enabled() and self.training:
            time.sleep(self._work.train_s)
        return super().forward_head(normalized_obs_dict)


class SampleFactoryDriftEnv(gymnasium.Env):
    """`Drift` as an environment of many agents, in tensors, as batched sampling needs it."""

    def __init__(self, work: ZeroCost) -> None:
        self.num_agents, self.is_multiagent = work.rows, True
        self.observation_space = Dict(obs=Box(-np.inf, np.inf, (work.observation_dim,), np.float32))
        self.action_space = Box(-1.0, 1.0, (work.action_dim,), np.float32)
        self._drift = Drift(work)
        self._no = torch.zeros(work.rows, dtype=torch.bool)
        self._yes = torch.ones(work.rows, dtype=torch.bool)

    def reset(self, **_: Any) -> Any:
        return {"obs": torch.from_numpy(self._drift.reset())}, {}

    def step(self, actions: torch.Tensor) -> Any:
        state, reward, over = self._drift.step(np.asarray(actions))
        state = self._drift.reset() if over else state
        return {"obs": torch.from_numpy(state)}, torch.from_numpy(reward), self._no, self._yes if over else self._no, {}

    def render(self) -> None:
        """Do nothing: there is no picture."""


def make_sleeping(_name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:  # noqa: ARG001
    return gymnasium_sleeping(Sleeping(**cfg.work), env_config.env_id if env_config else 0)


def make_drift(_name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:  # noqa: ARG001
    work = ZeroCost(**cfg.work)
    return SampleFactoryDriftEnv(replace(work, rows=work.rows // (cfg.num_workers * cfg.num_envs_per_worker)))


def make_actor_critic(cfg: Any, obs_space: Any, action_space: Any) -> SleepingActorCritic:
    return SleepingActorCritic(obs_space, action_space, cfg)


class SampleFactoryCount(AlgoObserver):
    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:  # noqa: ARG002
        if not self._meter.over:
            self._meter.updated()


def run(work: Work, meter: Meter, choice: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    if isinstance(work, Sleeping):
        register_env("sleeping", make_sleeping)
        global_model_factory().register_actor_critic_factory(make_actor_critic)
        own: dict[str, Any] = {
            "env": "sleeping",
            "num_workers": work.envs,
            "num_envs_per_worker": 1,
            "worker_num_splits": 1,
            "batch_size": work.transitions,
            "num_batches_per_epoch": 1,
            "num_epochs": 1,
        }
    else:
        register_env("drift", make_drift)
        own = {
            "env": "drift",
            "batched_sampling": True,
            "num_workers": 1,
            "num_envs_per_worker": 1,
            "worker_num_splits": 1,
            "batch_size": work.minibatch,
            "num_batches_per_epoch": work.transitions // work.minibatch,
            "num_epochs": work.epochs,
        }
    ends = {"train_for_env_steps": meter.total * work.transitions - 1}
    own |= {"rollout": work.episode_steps, "num_batches_to_accumulate": 2, "async_rl": True, **choice}
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        _, runner = make_runner(_config(work, {**own, **ends}, folder))
        lags: list[float] = []
        runner.register_observer(SampleFactoryCount(meter))
        runner.policy_msg_handlers["train"].append(lambda _, msg, __: lags.append(msg["train"]["version_diff_max"]))
        runner.init()
        runner.run()
    with contextlib.suppress(ValueError):
        own["lag_max"] = max(lags)
    return own


def _config(work: Work, own: dict[str, Any], folder: str) -> Any:
    common = {
        "algo": "APPO",
        "experiment": "peer",
        "train_dir": folder,
        "device": "cpu",
        "restart_behavior": "overwrite",
        "gamma": GAMMA,
        "gae_lambda": LAMBDA,
        "ppo_clip_ratio": CLIP,
        "learning_rate": LEARNING_RATE,
        "use_rnn": False,
        "actor_critic_share_weights": False,
        "adaptive_stddev": False,
        "nonlinearity": "tanh",
        "reward_scale": 0.02,
        "normalize_input": False,
        "normalize_returns": False,
        "save_every_sec": 100_000,
        "stats_avg": 10,
        "with_wandb": False,
        "decorrelate_envs_on_one_worker": False,
        "decorrelate_experience_max_seconds": 0,
    }
    words = ["--encoder_mlp_layers", *map(str, HIDDEN)]
    words += [f"--{key}={value}" for key, value in {**common, **own}.items()]
    parser, _ = parse_sf_args(words)
    cfg = parse_full_cfg(parser, words)
    cfg.work = asdict(work)
    return cfg


if __name__ == "__main__":
    main(run, ("sample-factory", "torch", "gymnasium", "numpy"))
