"""Time of one update on several ranks beside the same maths with plain torch, and memory of each rank.

The update is that of `bench update`; with several ranks the plain one is `ranks_by_hand`: DDP beside replicate, FSDP2
beside shard. Both run in the same processes, by turns, with the same weights and trajectories, and end with the same
weights, which is checked. Memory is of a larger policy, in processes that do nothing else.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from polyrhythm_bench.harness import resources
from polyrhythm_bench.harness.worker import Answer, Worker

#: Largest ratio to plain torch that the design allows.
LIMIT_RATIO = 1.1
STRATEGIES = ("replicate", "shard")


def run(sizes: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Every case, number of ranks and strategy, `repeats` turns after one to warm up.

    Returns `within_limit`; in `modes` by "case, ranks, strategy": ours_ms, plain_ms (medians of the slowest rank),
    ratio (median over the turns), cpu_ratio (the same of the CPU time of all ranks, which other work on the machine
    changes less), difference (largest of a weight), others_cores (what else the machine did); in
    `memory` for each way and number of ranks the largest of any rank: base_mb (before there is a policy), uss_mb and
    pss_mb after an update, peak_mb; weights_mb.
    """
    modes = {}
    for case in ("mlp", "tiny_vla"):
        for size in sizes:
            for strategy in STRATEGIES if size > 1 else STRATEGIES[:1]:
                modes[f"{case}, {size}, {strategy}"] = measure(case, size, strategy, repeats)
    memory = [
        {"way": way, "ranks": size, "strategy": strategy, **measure_memory(way, size, strategy)}
        for size in sizes
        for strategy in (STRATEGIES if size > 1 else STRATEGIES[:1])
        for way in ("ours", "plain")
    ]
    return {
        "limit_ratio": LIMIT_RATIO,
        "within_limit": all(mode["ratio"] <= LIMIT_RATIO for mode in modes.values()),
        "memory": memory,
        "modes": modes,
    }


@contextmanager
def workers(case: str, size: int, strategy: str) -> Iterator[list[Worker]]:
    """A process for each rank."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = str(Path(folder) / "store")
        make = f"{__name__}:one_rank"
        yield [
            stack.enter_context(Worker(make, case=case, rank=rank, size=size, store=store, strategy=strategy))
            for rank in range(size)
        ]


def measure(case: str, size: int, strategy: str, repeats: int) -> dict[str, Any]:
    """One case, turn by turn."""
    turns: list[dict[str, float]] = []
    with workers(case, size, strategy) as ranks:
        for turn in range(repeats + 1):
            begin, seconds = resources.read_cpu(), {}
            for way in ("ours", "plain") if turn % 2 else ("plain", "ours"):
                found = _ask(ranks, way=way)
                seconds[way] = max(each["seconds"] for each in found)
                seconds[f"{way}_cpu"] = sum(each["cpu"] for each in found)
            seconds["others"] = resources.others_cores(begin, resources.read_cpu())
            turns.append(seconds)
        difference = max(_ask(ranks, way="difference"))
    turns = turns[1:]
    return {
        "ours_ms": 1e3 * statistics.median(turn["ours"] for turn in turns),
        "plain_ms": 1e3 * statistics.median(turn["plain"] for turn in turns),
        "ratio": statistics.median(turn["ours"] / turn["plain"] for turn in turns),
        "cpu_ratio": statistics.median(turn["ours_cpu"] / turn["plain_cpu"] for turn in turns),
        "difference": difference,
        "others_cores": statistics.median(turn["others"] for turn in turns),
    }


def measure_memory(way: str, size: int, strategy: str) -> dict[str, float]:
    """The largest of any rank, after an update."""
    with workers("large", size, strategy) as ranks:
        base = max(_ask(ranks, way="base"))
        _ask(ranks, way=way)
        found = _ask(ranks, way="memory")
    return {"base_mb": base, **{name: max(each[name] for each in found) for name in found[0]}}


def _ask(ranks: list[Worker], **question: Any) -> list[Any]:
    """The answers of all ranks, which work on it together."""
    for rank in ranks:
        rank.begin(**question)
    return [rank.answer() for rank in ranks]


@contextmanager
def one_rank(case: str, rank: int, size: int, store: str, strategy: str) -> Iterator[Answer]:
    """Answers to way = ours or plain with the seconds of an update and of its CPU time, base and memory with MB,
    difference with the largest difference of a weight between the two."""
    import torch

    from polyrhythm.policies.base import Policy, as_module
    from polyrhythm.training.ranks import Meeting, open_ranks
    from polyrhythm_bench.cases import update

    torch.set_num_threads(1)
    ranks = open_ranks(rank, size, Meeting(Path(store)), "cpu", strategy)  # type: ignore[arg-type]
    chosen = update.LARGE if case == "large" else update.CASES[case]
    trajectories: list[Any] = []
    ends: dict[str, Policy] = {}

    def make(way: str, policy: Policy) -> update.Update:
        if way == "ours":
            return update.ours(policy, chosen, ranks=ranks)
        if size == 1:
            return update.by_hand(policy, chosen)
        from polyrhythm_bench.cases import ranks_by_hand

        return ranks_by_hand.by_hand(policy, chosen, strategy)

    def answer(way: str) -> Any:
        if way == "base":
            return psutil.Process().memory_full_info().uss / 1e6
        if way == "memory":
            return _memory() | {"weights_mb": sum(p.nbytes for p in _parts(ends)) / 1e6}
        if way == "difference":
            states = [ranks.snapshot(as_module(ends[name]).state_dict()) for name in ("ours", "plain")]
            pairs = zip(*states, strict=True)
            return max(float((a - b).abs().max()) for (_, a), (_, b) in pairs)
        trajectories[:] = trajectories or update.collect(chosen)
        ends.pop(way, None)
        policy = chosen.policy.build(chosen.spec, seed=0, device="cpu", role="train")
        ends[way] = policy
        done = make(way, policy)
        ranks.total(torch.zeros(1))  # nobody begins before all are ready
        begin, cpu = time.perf_counter(), time.process_time()
        done(trajectories)
        return {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - cpu}

    def _parts(policies: dict[str, Any]) -> Iterator[Any]:
        return (ranks.part(p.detach()) for policy in policies.values() for p in policy.parameters())

    yield answer
    ranks.close()


def _memory() -> dict[str, float]:
    """Of this process: its own pages and its share of all, without what the allocator keeps of freed ones; the most
    that was ever resident."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    found = psutil.Process().memory_full_info()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return {"uss_mb": found.uss / 1e6, "pss_mb": found.pss / 1e6, "peak_mb": peak / 1e3}
