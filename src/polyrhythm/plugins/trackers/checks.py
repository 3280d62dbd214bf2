"""Checks the trackers of a recipe before a run starts, without importing their packages.

`doctor` imports this where even pydantic may be missing.
"""

from __future__ import annotations

from collections import Counter

from polyrhythm.checks import Check, CheckContext
from polyrhythm.errors import ConfigError


def _settings(context: CheckContext) -> str | tuple[()]:
    """ConfigError: a tracker is named twice, or its class is not one of a tracker's settings."""
    from polyrhythm.config.base import type_name
    from polyrhythm.config.registry import MAIN
    from polyrhythm.plugins.trackers.sink import TrackerSettings

    named = [type_name(one) for one in context.config.tracking]
    if twice := [name for name, count in Counter(named).items() if count > 1]:
        raise ConfigError(f"tracking = [{', '.join(named)}]: {twice[0]} is there twice; name each tracker once")
    for settings, name in zip(context.config.tracking, named, strict=True):
        if not isinstance(settings, TrackerSettings) or type(settings).open is TrackerSettings.open:
            raise ConfigError(
                f"tracking.type = {name}: it is not a tracker's settings; derive the class from "
                "polyrhythm.plugins.trackers.sink.TrackerSettings, with a method open(run)"
            )
        if name.startswith(f"{MAIN}:") and not settings.in_run:
            raise ConfigError(
                f"tracking.type = {name}: its process cannot import a script or notebook; put the class into a module "
                f"(say own.py) and name it own:{name.partition(':')[2]}"
            )
    return ", ".join(named) if named else ()


def _installed(context: CheckContext) -> str | tuple[()]:
    """MissingError: a tracker's package is not installed, or it lacks something else, such as a key."""
    from polyrhythm.config.catalog import check_installed

    if context.trainer:
        for settings in context.config.tracking:
            check_installed("tracking", settings)
    return ()


CHECKS = (
    Check("trackers", "recipe", "settings", _settings),
    Check("trackers' packages", "machine", "machine", _installed, after="trackers"),
)
