"""A generator leaves a CUDA device and comes back: its memory is free meanwhile, its answers are the same bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.stations.generators import Stand

from polyrhythm.plugins.lease.offload import DeviceStore
from polyrhythm.stations.passes import DevicePasses

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_a_generator_leaves_its_device_and_answers_the_same_afterwards(cuda, graphs):
    stand = Stand(buckets=(4,), device=cuda, graphs=graphs)
    generator = stand.generator
    store = DeviceStore(str(cuda))
    asked = stand.request("a", 0, 3)
    before, full = stand.serve(asked), torch.cuda.memory_allocated(cuda)
    for _ in range(2):
        assert generator.suspend(store) > 0
        assert torch.cuda.memory_allocated(cuda) < full
        generator.resume(store)
        assert isinstance(generator.engine._passes, DevicePasses)
        after = stand.serve(asked)
        assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True))
    generator.close()
    store.close()
