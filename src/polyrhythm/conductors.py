"""Builds conductors: the scheduler's own, plus the optional parts that the settings select.

The scheduler imports nothing outside itself, so this module is outside of it. Optional parts have the kind `scheduler`
(`polyrhythm.plugin`) and these names:

    tuner     class whose `begin(settings)` returns the `Tuner` of `batching: auto`
    scoring   subclass of `SampleScoring`, used if `SchedulerSettings.scoring` is set
    lease     function that wraps a Conductor in an `AnyConductor`, used if `SchedulerSettings.lease` is set
    moves     class whose instances wrap that, the Conductor inside and a judge, if `SchedulerSettings.moves` is set;
              `judge` is the address of the judges' class, which may import more than the scheduler does
"""

from __future__ import annotations

from typing import Any

from polyrhythm import plugin
from polyrhythm.scheduler.conductor import AnyConductor, Conductor
from polyrhythm.scheduler.settings import SchedulerSettings


def build_conductor(settings: SchedulerSettings) -> AnyConductor:
    """A new conductor. PluginError: an optional part that the settings select is not installed."""
    tuner = plugin.load("scheduler", "tuner").begin(settings) if settings.batching == "auto" else None
    scoring = plugin.load("scheduler", "scoring")() if settings.scoring is not None else None
    inner = Conductor(settings, tuner, scoring)
    conductor: AnyConductor = plugin.load("scheduler", "lease")(inner) if settings.lease is not None else inner
    if settings.moves is None:
        return conductor
    moves = plugin.load("scheduler", "moves")
    judge = plugin.import_address(moves.judge)(settings, settings.moves)
    moving: AnyConductor = moves(conductor, inner, judge)
    return moving


def restore_conductor(settings: SchedulerSettings, data: dict[str, Any]) -> AnyConductor:
    """The conductor whose `save` returned this data, under the same settings. ValueError: another version saved it."""
    conductor = build_conductor(settings)
    conductor.load(data)
    return conductor
