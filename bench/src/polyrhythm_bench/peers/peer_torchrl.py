"""Runs a turn of TorchRL: an asynchronous collector with a policy server (sleeping), or a collector of one batched
environment (zero cost), with the PPO loss.

Environments are native to TorchRL, which spares them the wrappers. The server's copy of the policy sleeps when it acts;
the learner's sleeps in the training loop, once per update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import nn
from torchrl.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.modules.inference_server import InferenceServerConfig
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from polyrhythm_bench.peers.turn import Meter, Work, main
from polyrhythm_bench.peers.workload import (
    CLIP,
    GAMMA,
    HIDDEN,
    LAMBDA,
    LEARNING_RATE,
    Drift,
    Sleeping,
    SleepingEpisodes,
    ZeroCost,
)


class WorkEnv(EnvBase):
    """Base of both environments, with their specs."""

    def __init__(self, work: Work, batch: tuple[int, ...]) -> None:
        super().__init__(batch_size=torch.Size(batch))
        observation = Unbounded((*batch, work.observation_dim))
        self.observation_spec = Composite(observation=observation, shape=batch)
        self.action_spec = Bounded(-1.0, 1.0, (*batch, work.action_dim))
        self.reward_spec = Unbounded((*batch, 1))
        self._no = torch.zeros((*batch, 1), dtype=torch.bool)
        self._yes = torch.ones((*batch, 1), dtype=torch.bool)

    def _observed(self, observation: Any, **more: Any) -> TensorDictBase:
        return TensorDict({"observation": torch.from_numpy(observation), **more}, self.batch_size)

    def _ended(self, over: bool) -> dict[str, torch.Tensor]:
        ended = self._yes if over else self._no
        return {"done": ended.clone(), "truncated": ended.clone(), "terminated": self._no.clone()}

    def _set_seed(self, seed: int | None) -> None:
        """Do nothing: the constructor sets the seed."""


class SleepingEnv(WorkEnv):
    """One sleeping environment."""

    def __init__(self, work: Sleeping, seed: int) -> None:
        super().__init__(work, ())
        self._episodes, self._reward = SleepingEpisodes(work, seed), torch.ones(1)

    def _reset(self, _: TensorDictBase | None = None, **__: Any) -> TensorDictBase:
        return self._observed(self._episodes.reset())

    def _step(self, _: TensorDictBase) -> TensorDictBase:
        observation, over = self._episodes.step()
        return self._observed(observation, reward=self._reward.clone(), **self._ended(over))


class TorchRlDriftEnv(WorkEnv):
    """The rows of `Drift` as a batch."""

    def __init__(self, work: ZeroCost) -> None:
        super().__init__(work, (work.rows,))
        self._drift = Drift(work)

    def _reset(self, _: TensorDictBase | None = None, **__: Any) -> TensorDictBase:
        return self._observed(self._drift.reset())

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        state, reward, over = self._drift.step(tensordict["action"].numpy())
        return self._observed(state, reward=torch.from_numpy(reward)[:, None], **self._ended(over))


class TorchRlMlp(nn.Module):
    """An MLP with tanh. sleep: if given, called with the number of rows before each pass."""

    def __init__(self, inputs: int, outputs: int, sleep: Callable[[int], None] | None = None) -> None:
        sizes = (inputs, *HIDDEN)
        layers = [(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)]
        super().__init__()
        self._network = nn.Sequential(*[module for pair in layers for module in pair], nn.Linear(sizes[-1], outputs))
        self._sleep = sleep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._sleep is not None:
            self._sleep(x.shape[:-1].numel())
        outputs: torch.Tensor = self._network(x)
        return outputs


def make_actor(work: Work, *, sleeps: bool = False) -> ProbabilisticActor:
    """The policy: a diagonal normal with a state-independent std."""
    sleep = partial(_sleep_for, work) if sleeps and isinstance(work, Sleeping) else None
    mean = TorchRlMlp(work.observation_dim, work.action_dim, sleep)
    network = nn.Sequential(mean, AddStateIndependentNormalScale(work.action_dim))
    return ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )


def _sleep_for(work: Sleeping, rows: int) -> None:
    time.sleep(work.acting_s(rows))


class TorchRlLearner:
    """A learner with TorchRL's PPO: advantages, then epochs of minibatches."""

    def __init__(self, work: Work) -> None:
        self.actor = make_actor(work)
        critic = ValueOperator(TorchRlMlp(work.observation_dim, 1), in_keys=["observation"])
        self._loss = ClipPPOLoss(self.actor, critic, clip_epsilon=CLIP, entropy_bonus=False, critic_coeff=0.5)
        self._advantage = GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=critic, average_gae=True)
        self._optimizer = torch.optim.AdamW(self._loss.parameters(), lr=LEARNING_RATE, fused=True)
        self._work = work

    def update(self, batch: TensorDictBase) -> None:
        """batch: [trajectories, time]."""
        work = self._work
        if isinstance(work, Sleeping):
            time.sleep(work.train_s)
        epochs, size = (1, work.transitions) if isinstance(work, Sleeping) else (work.epochs, work.minibatch)
        with torch.no_grad():
            self._advantage(batch)
        flat = batch.reshape(-1)
        for _ in range(epochs):
            order = torch.randperm(len(flat))
            for first in range(0, len(flat), size):
                self._step(flat[order[first : first + size]] if size < len(flat) else flat)

    def _step(self, part: TensorDictBase) -> None:
        losses = self._loss(part)
        loss = losses["loss_objective"] + losses["loss_critic"]
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._loss.parameters(), 1.0)
        self._optimizer.step()


