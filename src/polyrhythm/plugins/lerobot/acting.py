"""A policy as a demonstrator: it acts in whole chunks, of which each frame executes one action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyrhythm.pipeline.warm_start.episodes import DemoEpisode
from polyrhythm.policies.base import Policy
from polyrhythm.runtime.memory.tensors import as_array, as_tensors
from polyrhythm.specs.hashing import mix, mix_array

#: Hash domain of a demonstrator's own noise, within its episode's seed.
_NOISE = 2


class PolicyActor:
    """Acts in the episodes under way; a new chunk is asked for where the last one is used up. greedy: without noise."""

    def __init__(self, policy: Policy, *, greedy: bool) -> None:
        self._policy, self._greedy = policy, greedy
        self._chunks: dict[tuple[int, int], NDArray[Any]] = {}

    def __call__(self, _rows: NDArray[np.intp], episodes: Sequence[DemoEpisode]) -> NDArray[Any]:
        """Actions [n,A]."""
        begun = [e for e in episodes if len(e.labels) % self._policy.chunk == 0]
        if begun:
            self._ask(begun)
        for key in self._chunks.keys() - {(e.task, e.index) for e in episodes}:
            del self._chunks[key]
        return np.stack([self._chunks[e.task, e.index][len(e.labels) % self._policy.chunk] for e in episodes])

    def _ask(self, episodes: Sequence[DemoEpisode]) -> None:
        cpu = torch.device("cpu")
        obs = {name: np.stack([e.obs[-1][name] for e in episodes]) for name in episodes[0].obs[-1]}
        streams = np.array([mix(e.seed, _NOISE) for e in episodes], np.int64)
        steps = np.array([len(e.labels) // self._policy.chunk for e in episodes], np.int64)
        keys = {"greedy": np.full(len(episodes), self._greedy), "noise_key": mix_array(streams, steps)}
        given = as_tensors(keys, cpu)
        with torch.inference_mode():
            actions = as_array(self._policy.act(as_tensors(obs, cpu), given["greedy"], given["noise_key"]).actions)
        for episode, chunk in zip(episodes, actions, strict=True):
            self._chunks[episode.task, episode.index] = np.array(chunk)
