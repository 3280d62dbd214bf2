"""Workers of a workflow take turns on a CUDA device, and their tensors stay in its memory (CUDA IPC)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.plugins.workflow import test_devices

from polyrhythm.plugins.workflow.protocol import OnDevice
from polyrhythm.plugins.workflow.shipments import Shipping

pytestmark = pytest.mark.gpu


def test_tensors_stay_on_the_device_while_workers_take_turns_on_it(cuda: torch.device) -> None:
    test_devices.check_turns_and_shipments(str(cuda.index))


def test_memory_that_nobody_will_receive_is_freed(cuda: torch.device, tmp_path: Path) -> None:
    sender = Shipping(OnDevice(str(cuda), ("b",), False), str(cuda), tmp_path, "a")
    tensor = torch.ones(1 << 20, device=cuda)
    before = torch.cuda.memory_allocated(cuda)
    for copies in (1, 2):
        shipment = sender.begin()
        assert shipment.add(tensor) == 0
        labels = sender.send(shipment, copies)
        assert torch.cuda.memory_allocated(cuda) > before
        for label in labels:
            sender.drop(label)
        assert torch.cuda.memory_allocated(cuda) == before
