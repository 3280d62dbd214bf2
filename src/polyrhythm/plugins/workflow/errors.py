"""Errors of workflows.

WorkflowError            invalid use of a worker, a channel or a value
├── WorkerFailed         a worker raised or is lost: the worker, its rank and the cause; the workflow ends
├── WaitTimeout          a wait passed its deadline; the message lists all waits
├── ChannelClosed        a channel has no more items
└── WorkflowOver         the workflow has ended meanwhile
"""

from __future__ import annotations

from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.workflow.protocol import Denied


class WorkflowError(PolyrhythmError):
    """Base of the errors of workflows."""


class WorkerFailed(WorkflowError):
    """A worker raised or is lost. group, rank: of the worker; cause: one line; trace: traceback, if it raised."""

    def __init__(self, group: str, rank: int, cause: str, trace: str = "") -> None:
        super().__init__(f"worker {group} rank {rank}: {cause}" + (f"\n{trace}" if trace else ""))
        self.group, self.rank, self.cause, self.trace = group, rank, cause, trace


class WaitTimeout(WorkflowError, TimeoutError):
    """A wait passed its deadline."""


class ChannelClosed(WorkflowError):
    """The channel is closed: it has no more items and accepts none."""


class WorkflowOver(WorkflowError):
    """The workflow has ended, for the reason in the message."""


_BY_REASON = {"timeout": WaitTimeout, "closed": ChannelClosed, "over": WorkflowOver, "refused": WorkflowError}


def as_error(denied: Denied) -> WorkflowError:
    return _BY_REASON[denied.reason](denied.why)
