"""An environment whose observations are tensors, as those of a simulator on a GPU are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from tests.process.settings import LeavingBatch, LeavingSettings

from polyrhythm.envs.gymnasium_env import GymnasiumBatch, GymnasiumSettings


class ObservesOnDevice:
    """Adds to a batch that its observations are tensors."""

    spec: Any
    observe: Any

    def observe_on_device(self, rows: Any) -> Mapping[str, torch.Tensor]:
        out = {name: np.zeros((len(rows), *spec.shape), spec.dtype) for name, spec in self.spec.observation.items()}
        self.observe(rows, out)
        return {name: torch.from_numpy(array) for name, array in out.items()}


class TensorSettings(GymnasiumSettings):
    """CartPole that observes on its device."""

    type: Literal["tests.process.tensor_env:TensorSettings"] = "tests.process.tensor_env:TensorSettings"

    def build(self, rows: int) -> TensorBatch:
        return TensorBatch(self, rows)


class TensorBatch(ObservesOnDevice, GymnasiumBatch):
    """A row of CartPole each."""


class LeavingTensorSettings(LeavingSettings):
    """The same, and it can leave its device."""

    type: Literal["tests.process.tensor_env:LeavingTensorSettings"] = "tests.process.tensor_env:LeavingTensorSettings"

    def build(self, rows: int) -> LeavingTensorBatch:
        return LeavingTensorBatch(self, rows)


class LeavingTensorBatch(ObservesOnDevice, LeavingBatch):
    """A row of CartPole each."""
