"""Weights that a trainer shares with generators, between two processes: on its CUDA device, and on another one that can
read its memory. The latter have never been run: no machine with two CUDA devices was at hand."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from tests.conformance.weights import Module, fill_host, layout_of, pair

from polyrhythm.runtime.memory.device_weights import DeviceWeights, can_reach
from polyrhythm.runtime.memory.process_memory import open_weights
from polyrhythm.runtime.memory.published import Ends, shared_nbytes
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.runtime.memory.weights import InlineWeights

pytestmark = pytest.mark.gpu

TRAINER = "cuda:0"

GENERATOR = """
import sys
from pathlib import Path
from tests.conformance.weights import Module, layout_of
from polyrhythm.runtime.memory.process_memory import open_weights
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.runtime.memory.published import Ends

folder, device = Path(sys.argv[1]), sys.argv[2]
memory = memoryview(open_segment(folder, "weights"))
weights = open_weights(layout_of(Module()), memory, folder, device, Ends("cuda:0", (device,)))
module = Module(7).to(device)
receiver = Receiver(weights, module)
print("ready", flush=True)
for line in sys.stdin:
    print(receiver.apply(int(line)), module.values(), *receiver.traffic.moved, flush=True)
"""


@contextmanager
def generator(folder, device):
    """Another process; asks it to apply a version, and gives what it then has and the ways that versions came."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", GENERATOR, str(folder), device]
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


@pytest.fixture(params=["cuda:0", "cuda:1"])
def device(request, cuda):
    """The generator's device; skips where there is no second one, or none that can read the first."""
    if request.param != TRAINER and (torch.cuda.device_count() < 2 or not can_reach(request.param, TRAINER)):
        pytest.skip("no second CUDA device that can read the first one's memory")
    return request.param


def test_a_generator_takes_versions_from_the_trainers_memory_while_the_trainer_lives(device, tmp_path):
    (tmp_path / "weights").write_bytes(bytes(shared_nbytes(layout_of(Module()))))
    memory = memoryview(open_segment(tmp_path, "weights"))
    trainer = open_weights(layout_of(Module()), memory, tmp_path, TRAINER, Ends(TRAINER, (device,)))
    assert isinstance(trainer, DeviceWeights)
    way = "ipc" if device == TRAINER else "peer"
    with generator(tmp_path, device) as apply:
        for version in range(3):
            state = Module(version).to(TRAINER).state_dict()
            trainer.publish(version, iter(state.items()) if version else state)
            fill_host(memory, tmp_path, 99)
            assert apply(version) == f"{version} [{version}.0] {way} apply"
        trainer.publish(3, Module(3).to(TRAINER).state_dict())
        shared = trainer._copy.state  # the memory outlives the trainer's end of the channel, which gives up its lock
        del trainer
        shared["a"].fill_(50)
        assert apply(3) == f"3 [3.0] {way} apply host"


def test_a_pair_of_devices_sends_versions_by_nccl(cuda, tmp_path):
    """Between two devices of this machine as between those of two hosts."""
    if torch.cuda.device_count() < 2:
        pytest.skip("no second CUDA device")
    ends = pair(layout_of(Module()), tmp_path, (TRAINER, "cuda:1"))
    module = Module(9).to("cuda:1")
    receiver = Receiver(ends.reader, module)
    for version in range(3):
        ends.writer.publish(version, Module(version).to(TRAINER).state_dict())
        assert receiver.stage(version) == receiver.apply(version) == version
        assert module.values() == [version]
    assert set(receiver.traffic.moved) == {"pair", "apply"}


def test_the_bench_measures_every_way_of_the_machine(cuda):
    from polyrhythm_bench.cases import weights

    found = weights.run(megabytes=64, repeats=2)
    ways = {name: mode["way"] for name, mode in found["modes"].items()}
    assert ways["CUDA IPC, one device"] == "ipc"
    assert ways["shared and pinned memory, to a device"] == "host"
    assert ways.get("device to device", "peer") == "peer"


@pytest.mark.parametrize("host", [False, True])
def test_versions_of_one_process_leave_a_leased_device(cuda, host):
    module = Module(1).to(cuda)
    weights = InlineWeights(layout_of(module), host=host)
    weights.publish(0, module.state_dict())
    assert {tensor.is_cuda for tensor in weights.read()[1].values()} == {not host}
    assert weights.lies_on(cuda) != host
