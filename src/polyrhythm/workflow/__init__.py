"""Workflows of one's own: workers, channels between them, and a driver. See docs/workflows.md."""

from polyrhythm.workflow.channel import Channel, Pending
from polyrhythm.workflow.errors import ChannelClosed, WaitTimeout, WorkerFailed, WorkflowError, WorkflowOver
from polyrhythm.workflow.group import Handle, WorkerGroup
from polyrhythm.workflow.queues import Entry
from polyrhythm.workflow.worker import Worker
from polyrhythm.workflow.workflow import Workflow, seats

__all__ = [
    "Channel",
    "ChannelClosed",
    "Entry",
    "Handle",
    "Pending",
    "WaitTimeout",
    "Worker",
    "WorkerFailed",
    "WorkerGroup",
    "Workflow",
    "WorkflowError",
    "WorkflowOver",
    "seats",
]
