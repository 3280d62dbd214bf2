"""Weights that a trainer shares with a generator on its CUDA device, between two processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.conformance.weights import Module, layout_of

from polyrhythm.runtime.memory.device_handles import CudaHandles
from polyrhythm.runtime.memory.device_weights import DeviceWeights
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.runtime.memory.weights import SharedWeights, shared_nbytes

pytestmark = pytest.mark.gpu

GENERATOR = """
import sys
from pathlib import Path
import torch
from tests.conformance.weights import Module, layout_of
from polyrhythm.runtime.memory.device_handles import CudaHandles
from polyrhythm.runtime.memory.device_weights import DeviceWeights
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.runtime.memory.weights import SharedWeights

folder, device = Path(sys.argv[1]), torch.device("cuda", 0)
host = SharedWeights(layout_of(Module()), memoryview(open_segment(folder, "weights")), folder)
module = Module(7).to(device)
receiver = Receiver(DeviceWeights(host, folder, CudaHandles(str(device))), module)
print("ready", flush=True)
for line in sys.stdin:
    print(receiver.apply(int(line)), module.values(), receiver.stages, flush=True)
"""


@pytest.fixture
def generator(cuda, tmp_path):
    """Another process; asks it to apply a version, and gives what it then has."""
    (tmp_path / "weights").write_bytes(bytes(shared_nbytes(layout_of(Module()))))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", GENERATOR, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline() == "ready\n"

        def apply(version):
            process.stdin.write(f"{version}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        yield apply
        process.stdin.close()
        assert process.wait(60) == 0


def test_a_generator_takes_versions_from_the_trainers_memory_while_the_trainer_lives(generator, cuda, tmp_path):
    host = SharedWeights(layout_of(Module()), memoryview(open_segment(tmp_path, "weights")), tmp_path)
    trainer = DeviceWeights(host, tmp_path, CudaHandles(str(cuda)))
    for version in range(3):
        trainer.publish(version, Module(version).to(cuda).state_dict())
        for tensors in host._buffers:
            for tensor in tensors.values():
                tensor.fill_(99)  # so that it is seen where a version comes from
        assert generator(version) == f"{version} [{version}.0] False"
    trainer.publish(3, Module(3).to(cuda).state_dict())
    shared = trainer._copy.state  # the memory outlives the trainer's end of the channel, which gives up its lock
    del trainer
    shared["a"].fill_(50)
    assert generator(3) == "3 [3.0] True"
