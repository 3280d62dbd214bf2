"""User-defined workflows: workers, channels between them, and a driver. See docs/workflows.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from polyrhythm.plugin import Plugin

if TYPE_CHECKING:
    from polyrhythm.plugins.workflow.channel import Channel as Channel
    from polyrhythm.plugins.workflow.channel import Pending as Pending
    from polyrhythm.plugins.workflow.exchange import Entry as Entry
    from polyrhythm.plugins.workflow.group import Handle as Handle
    from polyrhythm.plugins.workflow.group import WorkerGroup as WorkerGroup
    from polyrhythm.plugins.workflow.protocol import (
        ChannelClosed as ChannelClosed,
    )
    from polyrhythm.plugins.workflow.protocol import (
        WaitTimeout as WaitTimeout,
    )
    from polyrhythm.plugins.workflow.protocol import (
        WorkerFailed as WorkerFailed,
    )
    from polyrhythm.plugins.workflow.protocol import (
        WorkflowError as WorkflowError,
    )
    from polyrhythm.plugins.workflow.protocol import (
        WorkflowOver as WorkflowOver,
    )
    from polyrhythm.plugins.workflow.worker import Worker as Worker
    from polyrhythm.plugins.workflow.workflow import Workflow as Workflow
    from polyrhythm.plugins.workflow.workflow import seats as seats

PLUGIN = Plugin("workflow", needs=("cluster",))

#: Module → its names exported here, imported on use: the plugin table imports this package in every command.
_MODULES = {
    "channel": ("Channel", "Pending"),
    "exchange": ("Entry",),
    "group": ("Handle", "WorkerGroup"),
    "protocol": ("ChannelClosed", "WaitTimeout", "WorkerFailed", "WorkflowError", "WorkflowOver"),
    "worker": ("Worker",),
    "workflow": ("Workflow", "seats"),
}

__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
