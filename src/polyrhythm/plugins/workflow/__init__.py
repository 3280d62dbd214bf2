"""User-defined workflows: workers, channels between them, and a driver. See docs/workflows.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from polyrhythm.plugin import Plugin

if TYPE_CHECKING:
    from polyrhythm.plugins.workflow.channel import Channel, Pending
    from polyrhythm.plugins.workflow.errors import ChannelClosed, WaitTimeout, WorkerFailed, WorkflowError, WorkflowOver
    from polyrhythm.plugins.workflow.group import Handle, WorkerGroup
    from polyrhythm.plugins.workflow.queues import Entry
    from polyrhythm.plugins.workflow.worker import Worker
    from polyrhythm.plugins.workflow.workflow import Workflow, seats

PLUGIN = Plugin(
    "workflow",
    needs=("cluster",),
)

#: Module → its names exported here, imported on use.
_MODULES = {
    "channel": ("Channel", "Pending"),
    "errors": ("ChannelClosed", "WaitTimeout", "WorkerFailed", "WorkflowError", "WorkflowOver"),
    "group": ("Handle", "WorkerGroup"),
    "queues": ("Entry",),
    "worker": ("Worker",),
    "workflow": ("Workflow", "seats"),
}

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


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
