"""The staging buffer: every byte of a version crosses once, whatever the size of a chunk."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.runtime.memory.receiver import StagingBuffer
from polyrhythm.specs import WeightsLayout
from polyrhythm.specs.weights import weight_specs

CPU = torch.device("cpu")


def state(seed):
    rng = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(5, 7, generator=rng),
        "transposed": torch.randn(6, 4, generator=rng).t(),
        "number": torch.randn((), generator=rng),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(33, generator=rng).bfloat16(),
        "flags": torch.rand(9, generator=rng) > 0.5,
        "count": torch.randint(0, 99, (), generator=rng),
        "large": torch.randn(1000, generator=rng),
    }


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 100, 4096, 10**9])
def test_a_version_arrives_whole(chunk_bytes):
    source, layout = state(0), WeightsLayout.of(weight_specs(state(0)))
    staging = StagingBuffer(layout, CPU, chunk_bytes)
    own = {name: torch.zeros_like(tensor) for name, tensor in source.items()} | {"more": torch.ones(2)}
    addresses = {name: tensor.data_ptr() for name, tensor in own.items()}
    for seed in (0, 1):
        source = state(seed)
        staging.fill(staging.tensors, source)
        staging.copy_to(own)
        assert all(torch.equal(own[name], tensor) for name, tensor in source.items())
    assert own["more"].eq(1).all()
    assert {name: tensor.data_ptr() for name, tensor in own.items()} == addresses


def test_what_was_filled_does_not_change_with_its_source():
    source, layout = state(0), WeightsLayout.of(weight_specs(state(0)))
    staging = StagingBuffer(layout, CPU, 100)
    staging.fill(staging.tensors, source)
    for tensor in source.values():
        tensor.zero_()
    assert all(torch.equal(staging.tensors[name], tensor) for name, tensor in state(0).items())
