"""How the recorded traces reach the conductor: everything that a change of its construction has to adapt is here.

A trace names records by their class names and settings by their fields, never modules. It uses nothing of the conductor
but what this module offers.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from polyrhythm import conductors
from polyrhythm.scheduler.codec import state_codec
from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.records import Command, Event
from polyrhythm.scheduler.settings import LeaseSettings, SchedulerSettings, ScoringRules

Plain = Any
"""What JSON can say."""


def plain_settings(settings: SchedulerSettings) -> dict[str, Plain]:
    """The settings with every field, so that a default that changes later does not change the trace."""
    return {name: state_codec().encode(value) for name, value in asdict(settings).items()}


def read_settings(plain: dict[str, Plain]) -> SchedulerSettings:
    """The settings that `plain_settings` wrote."""
    values = {name: state_codec().decode(value) for name, value in plain.items()}
    lease, scoring = values.pop("lease"), values.pop("scoring")
    return SchedulerSettings(
        **values,
        lease=None if lease is None else LeaseSettings(**lease),
        scoring=None if scoring is None else ScoringRules(**scoring),
    )


def build_conductor(settings: dict[str, Plain]) -> AnyConductor:
    """A fresh conductor of these settings."""
    return conductors.build_conductor(read_settings(settings))


def restore_conductor(settings: dict[str, Plain], state: Plain, *, detached: bool) -> AnyConductor:
    """The conductor whose state was saved; detached: as a run does that goes on with new stations."""
    conductor = conductors.restore_conductor(read_settings(settings), state)
    if detached:
        conductor.detach()
    return conductor


def saved_again(conductor: AnyConductor) -> AnyConductor:
    """The conductor after its state has been through JSON."""
    return conductors.restore_conductor(conductor.settings, json.loads(json.dumps(conductor.save())))


def plain_record(record: Event | Command | float) -> Plain:
    """An event, command or time as a trace has it."""
    return state_codec().encode(record)


def read_record(plain: Plain) -> Any:
    """The event or command that `plain_record` wrote, with the default of a field that it lacks."""
    return state_codec().decode(plain)


def outcome(conductor: AnyConductor) -> dict[str, Plain]:
    """What a run reads of the conductor at its end."""
    refused = conductor.stations.refused
    found = {"ledger": conductor.ledger.as_dict(), "summary": conductor.summary(), "refused": refused}
    plain: dict[str, Plain] = json.loads(json.dumps(found))
    return plain
