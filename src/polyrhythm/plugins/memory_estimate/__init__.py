"""Estimates the memory of a run on each device before it starts."""

from polyrhythm.checks import Check, CheckContext, Result
from polyrhythm.plugin import Plugin


def _certain(context: CheckContext) -> None:
    """Check that the certain memory of stations fits, before the policy is built."""
    from polyrhythm.plugins.memory_estimate.room import check_room, free_memory

    if context.depth == "trial":  # before the policy is built here; it is freed when the stations run
        free = free_memory()
        context.free = lambda device: free if device == "cpu" else free_memory(device)
    check_room(context.config, context.spec, context.form, trainer=context.trainer)


def _numbers(context: CheckContext) -> None:
    from polyrhythm.plugins.memory_estimate.needs import memory_by_station

    context.numbers["memory"] = memory_by_station(context.config, context.spec, context.form)


def _by_station(context: CheckContext) -> Result:
    from polyrhythm.plugins.memory_estimate.room import memory_found

    return memory_found(context)


def _working(context: CheckContext) -> Result:
    """Warn if the run's estimated memory exceeds the available memory."""
    from polyrhythm.plugins.memory_estimate.room import shortage_found

    return shortage_found(context)


_NAME = "memory while it works"
CHECKS = (
    Check("memory", "recipe", "trial", _certain, needs=("form",), after="policy's form"),
    Check(
        "memory by station", "machine", "machine", _by_station, needs=("form",), until="trial", after="shared memory"
    ),
    Check("memory by station", "policy", "machine", _numbers, needs=("form",), after="policies"),
    Check(_NAME, "machine", "machine", _working, needs=("form",), until="trial", after="shared memory"),
    Check(_NAME, "training", "trial", _working, needs=("form", "policy"), after="the engine's server"),
)
PLUGIN = Plugin(
    "memory_estimate",
    needs=("lease", "ranks"),
    adds={
        "check": {
            "memory": "polyrhythm.plugins.memory_estimate:CHECKS",
        },
    },
)
