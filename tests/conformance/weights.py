"""What every implementation of the weights channel is tested with: a module, and the two ends of a channel."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Barrier, Thread, current_thread
from typing import NamedTuple

import torch
from tests.plugins.cluster.served import blank_arena, served

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.client import DataClient, client_of
from polyrhythm.plugins.cluster.hosts.pair_weights import PairWeights
from polyrhythm.plugins.cluster.hosts.pairs import PairSender
from polyrhythm.plugins.cluster.hosts.relay import MIRROR, Relay, mirror_locks
from polyrhythm.plugins.cluster.hosts.weights import HostWeights, Mirror
from polyrhythm.runtime.memory.device_weights import DeviceWeights, OwnHandles, SimulatedHandles
from polyrhythm.runtime.memory.published import PublishedMemory, Way, shared_nbytes
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.runtime.memory.tensors import State, Stream, fitting, tensors_over
from polyrhythm.runtime.memory.weights import InlineWeights, SharedWeights, Weights
from polyrhythm.runtime.transport.authentication import make_keys
from polyrhythm.runtime.transport.sockets import LOOPBACK, Sockets
from polyrhythm.specs import WeightsLayout
from polyrhythm.specs.weights import weight_specs
from polyrhythm.training.ranks import Piece


class Module(torch.nn.Module):
    """A matrix, a number and a counter, all of one value, so that a mix of versions is seen."""

    def __init__(self, value: float = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.full((2, 3), float(value), dtype=dtype))
        self.b = torch.nn.Parameter(torch.tensor(float(value), dtype=dtype))
        self.register_buffer("n", torch.tensor(int(value)))

    def values(self) -> list[float]:
        return sorted({float(x) for tensor in self.state_dict().values() for x in tensor.flatten()})


def state(value: float) -> dict[str, torch.Tensor]:
    return Module(value).state_dict()


def layout_of(module: torch.nn.Module) -> WeightsLayout:
    return WeightsLayout.of(weight_specs(module.state_dict()))


class Ends(NamedTuple):
    """The trainer's end and a generator's."""

    writer: Weights
    reader: Weights


def inline(layout: WeightsLayout, _folder: Path) -> Ends:
    weights = InlineWeights(layout)
    return Ends(weights, weights)


def shared(layout: WeightsLayout, folder: Path) -> Ends:
    memory = bytearray(shared_nbytes(layout))
    return Ends(SharedWeights(layout, memory, folder), SharedWeights(layout, memoryview(memory), folder))


class Far(SharedWeights):
    """As for a module on a device: what is read crosses a staging buffer."""

    def lies_on(self, device: torch.device) -> bool:
        return False


def far(layout: WeightsLayout, folder: Path) -> Ends:
    memory = bytearray(shared_nbytes(layout))
    return Ends(SharedWeights(layout, memory, folder), Far(layout, memoryview(memory), folder))


class Shards(SharedWeights):
    """As two ranks of a sharded trainer publish: each writes its rows, from a thread of its own here; a stream is what
    they gather where they cannot."""

    def __init__(self, layout: WeightsLayout, memory: bytearray, folder: Path) -> None:
        super().__init__(layout, memory, folder)
        self._other = SharedWeights(layout, memory, folder)

    def publish(self, version: int, state: State | Stream) -> None:
        if not isinstance(state, Mapping):
            super().publish(version, state)
            return
        whole, met, numbers = dict(fitting(self.layout, state)), Barrier(2), dict[bool, Sequence[float]]()

        def totals(own: Sequence[float]) -> Sequence[float]:
            numbers[current_thread() is other] = own
            met.wait()
            found = [sum(each) for each in zip(*numbers.values(), strict=True)]
            met.wait()
            return found

        def pieces(*, first: bool) -> list[Piece]:
            rows = [(name, tensor, -(-len(tensor) // 2)) for name, tensor in whole.items() if tensor.dim()]
            if not first:
                return [Piece(name, tensor[half:], half) for name, tensor, half in rows]
            return [Piece(name, tensor) for name, tensor in whole.items() if not tensor.dim()] + [
                Piece(name, tensor[:half], 0) for name, tensor, half in rows
            ]

        second = partial(self._other.publish_pieces, version, pieces(first=False), totals, leads=False)
        other = Thread(target=second)
        other.start()
        self.publish_pieces(version, pieces(first=True), totals, leads=True)
        other.join()


def shards(layout: WeightsLayout, folder: Path) -> Ends:
    memory = bytearray(shared_nbytes(layout))
    return Ends(Shards(layout, memory, folder), SharedWeights(layout, memoryview(memory), folder))


def fill_host(memory: bytearray | memoryview, folder: Path, value: float) -> None:
    """Every tensor in the host's copies is `value`, so that it is seen where a version comes from."""
    layout = layout_of(Module())
    for buffer in PublishedMemory(layout, memory, folder).buffers:
        for tensor in tensors_over(layout, buffer).values():
            tensor.fill_(value)


