"""The weights bus and the tensors on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from polyrhythm.runtime.tensors import apply_state, as_array, as_tensors
from polyrhythm.runtime.weights import InlineWeights


def state(value):
    return {"a": torch.full((2, 3), float(value)), "b": torch.tensor(value)}


def test_the_two_newest_versions_can_be_fetched():
    bus = InlineWeights()
    assert bus.newest == -1
    for version in (0, 1, 2):
        bus.publish(version, state(version))
    assert bus.newest == 2
    for version in (1, 2):
        number, found = bus.fetch(version)
        assert number == version
        assert torch.equal(found["a"], state(version)["a"])
    assert bus.fetch(0)[0] == 2, "an overwritten version gives the newest instead, under its own number"


def test_a_published_version_does_not_follow_the_trainer_and_memory_is_used_again():
    bus, live = InlineWeights(), state(1)
    bus.publish(0, live)
    memory = bus.fetch(0)[1]["a"].data_ptr()
    live["a"].add_(1)
    bus.publish(1, live)
    assert bus.fetch(0)[1]["a"].eq(1).all()
    bus.publish(2, live)
    assert bus.fetch(2)[1]["a"].data_ptr() == memory


def test_weights_are_applied_whole_or_not_at_all():
    module = torch.nn.Linear(3, 2)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(ValueError, match=r"bias is \(5,\), it should be \(2,\)"):
        apply_state(module, {"weight": torch.zeros(2, 3), "bias": torch.zeros(5)})
    with pytest.raises(ValueError, match="extra"):
        apply_state(module, {**before, "extra": torch.zeros(1)})
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())
    apply_state(module, {"weight": torch.ones(2, 3), "bias": torch.ones(2)})
    assert module.weight.eq(1).all()


def test_arrays_and_tensors_share_memory_on_the_cpu():
    array = np.zeros(3, np.float32)
    tensor = as_tensors({"x": array}, torch.device("cpu"))["x"]
    tensor[0] = 7
    assert array[0] == 7
    assert as_array(tensor)[0] == 7
    assert as_array(torch.ones(2, dtype=torch.bfloat16)).dtype == np.float32
