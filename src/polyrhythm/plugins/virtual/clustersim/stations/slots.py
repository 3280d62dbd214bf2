"""State of a simulated slot: its rows, its request, and its stepping thread."""

from __future__ import annotations

from collections import deque

from polyrhythm.plugins.virtual.clustersim.measures import TICKETS
from polyrhythm.scheduler.records import SlotInfo, Ticket


class VirtualRow:
    """One row of an env batch. Free: no ticket. Parked: no ticket, in mid-episode.

    left: env steps until its episode ends; pace: seconds per chunk step, if the row has its own (else 0).
    chunk_steps, env_steps, oldest, newest: of the sample under way.
    """

    __slots__ = ("chunk_steps", "env_steps", "index", "left", "newest", "oldest", "pace", "parked", "ticket")

    def __init__(self, index: int) -> None:
        self.index = index
        self.ticket: Ticket | None = None
        self.parked = False
        self.left = 0
        self.pace = 0.0
        self.chunk_steps = 0
        self.env_steps = 0
        self.oldest = self.newest = -1

    def take(self, ticket: Ticket) -> None:
        """Begin a new sample; the episode may be a parked one."""
        self.ticket = ticket
        self.parked = False
        self.chunk_steps = 0
        self.env_steps = 0
        self.oldest = self.newest = -1

    def advance(self, chunk: int, version: int) -> int:
        """Do a chunk step of up to `chunk` env steps with actions of weights `version`; return the env steps done."""
        steps = min(chunk, self.left)
        self.left -= steps
        self.env_steps += steps
        self.chunk_steps += 1
        self.newest = max(self.newest, version)
        self.oldest = version if self.oldest < 0 else min(self.oldest, version)
        return steps

    @property
    def trains(self) -> bool:
        return self.ticket is not None and not self.ticket.evaluation

    def release(self, *, parked: bool) -> Ticket:
        ticket, self.ticket = self.ticket, None
        assert ticket is not None
        self.parked = parked
        return ticket


class VirtualSlot:
    """A shard of an env batch.

    active: rows of the open request or the running step; ready: rows that join the next request; joining: granted rows
    that must still reset; resetting: rows being reset. outstanding: id of the unanswered request, or empty; in_batch: a
    generator has it; answer: version of the reply that waits for its step, or -1; running: the unit of work on the
    thread, or empty. cancelled: attempts (ticket, attempt) to cancel as soon as the thread is done with them.
    """

    __slots__ = (
        "active",
        "answer",
        "cancelled",
        "evaluation",
        "first",
        "in_batch",
        "joining",
        "name",
        "outstanding",
        "queued",
        "ready",
        "resetting",
        "rows",
        "running",
        "sequence",
        "since",
        "state",
        "thread",
        "version",
    )

    def __init__(self, info: SlotInfo, thread: StepThread) -> None:
        self.name = info.slot
        self.first = info.first
        self.rows = [VirtualRow(info.first + index) for index in range(info.rows)]
        self.thread = thread
        self.active: list[VirtualRow] = []
        self.ready: list[VirtualRow] = []
        self.joining: list[VirtualRow] = []
        self.resetting: list[VirtualRow] = []
        self.cancelled: set[tuple[int, int]] = set()
        self.sequence = 0
        self.outstanding = ""
        self.in_batch = False
        self.answer = -1
        self.running = ""
        self.queued = False
        self.version = 0
        self.evaluation = False
        self.state = TICKETS
        self.since = 0.0

    def on_tickets(self) -> None:
        """Update `version` (highest among the active rows' tickets) and `evaluation` after `active` changed."""
        tickets = [row.ticket for row in self.active if row.ticket is not None]
        self.version = max((ticket.version for ticket in tickets), default=0)
        self.evaluation = any(ticket.evaluation for ticket in tickets)

    def row_of(self, number: int, attempt: int) -> VirtualRow | None:
        for row in self.rows:
            if row.ticket is not None and row.ticket.number == number and row.ticket.attempt == attempt:
                return row
        return None

    def drop(self, row: VirtualRow) -> None:
        for rows in (self.active, self.ready, self.joining):
            if row in rows:
                rows.remove(row)


class StepThread:
    """A thread that steps and resets slots one at a time, in the order in which they became ready."""

    __slots__ = ("busy", "queue")

    def __init__(self) -> None:
        self.busy = False
        self.queue: deque[VirtualSlot] = deque()
