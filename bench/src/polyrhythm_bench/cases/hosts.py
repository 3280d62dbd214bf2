"""What crosses between hosts, beside bare tcp and Ray's object store on the same link; the conductor of 3 nodes.

The link is a pair of virtual Ethernet devices between this machine and a network namespace, shaped by tc or as fast as
it is. The other end is a host of a run: its agent serves an arena with requests and finished samples, and published
weights. This end fetches them as a generator and a trainer do.

| fetched | ours | bare | Ray |
|---|---|---|---|
| observation | as a generator gathers a batch | 8 bytes, then the answer | an actor returns it |
| samples | together, as a trainer before an update | one after the other | references of one `ray.get` |
| weights | a version into this host's memory and a model | received, copied into a model | one reference |

Ours is encrypted and authenticated, the others are not.

`conductor`: `bench ceiling` with the env batches on 3 hosts that are apart by their memories, over the loopback
interface.
"""

from __future__ import annotations

import gc
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from polyrhythm.errors import RunHalted
from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.agent import AgentSpec, LocalNode
from polyrhythm.plugins.cluster.hosts.memory import HostMemory, segment_sizes
from polyrhythm.runtime.hosts import HostView
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout, RequestView
from polyrhythm.runtime.memory.process_memory import ARENA, WEIGHTS
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder, open_segment, shared_root
from polyrhythm.runtime.memory.tensors import copy_into, tensors_over
from polyrhythm.runtime.memory.weights import SharedWeights
from polyrhythm.runtime.messages import ACTIONS, LOGPROB, VALUE
from polyrhythm.runtime.transport.authentication import make_keys
from polyrhythm.runtime.transport.sockets import Sockets
from polyrhythm.specs import ArraySpec
from polyrhythm_bench.cases import ceiling
from polyrhythm_bench.harness.link import Link, open_link
from polyrhythm_bench.harness.main_process import MainProcessTimer, Window
from polyrhythm_bench.harness.raw_tcp import RawEnd, raw_end
from polyrhythm_bench.harness.running import running
from polyrhythm_bench.harness.worker import Worker
from polyrhythm_bench.workloads.linear_model import layout_of, linear_model

log = logging.getLogger(__name__)

#: Rates of the link: of tc; "" as fast as it is.
RATES = ("1gbit", "")
#: The aims: our time over the bare one; Ray's time for an observation over ours.
MOST_OF_BARE, LEAST_OF_RAY = 1.3, 5.0
_THERE, _HERE = "host-1", "main"
_ROWS, _STEPS, _SAMPLES = 8, 15, 6
_IMAGE = ArraySpec((256, 256, 3), "uint8")
_SLOT = "simulator-0/0/0"
_LAYOUT = ArenaLayout(
    blocks=_SAMPLES,
    steps=_STEPS,
    chunk=1,
    obs={"image": _IMAGE, "wrist": _IMAGE},
    answers={
        ACTIONS: ArraySpec((1, 7), "float32"),
        LOGPROB: ArraySpec((1,), "float32"),
        VALUE: ArraySpec((1,), "float32"),
    },
    slots={_SLOT: _ROWS},
)
_ROW_BYTES = sum(spec.nbytes for spec in _LAYOUT.obs.values())
_SAMPLE_BYTES = _ROW_BYTES * (_STEPS + 1)
#: Fetches of an observation in one turn.
_FETCHES = 20
Times = dict[str, list[float]]


def run(
    repeats: int = 5,
    megabytes: int = 100,
    rates: Sequence[str] = RATES,
    env_batches: Sequence[int] = (10, 100, 1000),
    seconds: float = 5.0,
    ray: Path | None = None,
) -> dict[str, Any]:
    """Measure each rate of the link in `repeats` interleaved turns, then the conductor with so many env batches a node.

    ray: a Python that has Ray; without one Ray's columns are missing, and `ray` says so. Returns `links`, one entry for
    each rate and thing that is fetched: our median, `of_bare` and `ray_of_ours` (medians of the turns' ratios),
    `samples_per_s`; `conductor`, one entry for each number of env batches (see `ceiling.summarise`); `within_limit`.
    """
    links = [entry for rate in rates for entry in measure_link(rate, repeats, megabytes, ray)]
    found = [summarise_nodes(count, seconds, 2) for count in env_batches]
    observed = [entry for entry in links if entry["what"].startswith("observation")]
    return {
        "limit_of_bare": MOST_OF_BARE,
        "limit_ray_of_ours": LEAST_OF_RAY,
        "within_limit": {
            "of_bare": all(entry["of_bare"] <= MOST_OF_BARE for entry in links),
            "ray_of_ours": all(entry.get("ray_of_ours", 0.0) >= LEAST_OF_RAY for entry in observed) if ray else None,
        },
        "ray": str(ray.name) if ray else "not measured: no Python with Ray was named (--ray)",
        "links": links,
        "conductor": found,
    }


