"""A wrapper that puts any environment on a simulated device, which it holds while it steps or resets. It imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, SerializeAsAny

from polyrhythm.config.registry import resolve
from polyrhythm.envs.base import EnvBatch, EnvSettings, RowNumbers, StepResult
from polyrhythm.specs import EnvSpec
from polyrhythm_bench.workloads.device_lock import Device, index_of, station_of_thread


def _env(value: Any) -> BaseModel:
    return resolve("env", value)


class DeviceEnvSettings(BaseModel):
    """The environment `env`; simulator i is on `devices` i modulo their number, as in `clustersim`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    type: str
    """This class as module:Class."""
    env: Annotated[SerializeAsAny[BaseModel], BeforeValidator(_env)]
    """The environment's own settings, by type."""
    folder: str
    """Folder of the devices' locks."""
    devices: tuple[int, ...]
    """Devices of the simulators."""

    def spec(self) -> EnvSpec:
        return self._settings.spec()

    def build(self, rows: int) -> DeviceBatch:
        """A batch on the device of the simulator in whose thread this is called."""
        station = station_of_thread()
        device = Device(Path(self.folder), self.devices[index_of(station) % len(self.devices)])
        return DeviceBatch(self._settings.build(rows), device, station)

    @property
    def _settings(self) -> EnvSettings:
        assert isinstance(self.env, EnvSettings)
        return self.env


class DeviceBatch:
    """An env batch of `station` that takes a turn on its device for each step and each reset."""

    def __init__(self, batch: EnvBatch, device: Device, station: str) -> None:
        self.rows, self.spec = batch.rows, batch.spec
        self._batch, self._device, self._station = batch, device, station

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        with self._device.hold(self._station):
            self._batch.reset(rows, tasks, seeds)

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        with self._device.hold(self._station):
            return self._batch.step(rows, actions)

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        self._batch.observe(rows, out)

    def close(self) -> None:
        self._batch.close()
