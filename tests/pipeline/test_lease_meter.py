"""How often stations change places on leased devices is counted."""

from __future__ import annotations

from polyrhythm.cli.run_summary import lines
from polyrhythm.pipeline.observers.leases import LeaseMeter
from polyrhythm.scheduler import records


def test_switches_seconds_and_freed_bytes_are_counted_by_station() -> None:
    meter = LeaseMeter()
    for event in (
        records.DeviceTaken("trainer", 0, 0, 0.5),
        records.DeviceYielded("trainer", 0, 0, 100, 0.25),
        records.DeviceTaken("generator-0", 0, 0, 1.0),
        records.DeviceTaken("trainer", 1, 0, 0.5),
        records.DeviceYielded("trainer", 1, 0, 70, 0.25),
    ):
        meter.on_decision(0.0, event, [])
    assert meter.summary() == {
        "generator-0": {"switches": 1, "seconds": 1.0, "freed_bytes": 0},
        "trainer": {"switches": 4, "seconds": 1.5, "freed_bytes": 100},
    }


def test_the_summary_in_the_terminal_names_them() -> None:
    counts = {"before": 0, "trained": 1}
    summary = {
        "wall_s": {"total": 1.0, "rl": 1.0},
        "transitions_per_s": 1.0,
        "utilisation": {},
        "lag": {"mean": 0.0, "max": 0},
        "ledger": {"started": 1, "trained": 1, "dropped": {}, **counts},
        "faults": [],
        "leases": {"trainer": {"switches": 4, "seconds": 1.5, "freed_bytes": 100}},
    }
    assert "leases      trainer 4 switches in 1.5 s" in lines(summary)
