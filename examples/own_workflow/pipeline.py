"""A pipeline of two stages: simulators play games with the newest weights, a learner improves these by what they bring.

python examples/own_workflow/pipeline.py [inline | local | ray]
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from polyrhythm.plugins.workflow import Channel, Worker, Workflow

ARMS, ROUNDS, PULLS = 5, 20, 8


class Simulator(Worker):
    """Pulls the arms of a bandit: arm i pays i on average."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng([seed, self.rank])

    def play(self, weights: Channel, games: Channel) -> int:
        """Play one game with each version of the weights that this rank finds; how many it played."""
        played = 0
        for _ in range(ROUNDS):
            preferences = weights.get(key=self.rank)["preferences"]
            with self.timer("pulls"):
                chances = np.exp(preferences - preferences.max())
                arms = self._random.choice(ARMS, PULLS, p=chances / chances.sum())
                rewards = arms + self._random.normal(size=PULLS)
            games.put({"arms": arms, "rewards": rewards, "chances": chances / chances.sum()}, weight=PULLS)
            played += 1
        games.close()
        return played


class Learner(Worker):
    """Raises the preferences of arms that pay more than the others (a policy gradient)."""

    def __init__(self, rate: float) -> None:
        self._rate, self._preferences = rate, np.zeros(ARMS)

    def learn(self, weights: Channel, games: Channel, simulators: int) -> list[float]:
        """The mean reward of each round."""
        history = []
        for _ in range(ROUNDS):
            for rank in range(simulators):
                weights.put({"preferences": self._preferences}, key=rank)
            batch = games.get_batch(simulators)
            history.append(float(np.mean([game["rewards"] for game in batch])))
            for game in batch:
                advantage = game["rewards"] - game["rewards"].mean()
                chosen = np.eye(ARMS)[game["arms"]] - game["chances"]
                self._preferences += self._rate * (advantage[:, None] * chosen).mean(0)
        return history


def run(launcher: Any, simulators: int = 2, **settings: Any) -> list[float]:
    """The mean reward of each round."""
    with Workflow(launcher, **settings) as work:
        simulator = work.group("simulator", Simulator, simulators, seed=0)
        learner = work.group("learner", Learner, 1, rate=0.5)
        weights = work.channel("weights", capacity=2 * simulators)
        games = work.channel("games", capacity=2 * simulators, producers=simulators)
        playing = simulator.play(weights, games)
        (history,) = learner.learn(weights, games, simulators).wait()
        print(f"games: {playing.wait()}, pulling took at most {playing.seconds('pulls', 'max'):.4f} s in a rank")
    print(f"reward: {history[0]:.2f} at first, {history[-1]:.2f} in the end")
    return history


if __name__ == "__main__":
    run(sys.argv[1] if len(sys.argv) > 1 else "local")
