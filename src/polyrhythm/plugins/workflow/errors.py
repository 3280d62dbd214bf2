"""What can go wrong in a workflow.

WorkflowError            a worker, a channel or a value cannot be used so
├── WorkerFailed         a worker raised, or is lost: the worker, its rank and the cause; the workflow ends
├── WaitTimeout          a wait was longer than allowed; who waits for what is in its message
├── ChannelClosed        a channel has no more items
└── WorkflowOver         the workflow has ended meanwhile
"""

from __future__ import annotations

from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.workflow.protocol import Denied


class WorkflowError(PolyrhythmError):
    """Base of a workflow's errors."""


class WorkerFailed(WorkflowError):
    """A worker raised or is lost. group, rank: which; cause: in one line; trace: where it raised, if it did."""

    def __init__(self, group: str, rank: int, cause: str, trace: str = "") -> None:
        super().__init__(f"worker {group} rank {rank}: {cause}" + (f"\n{trace}" if trace else ""))
        self.group, self.rank, self.cause, self.trace = group, rank, cause, trace


class WaitTimeout(WorkflowError, TimeoutError):
    """Nothing came in time."""


class ChannelClosed(WorkflowError):
    """A channel is closed: nothing more comes, and nothing can be put."""


class WorkflowOver(WorkflowError):
    """The workflow has ended, for the reason in the message."""


_BY_REASON = {"timeout": WaitTimeout, "closed": ChannelClosed, "over": WorkflowOver, "refused": WorkflowError}


def as_error(denied: Denied) -> WorkflowError:
    """The error that tells of it."""
    return _BY_REASON[denied.reason](denied.why)