class HostHandles(SimulatedHandles):
    """Those of a simulated device. opened: how often memory was opened; mapped: weak references to what was."""

    opened = 0

    def open(self, handle: bytes) -> torch.Tensor:
        self.opened += 1
        memory = super().open(handle)
        self.mapped = [*getattr(self, "mapped", ()), weakref.ref(memory.untyped_storage())]
        return memory


def device(layout: WeightsLayout, folder: Path, way: Way = "ipc") -> Ends:
    memory = bytearray(shared_nbytes(layout))
    ends = (SharedWeights(layout, memory, folder), SharedWeights(layout, memoryview(memory), folder))
    return Ends(*(DeviceWeights(end, folder, HostHandles(folder), way) for end in ends))


def peer(layout: WeightsLayout, folder: Path) -> Ends:
    """As for a generator on another device than the trainer's: what it reads crosses a staging buffer."""
    return device(layout, folder, "peer")


def one_process(layout: WeightsLayout, folder: Path) -> Ends:
    """The trainer and a generator on one device, in one process."""
    memory = bytearray(shared_nbytes(layout))
    ends = (SharedWeights(layout, memory, folder), SharedWeights(layout, memoryview(memory), folder))
    return Ends(*(DeviceWeights(end, folder, OwnHandles("cpu", "sim:0"), "reference") for end in ends))


def tcp(layout: WeightsLayout, folder: Path) -> Ends:
    """The trainer and a generator on two hosts, which share nothing but a connection."""
    return over_hosts(layout, folder)[0]


def over_hosts(
    layout: WeightsLayout, folder: Path, kind: type[PublishedMemory] = PublishedMemory
) -> tuple[Ends, PublishedMemory, HostWeights]:
    """Both ends, what is published, and the generator's end."""
    memory = bytearray(shared_nbytes(layout))
    writer = SharedWeights(layout, memory, folder)
    published = kind(layout, memory, folder)
    client = served(folder, blank_arena(), published)
    other = folder / "other"
    other.mkdir()
    (other / MIRROR).write_bytes(bytes(shared_nbytes(layout)))
    relay = Relay(layout, other, lambda host, _: DataClient(host, client.connect))
    agent = served(other, blank_arena(), None, "own", relay=relay)
    mirror = SharedWeights(layout, memoryview(open_segment(other, MIRROR)), mirror_locks(other))
    reader = HostWeights(None, [client], Mirror(mirror, agent, lambda publisher: [(publisher, "")]))
    return Ends(writer, reader), published, reader


def pair(layout: WeightsLayout, folder: Path, devices: tuple[str, str] = ("cpu", "cpu")) -> Ends:
    """The trainer and a generator on devices of two hosts, which make a process group."""
    trainer, generator = map(torch.device, devices)
    ends, published, reader = over_hosts(layout, folder)
    keys = make_keys()
    sockets = [Sockets("tcp", str(folder), keys, lambda: None, q.LARGEST_QUESTION) for _ in range(2)]
    over = ExitStack()
    for own in sockets:
        over.callback(own.close)
    sender = PairSender(published, folder, trainer, sockets[0])
    over.callback(sender.close)

    def find() -> tuple[DataClient, str]:
        client = client_of(sockets[1], "far", (folder / q.PAIR_FILE).read_text())
        over.callback(client.close)
        return client, LOOPBACK

    weights = PairWeights(reader, "far", generator, find, LOOPBACK)
    weakref.finalize(weights, over.close)
    return Ends(ends.writer, weights)


#: The next implementation is a line here.
IMPLEMENTATIONS: dict[str, Callable[[WeightsLayout, Path], Ends]] = {
    "inline": inline,
    "local": shared,
    "far": far,
    "shards": shards,
    "device": device,
    "peer": peer,
    "one process": one_process,
    "tcp": tcp,
    "pair": pair,
}
