"""Weights between real processes: from the ranks of a sharded trainer (gloo), and out of memory that a trainer shares
(a file stands for a device), whoever dies in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager

import pytest
import torch
from tests.conformance.weights import Far, HostHandles, Module, layout_of
from tests.long import long

from polyrhythm.runtime.memory.device_weights import DeviceWeights
from polyrhythm.runtime.memory.published import shared_nbytes
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.runtime.memory.weights import SharedWeights
from polyrhythm.specs import WeightsLayout
from polyrhythm.specs.weights import WeightSpec

WIDTH, TENSORS = 64, 4
LAYOUT = WeightsLayout.of({f"w{i}": WeightSpec((WIDTH, 3), "bfloat16") for i in range(TENSORS)})
_DEADLINE_S = 120.0

RANK = """
import os, sys
from pathlib import Path
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from tests.runtime.test_weights_between_processes import LAYOUT, TENSORS, WIDTH
from polyrhythm.config.sections.placement import ShardSettings
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.runtime.memory.weights import SharedWeights
from polyrhythm.training.ranks import Meeting, open_ranks

rank, folder, way = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
ranks = open_ranks(rank, 2, Meeting(folder / "ranks"), "cpu", "shard", ShardSettings())
mesh = init_device_mesh("cpu", (2,))
weights = SharedWeights(LAYOUT, memoryview(open_segment(folder, "weights")), folder)


def state(version):
    return {
        f"w{i}": distribute_tensor(torch.full((WIDTH, 3), float(version)), mesh, [Shard(0)]) for i in range(TENSORS)
    }


def ending(items, last):
    for number, item in enumerate(items, 1):
        yield item
        if rank and number == last:
            os._exit(9)


together = ranks.divide_writing(state(0), "here" if way == "together" or not rank else "elsewhere")
assert together is (way == "together")
print("ready", flush=True)
for line in sys.stdin:
    version, last = map(int, line.split())
    try:
        if together:
            pieces = ranks.pieces(state(version))
            weights.publish_pieces(version, ending(pieces, last), ranks.totals_beside, leads=rank == 0)
        elif rank:
            for _ in ending(ranks.snapshot(state(version)), last):
                pass
        else:
            weights.publish(version, ranks.snapshot(state(version)))
        print("published", flush=True)
    except RuntimeError:
        print("broken", flush=True)
"""

TRAINER = """
import sys
from pathlib import Path
from tests.conformance.weights import HostHandles, Module, layout_of
from polyrhythm.runtime.memory.device_weights import DeviceWeights
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.runtime.memory.weights import SharedWeights

folder = Path(sys.argv[1])
host = SharedWeights(layout_of(Module()), memoryview(open_segment(folder, "weights")), folder)
weights = DeviceWeights(host, folder, HostHandles(folder))
print("ready", flush=True)
for line in sys.stdin:
    version, last = map(int, line.split())

    def tensors():
        for number, item in enumerate(Module(version).state_dict().items()):
            if number == last:
                print("in the middle", flush=True)
                sys.stdin.readline()
            yield item

    weights.publish(version, tensors())
    print("published", flush=True)
"""


class Child:
    """A process that is told a line and answers with one."""

    def __init__(self, process):
        self.process = process

    def tell(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def hear(self):
        return self.process.stdout.readline().strip()


@contextmanager
def child(script, *arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        end = threading.Timer(_DEADLINE_S, process.kill)  # whoever waits for its answer then hears nothing
        end.start()
        try:
            yield Child(process)
        finally:
            end.cancel()
            process.kill()
            process.wait(_DEADLINE_S)


class Net(torch.nn.Module):
    """A module of the layout in bfloat16."""

    def __init__(self):
        super().__init__()
        for placed in LAYOUT.tensors:
            self.register_parameter(placed.name, torch.nn.Parameter(torch.zeros(WIDTH, 3, dtype=torch.bfloat16)))

    def values(self):
        return {float(x) for tensor in self.state_dict().values() for x in tensor.float().unique()}


@long(5, "ranks that publish, of which one dies")
@pytest.mark.parametrize("way", ["together", "gathered"])
def test_sharded_ranks_publish_and_a_rank_that_dies_leaves_the_newest_version(way, tmp_path):
    """Each rank its own rows, or rank 0 what it gathers because the other has no part in its memory."""
    (tmp_path / "weights").write_bytes(bytes(shared_nbytes(LAYOUT)))
    with ExitStack() as stack:
        ranks = [stack.enter_context(child(RANK, rank, tmp_path, way)) for rank in range(2)]
        assert [rank.hear() for rank in ranks] == ["ready", "ready"]
        reader = Far(LAYOUT, memoryview(open_segment(tmp_path, "weights")), tmp_path)
        module = Net()
        receiver = Receiver(reader, module)
        for version in range(3):
            for rank in ranks:
                rank.tell(version, -1)
            assert [rank.hear() for rank in ranks] == ["published", "published"]
            assert receiver.stage(version) == receiver.apply(version) == version
            assert module.values() == {float(version)}
        for rank in ranks:
            rank.tell(3, 2)
        assert ranks[1].process.wait(_DEADLINE_S) == 9
        assert ranks[0].hear() == "broken"
        assert reader.newest == 2
        assert Receiver(reader, other := Net()).apply(3) == 2
        assert other.values() == {2.0}


@pytest.fixture
def shared_memory(tmp_path):
    (tmp_path / "weights").write_bytes(bytes(shared_nbytes(layout_of(Module()))))
    return tmp_path


@pytest.mark.parametrize("way", ["ipc", "peer"])
def test_generators_take_versions_out_of_the_trainers_memory_until_it_is_killed_in_the_middle_of_one(
    way, shared_memory
):
    host = SharedWeights(layout_of(Module()), memoryview(open_segment(shared_memory, "weights")), shared_memory)
    reader = DeviceWeights(host, shared_memory, HostHandles(shared_memory), way)
    modules = [Module(9), Module(9)]
    receivers = [Receiver(reader, module) for module in modules]
    with child(TRAINER, shared_memory) as trainer:
        assert trainer.hear() == "ready"
        for version in range(2):
            trainer.tell(version, -1)
            assert trainer.hear() == "published"
            assert [receiver.apply(version) for receiver in receivers] == [version, version]
            assert [module.values() for module in modules] == [[version], [version]]
        assert all(receiver.stages is (way == "peer") for receiver in receivers)
        assert {way, "apply"} == set(receivers[0].traffic.moved)
        trainer.tell(2, 1)
        assert trainer.hear() == "in the middle"
        late = Module(9)
        assert Receiver(reader, late).apply(1) == 1, "nobody waits for a trainer that is in the middle"
        assert late.values() == [1]
        trainer.process.send_signal(signal.SIGKILL)
        trainer.process.wait(_DEADLINE_S)
    assert reader.newest == 1
    taken = Receiver(reader, other := Module(9))
    assert taken.apply(2) == 1
    assert other.values() == [1]
    assert set(taken.traffic.moved) == {"host", "apply"}
