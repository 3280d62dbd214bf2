"""Time of a version of the weights from one process to another, by every way that this machine has, beside bare copies.

A way: this process publishes a model, tensor by tensor or from a state_dict, another applies it, each timed where it
happens. Bare: the same bytes copied by torch into the same kind of memory here, and out of it there. Both take turns,
after one turn that touches all pages. The way that a run would take between the same two places is what is measured
(`runtime.memory.published`).

What crosses between hosts is measured by the clock beside a bare tcp connection (`weights_tcp`), and over a tree of
several hosts beside a star (`weights_tree`). Ranks of a sharded trainer publish in processes of their own
(`weights_shards`). Simulated devices show the order of copies of ways between devices, not their speed.

A collective (gloo, or NCCL between two devices) is measured for comparison only: no run uses one
(docs/design/memory-and-devices.md).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from polyrhythm.runtime.devices import CPU
from polyrhythm.runtime.memory.device_weights import can_reach
from polyrhythm.runtime.memory.process_memory import open_weights
from polyrhythm.runtime.memory.published import Ends, shared_nbytes
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.memory.tensors import copy_into, tensors_over, views_of
from polyrhythm.runtime.memory.weights import InlineWeights, Weights
from polyrhythm_bench.cases.weights_collective import measure_collective
from polyrhythm_bench.cases.weights_shards import RANKS, open_trainer, publish
from polyrhythm_bench.cases.weights_tcp import measure_tcp
from polyrhythm_bench.cases.weights_tree import HOSTS, measure_tree
from polyrhythm_bench.harness import resources
from polyrhythm_bench.harness.kept import KeptResults
from polyrhythm_bench.harness.worker import Worker
from polyrhythm_bench.workloads.linear_model import layout_of, linear_model, medians, seconds, torch_name

#: Largest ratio to the bare copies that the design allows.
LIMIT_RATIO = 1.3
#: Megabytes at most of the versions that go to several hosts, each of which has three of them in memory.
_MOST_OF_TREE = 100
#: Rows of the passes that an interruption of serving is compared with, and how many are timed before a publication.
ROWS, PASSES = (8, 64), 5


class Case(NamedTuple):
    """Where the two ends are, as devices of a run. streamed: published tensor by tensor."""

    trainer: str = CPU
    generator: str = CPU
    streamed: bool = False

    @property
    def ends(self) -> Ends:
        return Ends(self.trainer, (self.generator,))


def run(megabytes: int = 500, repeats: int = 7, out: Path | None = None) -> dict[str, Any]:
    """Publish and apply a model of this size in float32 `repeats` times by each way. out: folder in which each result
    is kept when it is there, and not measured again.

    Returns modes: by way what `medians` returns; serving: see `_serve`; trees: see `measure_tree`; left_out: ways that
    this machine does not have, a sentence each; ratio and within_limit: of shared memory, tensor by tensor.
    """
    began = resources.read_cpu()
    cases, left_out = _cases()
    kept = KeptResults(out, {"megabytes": megabytes, "repeats": repeats, **_identity()})
    ways: dict[str, Callable[[], dict[str, Any]]] = {"inline": partial(_measure_inline, megabytes, repeats)}
    ways |= {name: partial(_measure, case, megabytes, repeats) for name, case in cases.items()}
    for ranks in RANKS:
        ways[f"shards, {ranks} ranks"] = partial(_measure_shards, ranks, megabytes, repeats)
    ways[f"gathered from {RANKS[0]} ranks"] = partial(_measure_shards, RANKS[0], megabytes, repeats, gathers=True)
    for name, devices in _collectives().items():
        ways[name] = partial(measure_collective, name.split()[0], devices, megabytes, repeats)
    ways["tcp between hosts"] = partial(measure_tcp, megabytes, repeats)
    ways["pair between hosts, simulated"] = partial(measure_tcp, megabytes, repeats, pair=True)
    modes = {name: kept.get(name, measure) for name, measure in ways.items()}
    serving = kept.get("serving", partial(_serve, megabytes, repeats))
    tree = partial(measure_tree, megabytes=min(megabytes, _MOST_OF_TREE), repeats=repeats)
    trees = [kept.get(f"tree of {hosts} hosts", partial(tree, hosts)) for hosts in HOSTS]
    ratio = modes["shared memory, streamed"]["ratio"]
    return {
        "megabytes": megabytes,
        "mb": layout_of(linear_model(megabytes).state_dict()).nbytes / 1e6,
        "repeats": repeats,
        **_identity(),
        "others_cores": resources.others_cores(began, resources.read_cpu()),
        "ratio": ratio,
        "limit_ratio": LIMIT_RATIO,
        "within_limit": ratio <= LIMIT_RATIO,
        "modes": modes,
        "serving": serving,
        "trees": trees,
        "tree_megabytes": min(megabytes, _MOST_OF_TREE),
        "left_out": left_out,
    }


def _identity() -> dict[str, Any]:
    """What measured."""
    return {
        "cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _cases() -> tuple[dict[str, Case], list[str]]:
    """The ways between processes that this machine has, and a sentence for each that it has not."""
    found = {
        "shared memory": Case(),
        "shared memory, streamed": Case(streamed=True),
        "CUDA IPC, simulated": Case("sim:0", "sim:0"),
        "device to device, simulated": Case("sim:0", "sim:1"),
    }
    left_out: list[str] = []
    count = torch.cuda.device_count()
    if not count:
        left_out.append("CUDA IPC, device to device, pinned host memory, NCCL: torch sees no CUDA device here")
        return found, left_out
    found["CUDA IPC, one device"] = Case("cuda:0", "cuda:0")
    found["shared and pinned memory, to a device"] = Case(CPU, "cuda:0")
    if count == 1:
        left_out.append("device to device, NCCL: torch sees one CUDA device here")
    elif can_reach("cuda:1", "cuda:0"):
        found["device to device"] = Case("cuda:0", "cuda:1")
    else:
        found["shared and pinned memory, between devices"] = Case("cuda:0", "cuda:1")
        left_out.append("device to device: cuda:1 cannot read the memory of cuda:0")
    return found, left_out


def _collectives() -> dict[str, tuple[str, str]]:
    found = {"gloo broadcast": (CPU, CPU)}
    return found | ({"nccl broadcast": ("cuda:0", "cuda:1")} if torch.cuda.device_count() > 1 else {})


def _measure_inline(megabytes: int, repeats: int) -> dict[str, Any]:
    state, module = linear_model(megabytes).state_dict(), linear_model(megabytes)
    weights = InlineWeights(layout_of(state))
    receiver = Receiver(weights, module)
    between = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    turns = []
    for version in range(repeats + 1):
        publish = seconds(lambda v=version: weights.publish(v, state))  # type: ignore[misc]
        apply = seconds(lambda v=version: receiver.apply(v))  # type: ignore[misc]
        write = seconds(lambda: copy_into(between, state))
        turns.append((publish, apply, write + seconds(lambda: copy_into(module.state_dict(), between))))
    return medians(turns[1:], weights.layout.nbytes, next(iter(receiver.traffic.moved)))


def _measure(case: Case, megabytes: int, repeats: int) -> dict[str, Any]:
    device = torch_name(case.trainer)
    with _writer(case, megabytes) as (weights, state, bare), _reader(case, megabytes, bare[0]) as reader:
        turns, used = [], ""
        for version in range(repeats + 1):
            given = (item for item in state.items()) if case.streamed else state
            sent = seconds(lambda v=version, s=given: weights.publish(v, s), device)  # type: ignore[misc]
            apply, used = reader.ask(version=version)
            write = seconds(lambda: copy_into(bare[1], state), device)
            turns.append((sent, apply, write + reader.ask(bare=True)))
        return medians(turns[1:], weights.layout.nbytes, used)


def _measure_shards(ranks: int, megabytes: int, repeats: int, *, gathers: bool = False) -> dict[str, Any]:
    """Published by the ranks of a sharded trainer. gathers: rank 0 publishes what it gathers."""
    with (
        _writer(Case(), megabytes) as (weights, state, bare),
        _reader(Case(), megabytes, bare[0]) as reader,
        open_trainer(bare[0], ranks, megabytes, gathers=gathers) as workers,
    ):
        turns = []
        for version in range(repeats + 1):
            sent = publish(workers, version)
            apply, _ = reader.ask(version=version)
            write = seconds(lambda: copy_into(bare[1], state))
            turns.append((sent, apply, write + reader.ask(bare=True)))
        return medians(turns[1:], weights.layout.nbytes, "host")


def _serve(megabytes: int, repeats: int) -> dict[str, Any]:
    """What a generator on the CPU does while versions come over shared memory, tensor by tensor: medians of pass_ms
    (`ROWS` through the same model), pass_while_published_ms (of the fewest), pause_ms (it applies, and serves nothing);
    pause_ratio: the pause over a pass, slowed: passes while a version is published over those before, turn by turn."""
    case, turns, least = Case(streamed=True), [], ROWS[0]
    with _writer(case, megabytes) as (weights, state, bare), _reader(case, megabytes, bare[0]) as reader:
        for version in range(repeats + 1):
            before = [statistics.median(reader.ask(rows=rows) for _ in range(PASSES)) for rows in ROWS]
            reader.begin(serve=version, rows=least)
            weights.publish(version, iter(state.items()))
            during, pause = reader.answer()
            turns.append((before, statistics.median(during), pause))
    turns = turns[1:]
    by_rows = {rows: [before[index] for before, _, _ in turns] for index, rows in enumerate(ROWS)}
    pauses = [pause for _, _, pause in turns]
    return {
        "pass_ms": {f"{rows} rows": 1e3 * statistics.median(times) for rows, times in by_rows.items()},
        "pass_while_published_ms": 1e3 * statistics.median(during for _, during, _ in turns),
        "pause_ms": 1e3 * statistics.median(pauses),
        "pause_ratio": {
            f"{rows} rows": statistics.median(p / t for p, t in zip(pauses, times, strict=True))
            for rows, times in by_rows.items()
        },
        "slowed": statistics.median(during / before[0] for before, during, _ in turns),
    }


@contextmanager
def _writer(case: Case, megabytes: int) -> Iterator[tuple[Weights, dict[str, Any], tuple[str, dict[str, Any]]]]:
    """This process's end of the channel, what it publishes, and the run's folder with tensors for bare copies."""
    device = torch_name(case.trainer)
    state = linear_model(megabytes).to(device).state_dict()
    layout = layout_of(state)
    memory = SharedRunFolder({"weights": shared_nbytes(layout), "bare": layout.nbytes})
    try:
        channel = memoryview(memory.segment("weights"))
        weights = open_weights(layout, channel, memory.folder, case.trainer, case.ends)
        if device == CPU:
            bare = tensors_over(layout, memoryview(memory.segment("bare")))
        else:
            bare = views_of(layout, torch.empty(layout.nbytes, dtype=torch.uint8, device=device))
        yield weights, state, (str(memory.folder), bare)
        del weights, bare, channel
    finally:
        memory.remove()


def _reader(case: Case, megabytes: int, folder: str) -> Worker:
    return Worker(
        "polyrhythm_bench.cases.weights_reader:reader",
        folder=folder,
        megabytes=megabytes,
        trainer=case.trainer,
        device=case.generator,
    )
