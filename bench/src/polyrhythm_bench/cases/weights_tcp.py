"""A version of the weights over tcp between two hosts, as `launcher: ray` has it, or by a pair between simulated
devices of these (gloo), beside a bare tcp connection.

The hosts are apart by setting: each end has a folder of shared memory of its own on this machine, so the connection is
the loopback interface's. This process publishes; the agent of its host serves what it published, encrypted; the other
end copies that into its host's memory and from there into a model. Bare: the same bytes copied into memory here, sent
through a socket without encryption, received into memory there and copied into the model.
"""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.agent import AgentSpec, LocalNode
from polyrhythm.plugins.cluster.hosts.memory import HostMemory, segment_sizes
from polyrhythm.runtime.hosts import HostView
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.published import APPLY, Ends
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder, shared_root
from polyrhythm.runtime.memory.tensors import copy_into, tensors_over
from polyrhythm.runtime.messages import TRAINER
from polyrhythm.runtime.transport.authentication import KeyPair, RunKeys, make_keys
from polyrhythm.runtime.transport.sockets import LOOPBACK, Sockets
from polyrhythm_bench.harness.worker import Answer, Worker
from polyrhythm_bench.workloads.linear_model import layout_of, linear_model, medians

_HERE, _THERE = "main", "host-1"
#: An arena that nobody uses.
_ARENA = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})
#: Of the trainer and the generator, where versions come by a pair.
_DEVICES = ("sim:0", "sim:1")
_ENDS = Ends(_DEVICES[0])
#: Seconds that the bare connection waits for the other end.
_DEADLINE_S = 120.0


def measure_tcp(megabytes: int, repeats: int, *, pair: bool = False) -> dict[str, Any]:
    """Medians of seconds by the clock, as three processes take part: publish_ms, apply_ms (asked until applied),
    bare_ms; ratio, turn by turn; gb_per_s from state to module; way that versions took. pair: the ends are on
    simulated devices."""
    state = linear_model(megabytes).state_dict()
    layout, keys = layout_of(state), make_keys()
    with ExitStack() as stack:
        memory = SharedRunFolder(segment_sizes(_ARENA, layout, _HERE, (_HERE,)))
        stack.callback(memory.remove)
        node = LocalNode()
        stack.callback(node.close)
        spec = AgentSpec(_HERE, (), str(memory.folder), _ARENA, layout, (_HERE,), LOOPBACK, keys)
        served = node.start_agent(spec)().endpoint
        sockets = Sockets("tcp", str(memory.folder), keys, lambda: None, q.LARGEST_QUESTION)
        stack.callback(sockets.close)
        view = HostView(_HERE, str(memory.folder), LOOPBACK, {_HERE: served}, publishers=(_HERE,), process=TRAINER)
        host = HostMemory(_ARENA, layout, memory.folder, view, sockets)
        stack.callback(host.close)
        weights = host.weights(_DEVICES[0], _ENDS) if pair else host.weights("cpu", None)
        listening = stack.enter_context(socket.create_server((LOOPBACK, 0)))
        listening.settimeout(_DEADLINE_S)
        reader = stack.enter_context(
            Worker(
                f"{__name__}:reader",
                root=stack.enter_context(tempfile.TemporaryDirectory(dir=shared_root())),
                server=served,
                keys=[key.decode() for pair in (keys.inbox, keys.outbox) for key in (pair.public, pair.secret)],
                megabytes=megabytes,
                port=listening.getsockname()[1],
                pair=pair,
            )
        )
        plain = stack.enter_context(listening.accept()[0])
        content = bytearray(layout.nbytes)
        bare = tensors_over(layout, memoryview(content))

        def send() -> None:
            copy_into(bare, state)
            reader.begin(bare=True)
            plain.sendall(content)
            reader.answer()

        turns, way = [], ""
        for version in range(repeats + 1):
            publish = _elapsed(lambda v=version: weights.publish(v, state))  # type: ignore[misc]
            begin = time.perf_counter()
            way = reader.ask(version=version)
            apply = time.perf_counter() - begin
            turns.append((publish, apply, _elapsed(send)))
    return medians(turns[1:], layout.nbytes, way)


def _elapsed(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


@contextmanager
def reader(root: str, server: str, keys: list[str], megabytes: int, port: int, *, pair: bool) -> Iterator[Answer]:
    """The other host's end. Answers: `version`: it is applied, the way that it came; `bare`: received and copied."""
    model = linear_model(megabytes)
    state = model.state_dict()
    layout = layout_of(state)
    pairs = [KeyPair(*(key.encode() for key in keys[i : i + 2])) for i in (0, 2)]
    with ExitStack() as stack:
        memory = SharedRunFolder(segment_sizes(_ARENA, layout, _THERE, (_HERE,)), Path(root))
        stack.callback(memory.remove)
        run_keys = RunKeys(*pairs)
        sockets = Sockets("tcp", str(memory.folder), run_keys, lambda: None, q.LARGEST_QUESTION)
        stack.callback(sockets.close)
        node = LocalNode()
        stack.callback(node.close)
        spec = AgentSpec(_THERE, (), str(memory.folder), _ARENA, layout, (_HERE,), LOOPBACK, run_keys)
        servers = {_HERE: server, _THERE: node.start_agent(spec)().endpoint}
        view = HostView(_THERE, str(memory.folder), LOOPBACK, servers, publishers=(_HERE,))
        host = HostMemory(_ARENA, layout, memory.folder, view, sockets)
        stack.callback(host.close)
        receiver = Receiver(host.weights(_DEVICES[1], _ENDS) if pair else host.weights("cpu", None), model)
        plain = stack.enter_context(socket.create_connection((LOOPBACK, port), _DEADLINE_S))
        room = memoryview(bytearray(layout.nbytes))

        def answer(version: int = -1, *, bare: bool = False) -> str:
            if not bare:
                receiver.apply(version)
                return next(kind for kind in receiver.traffic.moved if kind != APPLY)
            received = 0
            while received < len(room):
                received += _some(plain, room[received:])
            copy_into(state, tensors_over(layout, room))
            return ""

        yield answer


def _some(connection: socket.socket, room: memoryview) -> int:
    count = connection.recv_into(room)
    if count == 0:
        raise ConnectionError("the other end has closed the bare connection")
    return count