# ---------------------------------------------------------------- the link


def measure_link(rate: str, repeats: int, megabytes: int, ray: Path | None) -> list[dict[str, Any]]:
    """One entry for each thing that is fetched over a link of this rate."""
    with ExitStack() as stack:
        link = stack.enter_context(open_link(rate))
        ours = stack.enter_context(far_host(link, megabytes))
        raw = stack.enter_context(raw_end(link.there, link.prefix, max(ours.weights_bytes, _SAMPLE_BYTES)))
        asked = ray_end(link, ray, stack) if ray else None
        turns: list[tuple[str, Times]] = []
        for turn in range(repeats + 1):
            for what, nbytes, count, act in ours.fetches(turn):
                times = {"ours": [_elapsed(act) for _ in range(count)]}
                times["bare"] = [_elapsed(ours.bare(raw, what, nbytes)) for _ in range(count)]
                if asked is not None:
                    times["ray"] = _ray(asked, what, nbytes, count)
                if turn:
                    turns.append((what, times))
            log.info("%s: turn %d", link.name, turn)
        return [_entry(link, what, [times for name, times in turns if name == what]) for what in ours.names]


def _entry(link: Link, what: str, turns: Sequence[Times]) -> dict[str, Any]:
    middle = [{name: median(times) for name, times in turn.items()} for turn in turns]
    entry: dict[str, Any] = {
        "link": link.name,
        "what": what,
        "ms": 1e3 * median(turn["ours"] for turn in middle),
        "bare_ms": 1e3 * median(turn["bare"] for turn in middle),
        "of_bare": median(turn["ours"] / turn["bare"] for turn in middle),
    }
    if "ray" in middle[0]:
        entry["ray_ms"] = 1e3 * median(turn["ray"] for turn in middle)
        entry["ray_of_ours"] = median(turn["ray"] / turn["ours"] for turn in middle)
    if what == "samples":
        entry |= {"samples_per_s": _SAMPLES / entry["ms"] * 1e3, "sample_mb": _SAMPLE_BYTES * 1e-6}
    return entry


