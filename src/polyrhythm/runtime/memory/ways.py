"""Which way published weights take from the trainer to a generator: decided from where the two live, nothing else.

    reference   within one process: the publication itself, which is a copy
    host        through the memory that the host's processes share; for a generator on a device, then through pinned
                memory
    ipc         from the trainer's device memory, which a generator on the same device has opened (CUDA IPC)
    peer        the same memory, copied by a generator on another device that can read it (NVLink or PCIe)
    tcp         from the trainer's host to the generator's, once for each host, then through its shared memory

Pure, without torch: every process of a run decides for itself, and all of them alike.
docs/design/memory-and-devices.md says why no way is a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Way = Literal["reference", "host", "ipc", "peer", "tcp"]
CPU = "cpu"

#: Whether the first device (cuda:N) can read the memory of the second.
Reaches = Callable[[str, str], bool]


class Choice(NamedTuple):
    """The way of versions to one generator. why: a clause for the log."""

    way: Way
    why: str


@dataclass(frozen=True, slots=True)
class Ends:
    """Where weights are published and where they are used, as devices (cpu or cuda:N).

    trainer: of its first rank, which publishes; cpu where main does. generators: of all of them. host_only: why the
    trainer keeps no whole version on its device, a clause; "" if it may.
    """

    trainer: str = CPU
    generators: tuple[str, ...] = ()
    host_only: str = ""


ONE_PROCESS = Choice("reference", "trainer and generator are in one process")


def choose_way(ends: Ends, generator: str, reaches: Reaches) -> Choice:
    """The way to a generator on this device, in a process of its own on the trainer's host.

    Example: trainer on cuda:0, generator on cuda:1, which can read cuda:0: peer.
    """
    trainer = ends.trainer
    if generator == CPU:
        return Choice("host", "the generator is on the CPU")
    if trainer == CPU:
        return Choice("host", "weights are published by a process on the CPU")
    if ends.host_only:
        return Choice("host", ends.host_only)
    if generator == trainer:
        return Choice("ipc", f"trainer and generator are on {trainer}")
    if reaches(generator, trainer):
        return Choice("peer", f"{generator} can read the memory of {trainer}")
    return Choice("host", f"{generator} cannot read the memory of {trainer}")


def keeps_copy(ends: Ends, reaches: Reaches) -> bool:
    """Whether the trainer keeps the newest version on its device, because a generator takes it from there."""
    return any(choose_way(ends, device, reaches).way in ("ipc", "peer") for device in ends.generators)
