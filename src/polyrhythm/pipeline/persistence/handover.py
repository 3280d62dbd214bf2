"""Finished samples on their way into a saved run, while the blocks where they lie go on being used.

Main hands over the blocks of all finished samples. The thread that writes copies one block after another and writes
each from its copy; a block that main needs sooner is copied by main (`runtime.memory.in_flight`).

If one cannot be read, because its host is lost, none is read any more: the save fails, and the run goes on.

Invariant: each sample is copied once, before its block can be overwritten; at most one copy is being made at a time, so
main never waits for longer than two take, or one that cannot be read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from polyrhythm.runtime.memory.payloads import Payloads
from polyrhythm.specs import Trajectory


class SampleHandover:
    """The samples of these payload ids, as they are now, to be read once."""

    def __init__(self, payloads: Payloads, payload_ids: Sequence[str]) -> None:
        self._payloads, self._payload_ids = payloads, tuple(payload_ids)
        self._pending = {int(payload_id) for payload_id in payload_ids}
        self._copies: dict[int, Trajectory] = {}
        self._lock = threading.Lock()
        self._failure: OSError | None = None

    def is_pending(self, block: int) -> bool:
        """Whether the sample in this block has yet to be copied."""
        return block in self._pending

    def copy_now(self, block: int) -> None:
        """Copy the sample in this block, unless that is done. Called by main, which is about to reuse the block."""
        with self._lock:
            self._copy(block)

    def samples(self) -> Iterator[tuple[str, Trajectory]]:
        """Payload id and sample, one after another. Called by the thread that writes. OSError: one cannot be read."""
        for payload_id in self._payload_ids:
            block = int(payload_id)
            with self._lock:
                self._copy(block)
                if self._failure is not None:
                    raise self._failure
                sample = self._copies.pop(block)
            yield payload_id, sample

    def give_up(self) -> None:
        """Copy nothing more: the samples are not going to be written."""
        with self._lock:
            self._pending.clear()
            self._copies.clear()

    def _copy(self, block: int) -> None:
        """Copy the sample in this block if it is pending."""
        if block in self._pending:
            try:
                self._copies[block] = _copy_of(self._payloads.read(str(block)))
                self._pending.remove(block)
            except OSError as error:
                self._pending.clear()
                self._failure = error


def _copy_of(sample: Trajectory) -> Trajectory:
    """The same sample in memory of its own."""
    own: dict[str, Any] = {}
    for field in fields(sample):
        value = getattr(sample, field.name)
        if isinstance(value, dict):
            own[field.name] = {name: array.copy() for name, array in value.items()}
        elif hasattr(value, "copy"):
            own[field.name] = value.copy()
    return replace(sample, **own)
