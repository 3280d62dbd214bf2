"""Workers for tests, importable by their processes."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

from polyrhythm.plugins.workflow import Channel, Worker


class Echo(Worker):
    """Does what each test needs of one worker."""

    def __init__(
        self, base: int = 0, *, raises: bool = False, dies: bool = False, sleeps: float = 0.0, fails: str = ""
    ) -> None:
        if raises:
            raise ValueError("told to raise")
        if dies:
            self.die()
        time.sleep(sleeps)
        self.base, self._fails = base + self.rank, fails

    def offload(self) -> int:
        if self._fails == "offload":
            raise RuntimeError("the arm is in the way")
        return super().offload()

    def onload(self) -> None:
        if self._fails == "onload":
            raise RuntimeError("the arm is in the way")
        super().onload()

    def where(self) -> tuple[str, int, int, str]:
        return self.group, self.rank, self.size, self.device

    def add(self, value: Any, more: int = 0) -> Any:
        with self.timer("adding"):
            return value + self.base + more

    def spend(self, seconds: float) -> None:
        """Of rank 0 nothing, of rank 1 once as much, ..."""
        with self.timer("slept"):
            time.sleep(seconds * self.rank)

    def fail(self) -> None:
        raise RuntimeError("the gripper is stuck")

    def unsendable(self) -> Any:
        return object()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def take(self, channel: Channel, timeout_s: float | None = None) -> Any:
        return channel.get(timeout_s=timeout_s)

    def take_batch(self, channel: Channel, items: int) -> int:
        """The sum of the first numbers of so many arrays."""
        return sum(int(array[0]) for array in channel.get_batch(items))

    def give(self, channel: Channel, count: int, timeout_s: float | None = None) -> int:
        for number in range(count):
            channel.put(number, timeout_s=timeout_s)
        return count

    def ring(self, size: int) -> bool:
        """Send an array around the ring; whether it came back with every rank's mark."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if self.rank == 0:
            self.send({"marks": np.zeros(size), "to": [after]}, after)
        found = self.recv(before)
        found["marks"] += 1  # what comes may be written to
        if self.rank:
            self.send({"marks": found["marks"], "to": [after]}, after)
        return bool((found["marks"] == (self.size if not self.rank else self.rank)).all())

    def ring_async(self, size: int, rounds: int) -> list[float]:
        """All ranks receive and send at once, several times; what came, in order."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        coming = [self.recv_async(before) for _ in range(rounds)]
        for number in range(rounds):
            self.send_async(np.full(size, 10.0 * self.rank + number), after)
        while not coming[0].done:
            pass
        return [float(pending.wait()[0]) for pending in coming]

    def take_both(self, first: Channel, second: Channel) -> tuple[Any, Any]:
        """Asks both at once, and waits for the second before the first."""
        one, other = first.get_async(), second.get_async()
        found = other.wait()
        assert other.wait() == found, "waited for once more"
        return one.wait(), found

    def begin(self, channel: Channel) -> None:
        self.begun = channel.get_async()

    def finish(self) -> Any:
        return self.begun.wait()

    def give_async(self, channel: Channel, count: int, timeout_s: float | None = None) -> int:
        """Puts that it does not wait for."""
        for number in range(count):
            channel.put_async(number, timeout_s=timeout_s)
        return count

    def spread(self, size: int) -> tuple[float, float]:
        """Broadcast from the last rank, then from the first, and change what came in every rank."""
        sums = []
        for source in (self.size - 1, 0):
            found = self.broadcast(np.full(size, self.rank + 1.0) if self.rank == source else None, source)
            if self.rank != source:
                found[:] *= 1 + self.rank
            sums.append(float(found.sum()))
        return sums[0], sums[1]

    def lock_and_take(self, items: Channel, timeout_s: float | None = None) -> Any:
        with self.device_lock():
            return items.get(timeout_s=timeout_s)

    def send_large(self, rank: int) -> None:
        self.send(np.ones(100_000), rank)

    def recv_large(self, rank: int) -> float:
        return float(self.recv(rank).sum())

    def poll(self, items: Channel) -> Any:
        pending = items.get_async()
        while not pending.done:
            pass
        return pending.wait()

    def ask_elsewhere(self, rank: int, group: str | None = None) -> None:
        self.recv(rank, group)


class Producer(Worker):
    def produce(self, out: Channel, count: int, size: int) -> float:
        """Put `count` nested items of `size` numbers each; their sum."""
        total, random = 0.0, np.random.default_rng(self.rank)
        for number in range(count):
            numbers = random.random(size)
            out.put({"from": (self.rank, number), "parts": [numbers, numbers[: size // 2]]}, weight=size)
            total += numbers.sum()
        out.close()
        return float(total)


class Consumer(Worker):
    def consume(self, items: Channel) -> tuple[float, list[tuple[int, int]]]:
        """The sum of all items that came, and whose they were."""
        total, seen = 0.0, []
        for item in items:
            numbers, half = item["parts"]
            assert np.array_equal(half, numbers[: len(numbers) // 2])
            total += numbers.sum()
            seen.append(item["from"])
        return float(total), seen


class Deadlocked(Worker):
    def wait(self, own: Channel, other: Channel) -> None:
        other.put(own.get())
