"""What a workflow's channels and calls cost on this machine: `python bench/scripts/workflow_rate.py`.

Two workers in processes of their own, one channel between them; beside it a bare write of the same bytes to a file in
shared memory, which every item of this size needs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from polyrhythm.plugins.workflow import Channel, Worker, Workflow
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder

SMALL, LARGE, TURNS = 2000, 40, 5
LARGE_BYTES = 8 * 2**20


class Source(Worker):
    def put(self, channel: Channel, count: int, nbytes: int) -> None:
        item = np.zeros(nbytes, np.uint8)
        for _ in range(count):
            channel.put(item)

    def nothing(self) -> None: ...


class Sink(Worker):
    def get(self, channel: Channel, count: int) -> int:
        """Get so many items and read all of each."""
        return sum(int(channel.get().max()) for _ in range(count))


def main() -> None:
    with Workflow("local") as work:
        source, sink = work.group("source", Source), work.group("sink", Sink)
        channel = work.channel("items", 8)

        def pipe(count: int, nbytes: int) -> None:
            source.put(channel, count, nbytes)
            sink.get(channel, count).wait()

        pipe(SMALL // 10, 100)
        call = median(lambda: [source.nothing().wait() for _ in range(200)]) / 200
        small = median(lambda: pipe(SMALL, 100)) / SMALL
        large = median(lambda: pipe(LARGE, LARGE_BYTES)) / LARGE
    print("| | |\n|---|---|")
    print(f"| a call that does nothing, and its result | {call * 1e6:,.0f} us |")
    print(f"| an item of 100 bytes from worker to worker | {small * 1e6:,.0f} us |")
    print(f"| an item of {LARGE_BYTES / 2**20:.0f} MiB, read by its receiver | {large * 1e3:.2f} ms |")
    print(f"| a bare write of as many bytes to shared memory | {median(bare) / LARGE * 1e3:.2f} ms |")


def bare() -> None:
    """Write the bytes of `LARGE` items, each to a file of its own, and remove it."""
    item, folder = np.zeros(LARGE_BYTES, np.uint8), SharedRunFolder({})
    try:
        for _ in range(LARGE):
            path = Path(folder.folder) / "item"
            path.write_bytes(item.data)
            path.unlink()
    finally:
        folder.remove()


def median(turn: Callable[[], object]) -> float:
    """Seconds of a turn."""
    seconds = []
    for _ in range(TURNS):
        begin = time.perf_counter()
        turn()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