def run(work: Work, meter: Meter, choice: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    learner = TorchRlLearner(work)
    collector, batches, settings = (
        _sleeping(work, choice) if isinstance(work, Sleeping) else _zero_cost(work, learner, choice)
    )
    weights, lags = TensorDict.from_module(learner.actor), []
    try:
        collector.update_policy_weights_(weights)
        for number, batch in enumerate(batches):
            learner.update(batch)
            if "policy_version" in batch.keys():  # noqa: SIM118 (no mapping)
                lags.append(number + 1 - int(batch["policy_version"].min()))  # the first push is version 1
            collector.update_policy_weights_(weights)
            meter.updated()
            if meter.over:
                break
    finally:
        collector.shutdown()
    return {**settings, "lag_max": max(lags)} if lags else settings


Batches = Iterator[TensorDictBase]


def _sleeping(work: Sleeping, choice: dict[str, Any]) -> tuple[Any, Batches, dict[str, Any]]:
    """Run the sleeping workload. choice: env_backend (multiprocessing, threading), transport (auto: a server process;
    driver: a server thread); min_batch_size and timeout of the server."""
    server = {"max_batch_size": work.envs, "min_batch_size": 1, "timeout": 0.001}
    server |= {key: choice[key] for key in server if key in choice}
    own = {"env_backend": "multiprocessing", "transport": "auto"}
    own |= {key: choice[key] for key in own if key in choice}
    chunked = own["transport"] == "auto" and own["env_backend"] == "multiprocessing"
    more = {"transition_chunk_size": work.episode_steps} if chunked else {"yield_completed_trajectories": True}
    collector = AsyncBatchedCollector(
        [partial(SleepingEnv, work, seed) for seed in range(work.envs)],
        policy_factory=partial(make_actor, work, sleeps=True),
        frames_per_batch=work.transitions,
        server_config=InferenceServerConfig(**server),
        **own,
        **more,
    )
    if chunked:
        batches: Batches = (batch.reshape(work.envs, work.episode_steps) for batch in collector)
    else:
        batches = _gathered(iter(collector), work.envs)
    return collector, batches, {"collector": "AsyncBatchedCollector", **own, **more, **server}


def _gathered(trajectories: Batches, count: int) -> Batches:
    """Batches of `count` whole trajectories."""
    while True:
        yield torch.stack([next(trajectories).to_tensordict() for _ in range(count)])


def _zero_cost(work: ZeroCost, learner: TorchRlLearner, choice: dict[str, Any]) -> tuple[Any, Batches, dict[str, Any]]:
    """Run the zero-cost workload. choice: workers, 0 for a collector in this process."""
    workers = choice.get("workers", 1)
    common = {"frames_per_batch": work.transitions, "total_frames": -1, "auto_register_policy_transforms": False}
    make = partial(TorchRlDriftEnv, work)
    if workers:
        collector: Any = MultiAsyncCollector([make] * workers, make_actor(work), **common)
    else:
        collector = Collector(make(), learner.actor, **common)
    return collector, iter(collector), {"collector": type(collector).__name__, "workers": workers}


if __name__ == "__main__":
    main(run, ("torchrl", "tensordict", "torch", "numpy"))
