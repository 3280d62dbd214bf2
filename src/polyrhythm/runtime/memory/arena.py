"""The arena: memory of equal blocks for samples, written once by simulators and read in place by all other stations.

A ticket gets a block when it is granted. The simulator writes its observations, answers and rewards straight into the
block, and the block is the finished sample: nothing is copied out, and the payload id is the block's number. A block
has one entry per chunk step and one for the last observation. The entries of all blocks have one numbering, so one
index reads the rows of a request or writes their answers. The entries of one step lie side by side over all blocks, so
rows that step together write contiguous memory.

    arrays [entries * blocks, ...]      entry e of block b is e * blocks + b

The same code serves one process (plain memory) and several (shared memory).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from polyrhythm.runtime.messages import ACTIONS, FORWARD_INPUTS, LOGPROB, NEWER, VALUE, VERSION
from polyrhythm.specs import ArraySpec, Trajectory

#: Some entries: by their numbers, or a slice where they are in one piece.
Entries = NDArray[np.int64] | slice

#: Above every int64.
FAR = 2**63

_ALIGNMENT = 64

#: Most digits of a block's number; with this many it still fits an int64.
_DIGITS = 19
#: The numbers in a block's head: what a sample has beside its arrays.
_HEAD = ("steps", "terminated", "success", "env_steps", "ticket", "group", "task")


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Shapes and sizes of an arena. steps: chunk steps of the longest sample. obs, answers: arrays of one entry, by
    name, the answers by the names of `runtime.messages`. chunk: primitive actions per chunk step. slots: name → rows.
    scored: samples of evaluations stay in their blocks too, until they are scored. streamed: weights may change within
    an answer, which then has the version of each token.
    """

    blocks: int
    steps: int
    chunk: int
    obs: Mapping[str, ArraySpec]
    answers: Mapping[str, ArraySpec]
    slots: Mapping[str, int]
    scored: bool = False
    streamed: bool = False

    @property
    def entries(self) -> int:
        return self.steps + 1

    def block(self, number: int, count: int) -> slice:
        """Where the first `count` entries of a block lie."""
        return slice(number, number + count * self.blocks, self.blocks)

    @property
    def answer_dtype(self) -> np.dtype[np.void]:
        """dtype of one row's answer as a record, so that it is sent and stored in one piece."""
        fields = [(name, array.dtype, array.shape) for name, array in self.answers.items()]
        newer = [(NEWER, "int32", (self.chunk,))] if self.streamed else []
        return np.dtype([*fields, *newer, (VERSION, "int64")], align=True)

    def arrays(self) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
        """Name, shape and dtype of every array, in the order of memory."""
        entries = self.blocks * self.entries
        yield "head", (self.blocks, len(_HEAD)), np.dtype(np.int64)
        yield "answers", (entries,), self.answer_dtype
        yield "rewards", (entries, self.chunk), np.dtype(np.float32)
        yield "valid", (entries, self.chunk), np.dtype(bool)
        for name, array in self.obs.items():
            yield f"obs.{name}", (entries, *array.shape), np.dtype(array.dtype)
        for slot, rows in self.slots.items():
            yield f"request.{slot}", (3, rows), np.dtype(np.int64)

    @property
    def nbytes(self) -> int:
        return sum(_padded(shape, dtype) for _, shape, dtype in self.arrays())


class RequestView(NamedTuple):
    """A request as a generator reads it: entries [n] with the observations, noise keys [n] int64, greedy flags [n].

    obs: the observations themselves, name → [n, ...], where the request was fetched from another host."""

    entries: NDArray[np.int64]
    noise_key: NDArray[np.int64]
    greedy: NDArray[np.bool_]
    obs: Mapping[str, NDArray[Any]] | None = None


class Elsewhere(Protocol):
    """What lies on other hosts. own: the host of this arena."""

    @property
    def own(self) -> str: ...

    def requests(self, posted: Sequence[tuple[str, int]]) -> dict[str, RequestView]:
        """Those of these requests (slot, rows) that lie on other hosts, by slot."""

    def bring(self, arena: Arena, host: str, blocks: Sequence[int], *, obs: bool = True) -> None:
        """Copy finished samples to the same blocks of this arena, with or without their observations. LookupError: one
        is not there."""


