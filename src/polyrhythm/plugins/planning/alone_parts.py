"""Parts of a run that the measurements of single stations share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import pstdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.array_specs import arena_layout, env_batch_infos
from polyrhythm.pipeline.build import env_settings, policy_settings
from polyrhythm.pipeline.placed import place
from polyrhythm.plugins.lease.offload import open_store
from polyrhythm.plugins.planning.profile import Episodes, Kind, StationProfile
from polyrhythm.plugins.planning.timing import FEWEST, Budget, Measurements
from polyrhythm.policies.base import Policy
from polyrhythm.policies.form import PolicyForm, Role
from polyrhythm.runtime.devices import CPU
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.memory.arena import Arena, in_memory
from polyrhythm.runtime.memory.published import shared_nbytes
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.memory.weights import SharedWeights
from polyrhythm.specs import WeightsLayout
from polyrhythm.stations.generator_factory import PolicyFactory

#: Rows of observations that passes and samples are made of.
SHOWN = 64


class RunParts:
    """The parts of a recipe's run, and what one measurement leaves for the next ones. The configuration has passed
    `validate_run`.

    chunk: env steps of a chunk step; obs: shown observations by name, rows first, and answers: the policy's to them;
    ended: chunk steps of each whole episode; row_steps: chunk steps of all rows.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config, self.spec = config, env_settings(config).spec()
        self.form: PolicyForm = policy_settings(config).form(self.spec)
        self.infos = env_batch_infos(config, self.spec)
        self.placed = place(config)
        layout = arena_layout(config, self.spec, self.infos, self.form)
        self.layout = replace(layout, blocks=1, steps=1)
        self.weights = WeightsLayout.of(self.form.published)
        self.factory = PolicyFactory(config.policy.model_dump(mode="json"), self.spec, config.seed)
        self.obs: dict[str, NDArray[Any]] = {}
        self.answers: NDArray[np.void] = np.zeros(0, self.layout.answer_dtype)
        self.ended: list[int] = []
        self.row_steps = 0
        self.chunk = self._env_steps()

    def episodes(self) -> Episodes:
        """Lengths of the episodes seen; the mean counts those that have not ended, and is at most the longest."""
        longest = max(1, -(-self.spec.max_steps // self.chunk))
        if not self.ended:
            return Episodes(mean=longest, longest=longest, chunk=self.chunk)
        mean = min(longest, max(1.0, self.row_steps / len(self.ended)))
        return Episodes(mean=mean, deviation=pstdev(self.ended), longest=longest, chunk=self.chunk)

    def build(self, seat: Resources, role: Role) -> Policy:
        """The policy as a station on this seat builds it."""
        torch.set_num_threads(seat.threads)
        return self.factory.build(seat.torch_device, role, self.weights)

    def arena(self, blocks: int, steps: int) -> Arena:
        return in_memory(replace(self.layout, blocks=blocks, steps=steps))

    def _env_steps(self) -> int:
        """Env steps of a chunk step."""
        chunk = 1 if self.spec.chunk else self.form.chunk
        return max(1, chunk * self.config.rollout.action_repeat)


def station_profile(device: str, held: int, found: Measurements) -> StationProfile:
    """The profile of a station that keeps so many bytes on its device."""
    if device == CPU:
        return StationProfile(device="cpu", host=held, works=found.works())
    return StationProfile(device="cuda", resident=held, works=found.works())


@contextmanager
def open_channel(layout: WeightsLayout) -> Iterator[SharedWeights]:
    """The weights channel of a run of this machine."""
    memory = SharedRunFolder({"weights": shared_nbytes(layout)})
    try:
        weights = SharedWeights(layout, memoryview(memory.segment("weights")), memory.folder)
        yield weights
        del weights
    finally:
        memory.remove()


def measure_switch(
    parts: RunParts,
    tensors: Sequence[Tensor],
    device: str,
    found: Measurements,
    budget: Budget,
    kind: Kind,
    left_out: list[str],
) -> None:
    """Leaving the device and coming back, where stations may lease one."""
    if device == CPU and parts.config.placement.sharing != "lease":
        left_out.append(f"{kind}: leaving and entering a device (offload, onload), since it is on the CPU")
        return
    store = open_store(device, "")
    nbytes = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())
    try:
        for count in range(FEWEST + 1):
            if budget.over and count > 1:
                break
            with found.time("offload", nbytes):
                store.suspend(tensors)
            with found.time("onload", nbytes):
                store.resume()
    finally:
        store.close()
