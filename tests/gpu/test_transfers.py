"""Weights and micro-batches on their way to a CUDA device while it computes."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.conformance.weights import Module, layout_of, shared
from tests.runtime.test_staging import state

from polyrhythm.runtime.memory.receiver import Receiver, StagingBuffer
from polyrhythm.runtime.memory.weights import InlineWeights
from polyrhythm.specs import WeightsLayout
from polyrhythm.specs.weights import weight_specs
from polyrhythm.training.batch import send_ahead

pytestmark = pytest.mark.gpu


class Large(torch.nn.Module):
    """Two tensors of 32 MB, all of one value, so that a mix of versions is seen."""

    def __init__(self, value=0.0):
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((2**23,), float(value)))
        self.b = torch.nn.Parameter(torch.full((2**12, 2**11), float(value)))

    def values(self):
        """One value for each tensor that is whole."""
        return [float(x[0]) for x in map(torch.flatten, self.state_dict().values()) if bool((x == x[0]).all())]


def keep_busy(device):
    """Queue some 10 ms of work."""
    x = torch.randn(2048, 2048, device=device)
    for _ in range(20):
        x = (x @ x).clamp(-1, 1)
    return x


@pytest.mark.parametrize("chunk_bytes", [7, 100, 10**9])
def test_a_version_arrives_whole_in_chunks(chunk_bytes, cuda):
    layout = WeightsLayout.of(weight_specs(state(0)))
    staging = StagingBuffer(layout, cuda, chunk_bytes)
    own = {name: torch.zeros_like(tensor, device=cuda) for name, tensor in state(0).items()}
    for seed in (0, 1, 2):
        staging.fill(staging.tensors, state(seed))
        staging.copy_to(own)
        assert all(torch.equal(own[name].cpu(), tensor) for name, tensor in state(seed).items())


def test_versions_that_are_staged_in_a_thread_during_passes_are_applied_whole_and_in_place(cuda, tmp_path):
    writer, reader = shared(layout_of(Large()), tmp_path)
    module = Large(-1).to(cuda)
    receiver, addresses = Receiver(reader, module), [x.data_ptr() for x in module.state_dict().values()]
    assert receiver.stages
    for version in range(12):
        writer.publish(version, Large(version).state_dict())
        if version % 3 < 2:
            thread = threading.Thread(target=receiver.stage, args=(version,))
            thread.start()
            keep_busy(cuda)
            assert module.values() == [version - 1.0] * 2
            thread.join()
        keep_busy(cuda)
        assert receiver.apply(version) == version
        assert module.values() == [float(version)] * 2
    assert [x.data_ptr() for x in module.state_dict().values()] == addresses


def test_a_trainer_on_the_device_publishes_to_shared_memory_in_the_layouts_dtype(cuda, tmp_path):
    writer, reader = shared(layout_of(Module(dtype=torch.bfloat16)), tmp_path)
    trained = Module(1.001).to(cuda)
    writer.publish(0, trained.state_dict())
    assert torch.equal(reader.read()[1]["a"], trained.a.detach().cpu().to(torch.bfloat16))


def test_versions_on_the_device_of_the_module_are_not_staged(cuda):
    trained, module = Large(3).to(cuda), Large(0).to(cuda)
    weights = InlineWeights(layout_of(trained))
    receiver = Receiver(weights, module)
    weights.publish(0, trained.state_dict())
    assert not receiver.stages
    assert receiver.apply(0) == 0
    assert module.values() == [3.0, 3.0]
    assert receiver._staging is None


def test_micro_batches_arrive_in_order_while_others_are_used(cuda):
    pieces = [[torch.full((2**20,), float(number)), torch.full((3,), number)] for number in range(8)]
    sums = []
    for large, small in send_ahead(pieces, cuda, lambda tensors, change: [change(x) for x in tensors]):
        assert large.device == small.device == cuda
        keep_busy(cuda)
        sums.append(torch.stack((large.min(), large.max(), small.float().mean())))
    assert torch.stack(sums).cpu().tolist() == [[number] * 3 for number in range(8)]
