"""User-defined workflows: workers, channels between them, and a driver. See docs/workflows.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from polyrhythm.plugin import Plugin

if TYPE_CHECKING:
    from polyrhythm.plugins.workflow.channel import Channel, Pending
    from polyrhythm.plugins.workflow.exchange import Entry
    from polyrhythm.plugins.workflow.protocol import (
        ChannelClosed,
        WaitTimeout,
        WorkerFailed,
        WorkflowError,
        WorkflowOver,
    )
    from polyrhythm.plugins.workflow.worker import Worker
    from polyrhythm.plugins.workflow.workflow import Handle, WorkerGroup, Workflow, seats

PLUGIN = Plugin("workflow", needs=("cluster", "lease"))

__all__ = [
    "Channel", "ChannelClosed", "Entry", "Handle", "Pending", "WaitTimeout", "Worker", "WorkerFailed", "WorkerGroup",
    "Workflow", "WorkflowError", "WorkflowOver", "seats",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """An exported name; its module is imported on use, as the plugin table imports this package in every command."""
    for module in ("channel", "exchange", "protocol", "worker", "workflow") if name in __all__ else ():
        found = vars(importlib.import_module(f"{__name__}.{module}"))
        if name in found:
            return found[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
