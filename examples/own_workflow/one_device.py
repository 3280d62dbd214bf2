"""A rollout and a learner that do not fit on one device together: they take turns on it.

python examples/own_workflow/one_device.py [inline | local | ray] [sim:0 | 0]

`sim:0` is a simulated device, which computes on the CPU; `0` is the first CUDA device.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.plugins.workflow import Channel, Worker, Workflow, seats

GOALS, GAMES, ROUNDS, WIDTH = 8, 4096, 10, 256


def make_policy(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(GOALS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, GOALS)]
    return nn.Sequential(*layers).to(device)


class Rollout(Worker):
    """Sees a goal and names one: a reward of 1 if it is the same."""

    def __init__(self) -> None:
        self.policy = make_policy(self.device)
        self.random = torch.Generator(self.device).manual_seed(1)

    def play(self, weights: Channel, games: Channel) -> None:
        for state in weights:  # off the device while it waits
            self.policy.load_state_dict(state)
            goals = torch.randint(GOALS, (GAMES,), generator=self.random, device=self.device)
            with torch.no_grad():
                chances = self.policy(nn.functional.one_hot(goals, GOALS).float()).softmax(-1)
            named = torch.multinomial(chances, 1, generator=self.random)[:, 0]
            games.put({"goals": goals, "named": named, "rewards": (named == goals).float()})
        games.close()


class Learner(Worker):
    """Makes what was rewarded more likely (a policy gradient)."""

    def __init__(self, rate: float) -> None:
        self.policy = make_policy(self.device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), rate)

    def offload(self) -> int:
        self.optimizer.zero_grad()  # gradients are freed; weights and moments are moved
        return super().offload()

    def learn(self, weights: Channel, games: Channel) -> list[float]:
        """The mean reward of each round."""
        history = []
        for _ in range(ROUNDS):
            weights.put(self.policy.state_dict())
            game = games.get()
            history.append(float(game["rewards"].mean()))
            self._improve(game["goals"], game["named"], game["rewards"])
        weights.close()
        return history

    def _improve(self, goals: Tensor, named: Tensor, rewards: Tensor) -> None:
        chosen = self.policy(nn.functional.one_hot(goals, GOALS).float()).log_softmax(-1)
        chosen = chosen.gather(1, named[:, None])[:, 0]
        self.optimizer.zero_grad()
        (-chosen * (rewards - rewards.mean())).mean().backward()
        self.optimizer.step()


def run(launcher: Any, devices: str = "sim:0", **settings: Any) -> list[float]:
    """The mean reward of each round."""
    with Workflow(launcher, sharing="lease", **settings) as work:
        rollout = work.group("rollout", Rollout, seats(1, devices=devices))
        learner = work.group("learner", Learner, seats(1, devices=devices), rate=0.003)
        weights = work.channel("weights", capacity=1, on_device=True)
        games = work.channel("games", capacity=1, on_device=True)
        playing = rollout.play(weights, games)
        (history,) = learner.learn(weights, games).wait()
        playing.wait()
        for name, counters in work.statistics().items():
            moved, shared = counters["offloaded_bytes"] / 1e6, counters.get("parcels/device", 0)
            print(
                f"{name}: {counters['switches']:.0f} switches, {moved:.1f} MB moved, {shared:.0f} items on the device"
            )
    print(f"reward: {history[0]:.2f} at first, {history[-1]:.2f} in the end")
    return history


if __name__ == "__main__":
    run(*sys.argv[1:] or ["local"])
