"""A version of the weights from the ranks of a sharded trainer (gloo): each writes its rows into the host's memory, or,
as where they lie on several hosts, rank 0 publishes tensor by tensor what it gathers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from polyrhythm.config.sections.placement import ShardSettings
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.runtime.memory.weights import SharedWeights
from polyrhythm.training.ranks import Meeting, open_ranks
from polyrhythm_bench.harness.worker import Answer, Worker
from polyrhythm_bench.workloads.linear_model import layout_of, linear_model, seconds

#: Ranks that are measured.
RANKS = (2, 4)


@contextmanager
def open_trainer(folder: str, ranks: int, megabytes: int, *, gathers: bool) -> Iterator[list[Worker]]:
    """The ranks; each publishes a `version` when it is asked to, and answers with the seconds that it took."""
    with ExitStack() as stack:
        store = str(Path(folder, f"ranks-{ranks}-{gathers}"))
        make = partial(
            Worker, f"{__name__}:rank", folder=folder, store=store, ranks=ranks, megabytes=megabytes, gathers=gathers
        )
        yield [stack.enter_context(make(rank=number)) for number in range(ranks)]


def publish(workers: list[Worker], version: int) -> float:
    """Publish by all of them; the seconds of the one that took longest."""
    for worker in workers:
        worker.begin(version=version)
    return max(float(worker.answer()) for worker in workers)


@contextmanager
def rank(rank: int, ranks: int, folder: str, store: str, megabytes: int, *, gathers: bool) -> Iterator[Answer]:
    joined = open_ranks(rank, ranks, Meeting(Path(store)), "cpu", "shard", ShardSettings())
    mesh = init_device_mesh("cpu", (ranks,))
    whole = linear_model(megabytes).state_dict()
    layout = layout_of(whole)
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    del whole
    weights = SharedWeights(layout, memoryview(open_segment(Path(folder), "weights")), Path(folder))
    together = joined.divide_writing(state, "elsewhere" if gathers and rank else "here")
    assert together is not gathers

    def send(version: int) -> None:
        if together:
            weights.publish_pieces(version, joined.pieces(state), joined.totals_beside, leads=rank == 0)
        elif rank == 0:
            weights.publish(version, joined.snapshot(state))
        else:
            for _ in joined.snapshot(state):
                pass

    def answer(version: int) -> float:
        return seconds(lambda: send(version))

    yield answer
    joined.close()
