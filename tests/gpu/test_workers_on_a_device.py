"""Workers of a workflow take turns on a CUDA device, and their tensors stay in its memory (CUDA IPC)."""

from __future__ import annotations

import pytest
import torch
from tests.plugins.workflow import test_devices

pytestmark = pytest.mark.gpu


def test_tensors_stay_on_the_device_while_workers_take_turns_on_it(cuda: torch.device) -> None:
    test_devices.check_turns_and_shipments(str(cuda.index))
