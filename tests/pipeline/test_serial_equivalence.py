"""Guarantee 5: lock-step with α = 0 is a plain serial loop, bit for bit; other batching gives it to tolerance."""

from __future__ import annotations

from collections import deque

import gymnasium
import numpy as np
import pytest
import torch
from tests.built import built
from tests.pipeline.runs import ROWS, config

from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.scheduler.records import StartRows, StartUpdate
from polyrhythm.scheduler.samples.admission import mix as flow_mix
from polyrhythm.specs import INSTRUCTION, PROGRESS, Trajectory
from polyrhythm.specs.hashing import library_seed, mix, split_seed
from polyrhythm.training.learner import Learner
from polyrhythm.training.steps import finish


class Episode:
    """One row of the plain loop: a ticket's environment and what happened in it."""

    def __init__(self, env, seed, number, max_steps):
        self.env, self.number, self.max_steps = env, number, max_steps
        self.noise = flow_mix(seed, 2, number)
        observation, _ = env.reset(seed=library_seed(split_seed(flow_mix(seed, 1, number), held_out=False)))
        self.obs = [observation.astype(np.float32)]
        self.acted = []
        self.rewards = []
        self.terminated = self.over = False

    def step(self, row_of_act):
        self.acted.append(row_of_act)
        observation, reward, self.terminated, _, _ = self.env.step(int(row_of_act["actions"][0, 0]))
        self.obs.append(observation.astype(np.float32))
        self.rewards.append(reward)
        self.over = self.terminated or len(self.rewards) == self.max_steps

    def trajectory(self, version):
        steps = len(self.rewards)
        column = {name: np.stack([acted[name] for acted in self.acted]) for name in self.acted[0]}
        return Trajectory(
            obs={
                "state": np.stack(self.obs),
                INSTRUCTION: np.zeros(steps + 1, np.int64),
                PROGRESS: (np.arange(steps + 1) / self.max_steps).astype(np.float32),
            },
            actions=column["actions"],
            logprob=column["logprob"],
            value=column["value"],
            forward_inputs={"tokens": column["tokens"]},
            rewards=np.array(self.rewards, np.float32)[:, None],
            valid=np.ones((steps, 1), bool),
            version=np.full(steps, version),
            terminated=self.terminated,
            truncated=not self.terminated,
            success=False,
            env_steps=steps,
            ticket=self.number,
            group=self.number,
            task=0,
        )


def act(policy, episodes):
    """One forward over the active rows, in row order."""
    obs = {"state": torch.from_numpy(np.stack([episode.obs[-1] for episode in episodes]))}
    keys = torch.tensor([mix(episode.noise, len(episode.rewards)) for episode in episodes])
    answer = policy.act(obs, torch.zeros(len(episodes), dtype=torch.bool), keys)
    arrays = {
        "actions": answer.actions.numpy(),
        "logprob": answer.logprob.numpy(),
        "value": answer.value.numpy(),
        "tokens": answer.forward_inputs["tokens"].numpy(),
    }
    return [{name: array[i].copy() for name, array in arrays.items()} for i in range(len(episodes))]


def plain_loop(settings):
    """The whole run without stations, conductor or threads: collect a batch, train on it, again."""
    envs = [gymnasium.make("CartPole-v1", max_episode_steps=-1).unwrapped for _ in range(ROWS)]
    max_steps = settings.env.max_steps
    spec = settings.env.spec()
    policy = settings.policy.build(spec, seed=settings.seed, device="cpu", role="train")
    versions = settings.training.versions
    learner = Learner(policy, settings.algorithm, settings.training, total_updates=versions, seed=settings.seed)
    next_ticket = 0
    for version in range(versions):
        running, finished = {}, []
        free = deque(range(ROWS))
        target = (version + 1) * settings.training.batch_size
        while len(finished) < settings.training.batch_size:
            while free and next_ticket < target:
                row = free.popleft()
                running[row] = Episode(envs[row], settings.seed, next_ticket, max_steps)
                next_ticket += 1
            rows = sorted(running)
            for row, acted in zip(rows, act(policy, [running[row] for row in rows]), strict=True):
                running[row].step(acted)
            for row in rows:
                if running[row].over:
                    finished.append(running.pop(row).trajectory(version))
                    free.append(row)
        finish(learner.update(sorted(finished, key=lambda sample: sample.ticket), version))
    return policy