class Arena:
    """The arrays of `layout` in `memory`, which has at least `layout.nbytes` bytes.

    obs: name → [entries, ...]; answers: records [entries]; rewards [entries, C] float32; valid [entries, C] bool;
    requests: slot → [3, rows] int64: entries, noise keys, greedy flags.
    elsewhere: what other hosts hold of the run; None where there are none.
    """

    def __init__(self, layout: ArenaLayout, memory: memoryview | bytearray, elsewhere: Elsewhere | None = None) -> None:
        self.layout, self._elsewhere = layout, elsewhere
        self._fetched: dict[str, RequestView] = {}
        self._brought: dict[int, str] = {}  # blocks of other hosts whose samples were fetched
        found: dict[str, NDArray[Any]] = {}
        offset = 0
        for name, shape, dtype in layout.arrays():
            found[name] = np.frombuffer(memory, dtype, math.prod(shape), offset).reshape(shape)
            offset += _padded(shape, dtype)
        self.head, self.answers = found["head"], found["answers"]
        self._unread = self.answers.view(np.dtype((np.void, self.answers.itemsize)))
        self.rewards, self.valid = found["rewards"], found["valid"]
        self.obs = {name: found[f"obs.{name}"] for name in layout.obs}
        inputs = [name for name in layout.answers if name.startswith(FORWARD_INPUTS)]
        self._inputs = [(name.removeprefix(FORWARD_INPUTS), name) for name in inputs]
        self.requests = {slot: found[f"request.{slot}"] for slot in layout.slots}

    def post(self, slot: str, view: RequestView) -> None:
        """Write the slot's request; it stays until the slot posts again."""
        area, count = self.requests[slot], len(view.entries)
        area[0, :count], area[1, :count], area[2, :count] = view.entries, view.noise_key, view.greedy

    def fetch_requests(self, posted: Iterable[tuple[str, int]]) -> None:
        """Fetch those of these requests (slot, rows) that lie on other hosts, for `view`, until the next call."""
        if self._elsewhere is not None:
            self._fetched = self._elsewhere.requests(list(posted))

    def view(self, slot: str, count: int) -> RequestView:
        """The request that the slot posted, of `count` rows, in place."""
        if slot in self._fetched:
            return self._fetched[slot]
        area = self.requests[slot]
        return RequestView(area[0, :count], area[1, :count], area[2, :count] != 0)

    def keep(self, entries: Entries, answers: NDArray[np.void]) -> None:
        """Copy an answer's records [n] to n entries, each in one piece."""
        records = answers.view(self._unread.dtype)
        if isinstance(entries, slice):
            self._unread[entries] = records
        else:
            self._unread.put(entries, records)

    def finish(self, block: int, **head: int) -> None:
        """Write the block's head: the sample is complete."""
        self.head[block] = [head[name] for name in _HEAD]

    def block_of(self, payload_id: str) -> int:
        """The block that a payload id names. LookupError: there is none, or it is another host's, not fetched yet."""
        host, number = self._parse(payload_id)
        if host and self._brought.get(number) != host:
            raise LookupError(
                f"payload {payload_id!r}: it lies on host {host}, which this process cannot read before it fetched it"
            )
        return number

    def _parse(self, payload_id: str) -> tuple[str, int]:
        host, _, digits = payload_id.rpartition("/")
        number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < _DIGITS else -1
        if not 0 <= number < self.layout.blocks:
            raise LookupError(f"payload {payload_id!r}: there is no such block")
        own = self._elsewhere is not None and host == self._elsewhere.own
        return "" if own else host, number

    def lies_elsewhere(self, payload_id: str) -> bool:
        """Whether it names a block of another host, from which this process can fetch."""
        try:
            return self._elsewhere is not None and self._parse(payload_id)[0] != ""
        except LookupError:
            return False

    def fetch(self, payload_ids: Iterable[str], *, obs: bool = True) -> None:
        """Have those of these samples here that lie on other hosts. obs: with their observations, which must not be
        read otherwise. LookupError: one does not lie there."""
        by_host: dict[str, list[int]] = {}
        for payload_id in payload_ids:
            host, number = self._parse(payload_id)
            if host:
                by_host.setdefault(host, []).append(number)
                self._brought.pop(number, None)
                if self._elsewhere is None:
                    raise LookupError(f"payload {payload_id!r}: it lies on host {host}, which this process cannot read")
        for host, blocks in by_host.items():
            assert self._elsewhere is not None
            self._elsewhere.bring(self, host, blocks, obs=obs)
            self._brought.update(dict.fromkeys(blocks, host))

    def read(self, payload_id: str) -> Trajectory:
        """The finished sample of this payload id, in place: valid until it is released. LookupError: it is not here."""
        return self.trajectory(self.block_of(payload_id))

    def holds(self, payload_id: str, ticket: int) -> bool:
        """Whether the finished sample of this ticket lies there; from another host it is fetched."""
        try:
            self.fetch([payload_id])
        except LookupError:
            return False
        return self.has(payload_id, ticket)

    def has(self, payload_id: str, ticket: int) -> bool:
        """Whether the finished sample of this ticket lies here, or was fetched."""
        try:
            number = self.block_of(payload_id)
        except LookupError:
            return False
        steps, _, _, _, held, _, _ = self.head[number].tolist()
        return bool(0 < steps <= self.layout.steps and held == ticket)

    def trajectory(self, block: int) -> Trajectory:
        """The finished sample in a block, in place: valid until the block is released."""
        steps, terminated, success, env_steps, ticket, group, task = self.head[block].tolist()
        part, shown = self.layout.block(block, steps), self.layout.block(block, steps + 1)
        answers = self.answers[part]
        return Trajectory(
            obs={name: array[shown] for name, array in self.obs.items()},
            actions=answers[ACTIONS],
            logprob=answers[LOGPROB],
            value=answers[VALUE],
            forward_inputs={name: answers[field] for name, field in self._inputs},
            rewards=self.rewards[part],
            valid=self.valid[part],
            version=answers[VERSION],
            newer=answers[NEWER] if self.layout.streamed else None,
            terminated=bool(terminated),
            truncated=not terminated,
            success=bool(success),
            env_steps=env_steps,
            ticket=ticket,
            group=group,
            task=task,
        )

    def store(self, block: int, trajectory: Trajectory) -> None:
        """Write a finished sample into a block, as it was read from another."""
        steps = trajectory.steps
        part, shown = self.layout.block(block, steps), self.layout.block(block, steps + 1)
        for name, array in trajectory.obs.items():
            self.obs[name][shown] = array
        inputs = {FORWARD_INPUTS + name: array for name, array in trajectory.forward_inputs.items()}
        answers = {ACTIONS: trajectory.actions, LOGPROB: trajectory.logprob, VALUE: trajectory.value, **inputs}
        if self.layout.streamed:
            older = np.zeros(trajectory.valid.shape, np.int32)  # of a sample that an earlier version has saved
            answers[NEWER] = older if trajectory.newer is None else trajectory.newer
        for name, array in {**answers, VERSION: trajectory.version}.items():
            self.answers[name][part] = array
        self.rewards[part], self.valid[part] = trajectory.rewards, trajectory.valid
        self.head[block] = attrgetter(*_HEAD)(trajectory)


def numbers(entries: Entries) -> NDArray[np.int64]:
    return np.arange(entries.start, entries.stop) if isinstance(entries, slice) else entries


def whole(array: NDArray[Any]) -> NDArray[np.void]:
    """The items of a contiguous array [n, ...], n > 0, as bytes without a meaning, [n]: each is copied in one piece."""
    return array.reshape(len(array), -1).view(f"V{array[:1].nbytes}")[:, 0]


def in_memory(layout: ArenaLayout) -> Arena:
    return Arena(layout, bytearray(layout.nbytes))


def _padded(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
