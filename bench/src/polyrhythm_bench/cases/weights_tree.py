"""A version of the weights to several hosts over the tree of their agents, beside one where all fetch it from the
publisher's host: bytes that this host sends, and the time until all have it.

The hosts are apart by their memories, on this machine: they share its cores and have no links, so the time is that of
all agents together. The bytes are what a link of the publisher's host would carry.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.agent import AgentSpec, Found, LocalNode
from polyrhythm.plugins.cluster.hosts.memory import HostMemory
from polyrhythm.runtime.hosts import HostView
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.process_memory import WEIGHTS
from polyrhythm.runtime.memory.shared_folder import open_segment, shared_root
from polyrhythm.runtime.memory.tensors import tensors_over
from polyrhythm.runtime.memory.weights import SharedWeights, Weights
from polyrhythm.runtime.transport.authentication import RunKeys, make_keys
from polyrhythm.runtime.transport.sockets import LOOPBACK, Sockets
from polyrhythm.specs import WeightsLayout
from polyrhythm_bench.workloads.linear_model import layout_of, linear_model

#: An arena that nobody uses.
_ARENA = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})
_PUBLISHER = "host-0"
#: Hosts that fetch.
HOSTS = (2, 6)


def measure_tree(hosts: int, megabytes: int, repeats: int) -> dict[str, Any]:
    """Medians over `repeats` versions each by the tree and by the star, in turn: sent and star_sent, bytes of the
    publisher's host over those of a version; ms and star_ms, until all hosts have it."""
    state = linear_model(megabytes).state_dict()
    layout, keys = layout_of(state), make_keys()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=shared_root())))
        begun = {}
        for name in (_PUBLISHER, *(f"host-{number}" for number in range(1, hosts + 1))):
            own = root / name
            own.mkdir()
            node = LocalNode(name, environment={"POLYRHYTHM_SHARED_MEMORY": str(own)})
            stack.callback(node.close)
            begun[name] = node.start_agent(AgentSpec(name, (), "", _ARENA, layout, (_PUBLISHER,), LOOPBACK, keys))
        found = {name: wait() for name, wait in begun.items()}
        folder = Path(found[_PUBLISHER].folder)
        weights = SharedWeights(layout, memoryview(open_segment(folder, WEIGHTS)), folder)
        ends = {star: _open_ends(layout, keys, found, stack, star=star) for star in (False, True)}
        pool = stack.enter_context(ThreadPoolExecutor(hosts))
        rooms = [tensors_over(layout, memoryview(bytearray(layout.nbytes))) for _ in range(hosts)]
        turns: list[tuple[bool, float, float]] = []
        for version in range(2 * (repeats + 1)):
            weights.publish(version, state)
            star, begin = bool(version % 2), time.perf_counter()
            fetched = list(pool.map(lambda end, room, v=version: end.fetch(v, room), ends[star], rooms))
            took = time.perf_counter() - begin
            sent = sum(one.sources.get(_PUBLISHER, 0) for one in fetched) / layout.nbytes
            turns.append((star, sent, took))
    turns = turns[2:]
    return {
        "hosts": hosts,
        "sent": statistics.median(sent for star, sent, _ in turns if not star),
        "star_sent": statistics.median(sent for star, sent, _ in turns if star),
        "ms": 1e3 * statistics.median(took for star, _, took in turns if not star),
        "star_ms": 1e3 * statistics.median(took for star, _, took in turns if star),
    }


def _open_ends(
    layout: WeightsLayout, keys: RunKeys, found: dict[str, Found], stack: ExitStack, *, star: bool
) -> list[Weights]:
    """Of a process on each host that fetches. star: it knows of no other host but the publisher's."""
    ends = []
    servers = {name: agent.endpoint for name, agent in found.items()}
    for name, agent in found.items():
        if name == _PUBLISHER:
            continue
        sockets = Sockets("tcp", agent.folder, keys, lambda: None, q.LARGEST_QUESTION)
        stack.callback(sockets.close)
        known = {host: servers[host] for host in (_PUBLISHER, name)} if star else servers
        view = HostView(name, agent.folder, LOOPBACK, known, publishers=(_PUBLISHER,))
        memory = HostMemory(_ARENA, layout, Path(agent.folder), view, sockets)
        stack.callback(memory.close)
        ends.append(memory.weights("cpu", None))
    return ends