def _ray(asked: Worker, what: str, nbytes: int, count: int) -> list[float]:
    """Seconds of Ray's fetches."""
    if what == "samples":
        found: list[float] = asked.ask(nbytes=nbytes // _SAMPLES, count=_SAMPLES, many=True)
    elif what == "weights":
        found = asked.ask(nbytes=nbytes, count=1, many=True)
    else:
        found = asked.ask(nbytes=nbytes, count=count)
    return found


def ray_end(link: Link, python: Path, stack: ExitStack) -> Worker | None:
    """A cluster of two Ray nodes at the ends of the link, ready to be asked; None, with the reason in the log, if there
    is no link of two ends, or Ray does not start here."""
    if not link.prefix:
        log.warning("without Ray: its two nodes need two addresses, and the link is %s", link.name)
        return None
    make = "polyrhythm_bench.harness.ray_end:asker"
    worker = stack.enter_context(
        Worker(make, python=python, here=link.here, there=link.there, prefix=list(link.prefix))
    )
    try:
        worker.ask(nbytes=8, count=1)
    except RunHalted as error:
        log.warning("without Ray: %s", error)
        return None
    return worker


class FarHost:
    """The other end's host as a process of this end sees it."""

    names = ("observation, 1 row", "observation, 8 rows", "samples", "weights")

    def __init__(self, arena: Arena, published: SharedWeights, receiver: Receiver, state: dict[str, Any]) -> None:
        self._arena, self._published, self._receiver, self._state = arena, published, receiver, state
        self._batch = {name: np.empty((_ROWS, *spec.shape), spec.dtype) for name, spec in _LAYOUT.obs.items()}
        self.weights_bytes = published.layout.nbytes

    def fetches(self, turn: int) -> Iterator[tuple[str, int, int, Callable[[], object]]]:
        """Of a turn: what, bytes, how many times, and the fetch."""
        yield self.names[0], _ROW_BYTES, _FETCHES, lambda: self._observe(1)
        yield self.names[1], _ROWS * _ROW_BYTES, _FETCHES // 2, lambda: self._observe(_ROWS)
        yield self.names[2], _SAMPLES * _SAMPLE_BYTES, 1, self._samples
        self._published.publish(turn, self._state)
        yield self.names[3], self.weights_bytes, 1, lambda: self._receiver.apply(turn)

    def bare(self, raw: RawEnd, what: str, nbytes: int) -> Callable[[], None]:
        """The same over the bare socket."""

        def samples() -> None:
            for _ in range(_SAMPLES):
                raw.fetch(_SAMPLE_BYTES)

        if what == "samples":
            return samples
        if what != "weights":
            return lambda: raw.fetch(nbytes)

        def weights() -> None:
            raw.fetch(nbytes)
            copy_into(self._state, tensors_over(self._published.layout, raw.room[:nbytes]))

        return weights

    def _observe(self, rows: int) -> None:
        """As `stations.generator` gathers a batch."""
        self._arena.fetch_requests([(_SLOT, rows)])
        seen = self._arena.view(_SLOT, rows).obs
        assert seen is not None
        for name, array in seen.items():
            self._batch[name][:rows] = array

    def _samples(self) -> None:
        self._arena.fetch([f"{_THERE}/{block}" for block in range(_SAMPLES)])


@contextmanager
def far_host(link: Link, megabytes: int) -> Iterator[FarHost]:
    """A host at the other end with a request, finished samples and published weights, and this end's memory."""
    model = linear_model(megabytes)
    state = dict(model.state_dict())
    layout, keys = layout_of(state), make_keys()
    with ExitStack() as stack:
        # Both ends are on this machine: what the other host holds is written into its memory from here.
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=shared_root())))
        node = LocalNode("there", link.there, link.prefix, {"POLYRHYTHM_SHARED_MEMORY": str(root)})
        stack.callback(node.close)
        spec = AgentSpec(_THERE, (), "", _LAYOUT, layout, (_THERE,), link.there, keys)
        found = node.start_agent(spec)()
        far = Path(found.folder)
        _fill(Arena(_LAYOUT, memoryview(open_segment(far, ARENA))))
        published = SharedWeights(layout, memoryview(open_segment(far, WEIGHTS)), far)
        memory = SharedRunFolder(segment_sizes(_LAYOUT, layout, _HERE, (_THERE,)))
        stack.callback(memory.remove)
        sockets = Sockets("tcp", str(memory.folder), keys, lambda: None, q.LARGEST_QUESTION)
        stack.callback(sockets.close)
        near = LocalNode("here", link.here)
        stack.callback(near.close)
        spec = AgentSpec(_HERE, (), str(memory.folder), _LAYOUT, layout, (_THERE,), link.here, keys)
        servers, slots = {_THERE: found.endpoint, _HERE: near.start_agent(spec)().endpoint}, {_SLOT: _THERE}
        view = HostView(_HERE, str(memory.folder), link.here, servers, slots, (_THERE,))
        host = HostMemory(_LAYOUT, layout, memory.folder, view, sockets)
        stack.callback(host.close)
        yield FarHost(host.arena(), published, Receiver(host.weights("cpu", None), model), state)


def _fill(arena: Arena) -> None:
    """A posted request of all rows, and a finished sample in each block."""
    random = np.random.default_rng(0)
    for array in arena.obs.values():
        array[:] = random.integers(0, 256, array.shape, np.uint8)
    entries = np.arange(_ROWS, dtype=np.int64)
    arena.post(_SLOT, RequestView(entries, entries, np.zeros(_ROWS, bool)))
    for block in range(_SAMPLES):
        arena.head[block] = 0
        arena.head[block, 0] = _STEPS


def _elapsed(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


# ---------------------------------------------------------------- the conductor

_NODES = 3


def summarise_nodes(env_batches: int, seconds: float, repeats: int) -> dict[str, Any]:
    """One entry: so many env batches on each of 3 nodes, a simulator process on each."""
    windows = [measure_nodes(env_batches, seconds, turn) for turn in range(repeats)]
    return {"nodes": _NODES, "per_node": env_batches, **ceiling.summarise((_NODES * env_batches, _NODES), windows, "")}


def measure_nodes(env_batches: int, seconds: float, seed: int) -> Window:
    """One turn: generator and trainer are on the first node. RunHalted: a station was lost."""
    gc.collect()
    with tempfile.TemporaryDirectory(dir=shared_root()) as root:
        nodes = []
        for number in range(_NODES):
            own = Path(root, str(number))
            own.mkdir()
            nodes.append(LocalNode(f"node-{number}", environment={"POLYRHYTHM_SHARED_MEMORY": str(own)}))
        places = [*nodes, nodes[0], nodes[0]]
        config = ceiling.config(_NODES * env_batches, _NODES, seed)
        with running(config, validated=False, nodes=places) as pipeline:
            return MainProcessTimer(pipeline, 4 * _NODES * env_batches, seconds).measure()
