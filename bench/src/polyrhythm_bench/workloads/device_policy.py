"""A wrapper that puts any policy on simulated devices: a generator's passes on one, a trainer's ranks on several."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from polyrhythm.config.base import NotNegative
from polyrhythm.policies.base import Act, Evaluation, Observations, Policy, as_settings
from polyrhythm.policies.form import PolicyForm, Role
from polyrhythm.specs import EnvSpec
from polyrhythm_bench.workloads.device_lock import Device, Turn, index_of, station_of_thread
from polyrhythm_bench.workloads.wrapped_policy import InnerPolicy, WrappedPolicy, wrapped_form


class DevicePolicySettings(BaseModel):
    """The policy `policy`; generator i is on `generators` i modulo their number, the trainer has a rank on each of
    `trainer`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    type: str
    """This class as module:Class."""
    policy: InnerPolicy
    """The policy's own settings, by type."""
    folder: str
    """Folder of the devices' locks."""
    generators: tuple[int, ...]
    """Devices of the generators."""
    trainer: tuple[int, ...]
    """Devices of the trainer's ranks."""
    evaluate_ms: NotNegative
    """Milliseconds that each rank is on its device for an evaluation, which begins a gradient step."""

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        return wrapped_form(self.policy, env_spec)

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> DevicePolicy:
        """The policy of the station in whose thread this is called."""
        inner = as_settings(self.policy).build(env_spec, seed=seed, device=device, role=role)
        station = station_of_thread()
        own = (self.generators[index_of(station) % len(self.generators)],) if role == "act" else self.trainer
        devices = [Device(Path(self.folder), number) for number in sorted(own)]
        return DevicePolicy(inner, devices, station, self.evaluate_ms / 1000.0)


class DevicePolicy(WrappedPolicy):
    """A policy of `station` whose passes hold the first of `devices`, and whose evaluations hold each for `seconds`.

    The ranks ask for their devices in increasing number; each begins when its own is free and gives it back at its own
    end, as those of `clustersim` do. An evaluation ends with the last of them.
    """

    def __init__(self, policy: Policy, devices: list[Device], station: str, seconds: float) -> None:
        super().__init__(policy)
        self._devices, self._station, self._seconds = devices, station, seconds
        self._ranks = ThreadPoolExecutor(len(devices), thread_name_prefix="rank")

    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        with self._devices[0].hold(self._station):
            return self._policy.act(obs, greedy, noise_key)

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        turns = [device.ask(self._station) for device in self._devices]
        ranks = [self._ranks.submit(self._compute, turn) for turn in turns]
        evaluation = self._policy.evaluate(obs, forward_inputs)
        for rank in ranks:
            rank.result()
        return evaluation

    def _compute(self, turn: Turn) -> None:
        turn.wait()
        try:
            time.sleep(self._seconds)
        finally:
            turn.end()