def one_and_the_rest(env_batch, generators):
    """The first row to the last generator, the others to any."""
    return [(1, generators[-1]), (env_batch.rows - 1, "any")]


def live(settings):
    pipeline = build_pipeline(RunContext(settings), record=True)
    pipeline.loop.train_until(settings.training.versions)
    assert pipeline.launcher.payloads.in_flight.finished() == ()
    assert not pipeline.loop.conductor.ledger.imbalance
    pipeline.close()
    return pipeline


def tickets(pipeline):
    """What was granted: number → (seed, noise, version); and what was lent, update by update."""
    commands = [command for decision in pipeline.loop.trace for command in decision.commands]
    granted = {
        grant.ticket.number: (grant.ticket.seed, grant.ticket.noise, grant.ticket.version)
        for command in commands
        if isinstance(command, StartRows)
        for grant in command.grants
    }
    return granted, [(c.update, c.version, c.tickets) for c in commands if isinstance(c, StartUpdate)]


@pytest.fixture(scope="module")
def lockstep():
    return live(config())


def test_lockstep_with_normalised_observations_and_rewards_is_too():
    settings = config(policy={"normalize_observations": True}, algorithm={"normalize_rewards": True})
    wanted, found = plain_loop(settings).state_dict(), live(settings).weights.read()[1]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert wanted["flat.normalizer.count"] > 30, "chunk steps of 30 samples"


def test_lockstep_is_the_plain_loop_bit_for_bit(lockstep):
    wanted = plain_loop(config()).state_dict()
    version, found = lockstep.weights.read()
    assert version == 3
    start = built(config().policy, config().env.spec(), 3).state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert any(not torch.equal(start[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"sharding": "even:3"}, "batching": {"type": "dynamic", "max_rows": 4, "max_wait_ms": 0}},
        {"rollout": {"simulators": 2, "rows": 3, "generators": 2}, "batching": {"type": "dynamic", "max_wait_ms": 1}},
        {"rollout": {"env_batches": 2, "rows": 3, "generators": 2}},
        {"rollout": {"sharding": [1, 5], "join": "all"}, "batching": {"type": "dynamic", "max_wait_ms": 0}},
        {
            "rollout": {"simulators": 2, "rows": 3, "generators": 2, "sharding": f"{__name__}:one_and_the_rest"},
            "batching": {"type": "auto"},
        },
        {
            "rollout": {"rows": 3, "env_batches": 2, "sharding": "even:3", "generators": 2, "routing": "affinity"},
            "batching": {"type": "dynamic", "max_wait_ms": 0},
        },
        {
            "rollout": {"sharding": "even:2", "buckets": "powers", "routing": "round_robin"},
            "batching": {"type": "auto"},
        },
    ],
    ids=[
        *("three-slots", "two-simulators-two-generators", "two-env-batches-lockstep", "joined", "own-function-auto"),
        *("affinity", "padded-auto"),
    ],
)
def test_batching_sharding_and_routing_do_not_change_the_run(lockstep, changes):
    other = live(config(**changes))
    assert tickets(other) == tickets(lockstep)
    found, wanted = other.weights.read()[1], lockstep.weights.read()[1]
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-3)


def test_every_sample_is_lent_once_in_the_order_of_its_ticket(lockstep):
    _, lent = tickets(lockstep)
    assert [update for update, _, _ in lent] == [0, 1, 2]
    assert [number for _, _, numbers in lent for number in numbers] == list(range(30))
