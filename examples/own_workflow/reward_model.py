"""A reward model beside rollout: answers are scored as they come, the longest of those that wait first.

    python examples/own_workflow/reward_model.py [inline | local | ray]

Two ranks of rollout write answers of very different lengths, two of the reward model score them; the channel between
them gives both about as many words to read. The driver compares the answers to a prompt as soon as it has all scores.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from polyrhythm.plugins.workflow import Channel, Entry, Worker, Workflow

PROMPTS, ANSWERS, WORDS = 6, 4, 16


class Rollout(Worker):
    """Writes answers: random words, more or less of them."""

    def generate(self, prompts: Channel, answers: Channel) -> int:
        """Answer prompts until there are no more; how many words were written."""
        written = 0
        for prompt in prompts:
            generator = torch.Generator().manual_seed(prompt)
            for number in range(ANSWERS):
                length = int(torch.randint(1, 64, (), generator=generator))
                tokens = torch.randint(0, WORDS, (length,), generator=generator)
                answers.put({"prompt": prompt, "number": number, "tokens": tokens}, weight=length)
                written += length
        answers.close()
        return written


class RewardModel(Worker):
    """Scores answers by a small network; all ranks have the weights of rank 0."""

    def load(self) -> float:
        """Share rank 0's weights; their sum, which is the same everywhere."""
        own = torch.nn.Embedding(WORDS, 1)
        torch.nn.init.normal_(own.weight, generator=torch.Generator().manual_seed(self.rank))
        shared = self.broadcast(own.state_dict()["weight"] if self.rank == 0 else None)
        self._scores = torch.nn.Embedding.from_pretrained(shared)
        return float(shared.sum())

    @torch.no_grad()
    def score(self, answers: Channel, scores: Channel) -> int:
        """Score answers until there are no more; how many words were read."""
        read = 0
        for answer in answers:
            with self.timer("forward"):
                score = self._scores(answer["tokens"]).mean()
            scores.put((answer["prompt"], answer["number"], float(score)), key=answer["prompt"])
            read += len(answer["tokens"])
        scores.close()
        return read


def longest_first(entry: Entry) -> float:
    return -entry.weight


def run(launcher: Any, **settings: Any) -> dict[int, list[float]]:
    """The advantage of each answer within its group, by prompt."""
    with Workflow(launcher, **settings) as work:
        rollout, reward = work.group("rollout", Rollout, 2), work.group("reward", RewardModel, 2)
        prompts = work.channel("prompts", PROMPTS)
        answers = work.channel("answers", 8, order=longest_first, producers=rollout.size)
        scores = work.channel("scores", PROMPTS * ANSWERS, producers=reward.size)
        assert len(set(reward.load().wait())) == 1, "all ranks have the same weights"
        writing, reading = rollout.generate(prompts, answers), reward.score(answers, scores)
        for prompt in range(PROMPTS):
            prompts.put(prompt)
        prompts.close()
        advantages = {}
        for prompt in range(PROMPTS):  # a group is compared as soon as it is whole
            found = sorted(scores.get_batch(ANSWERS, key=prompt))
            values = np.array([score for _, _, score in found])
            advantages[prompt] = ((values - values.mean()) / (values.std() + 1e-6)).tolist()
        print(f"words written: {writing.wait()}, read: {reading.wait()}")
    return advantages


if __name__ == "__main__":
    print({prompt: np.round(own, 2).tolist() for prompt, own in run(sys.argv[1] if sys.argv[1:] else "local").items()})
