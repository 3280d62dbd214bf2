"""Formats the main results of a training run for the terminal; summary.json has all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polyrhythm.cli import show
from polyrhythm.observe.intervals import counted, deciding

#: So many of a list are named.
_NAMED = 3
_EVALUATIONS = {
    "before": "before",
    "after": "after",
    "before_sampled": "before, sampled",
    "after_sampled": "after, sampled",
    "swapped": "instructions swapped",
}


def lines(summary: Mapping[str, Any]) -> str:
    """The content of summary.json in a few aligned lines; phases that did not run are left out."""
    return show.aligned(_rows(summary))


def _rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, label in _EVALUATIONS.items():
        if name in summary:
            yield label, show.result(summary[name])
    if "best" in summary:
        yield "best.pt", _best(summary["best"])
    yield from (("warning", sentence) for sentence in summary.get("warnings", ()))
    yield "time", _time(summary["wall_s"])
    if "transitions_per_s" in summary:
        yield "throughput", f"{summary['transitions_per_s']:,.0f} transitions/s"
        yield "busy", show.shares(summary["utilisation"])
        if hosts := summary.get("hosts"):
            yield "hosts", "; ".join(_host(name, own) for name, own in hosts.items())
        yield "lag", show.lag(summary["lag"])
        if leased := {name: own for name, own in summary.get("stations", {}).items() if own.get("switches")}:
            yield "leases", _leases(leased)
        yield "samples", show.samples(summary["ledger"])
        yield "faults", _faults(summary["faults"])
        if failed := summary.get("failed_samples"):
            yield "failed samples", ", ".join(f"{count} by {kind}" for kind, count in failed.items())
        if set_aside := summary.get("set_aside"):
            yield "set aside", _set_aside(set_aside)
        if dropped := summary.get("dropped_messages"):
            yield "dropped messages", ", ".join(f"{count} {kind}" for kind, count in dropped.items())


def _best(entry: Mapping[str, Any]) -> str:
    result = show.result(deciding(entry))
    return f"version {entry['version']}: {result}; chosen by this result, which is therefore biased upward"


def _time(wall_s: Mapping[str, float]) -> str:
    """`8.3 min: demonstrations 0.6, …, rl 5.1`; seconds for a short run."""
    unit, by = ("min", 60.0) if wall_s["total"] >= 120 else ("s", 1.0)
    phases = (f"{name.replace('_', ' ')} {took / by:.1f}" for name, took in wall_s.items() if name != "total")
    return f"{wall_s['total'] / by:.1f} {unit}: {', '.join(phases)}"


def _host(name: str, own: Mapping[str, Any]) -> str:
    """`host-1 45%, 1 fault`."""
    return (
        f"{name} {100 * own['utilisation']:.0f}%, {counted(own['faults'], 'fault') if own['faults'] else 'no faults'}"
    )


def _leases(stations: Mapping[str, Mapping[str, float]]) -> str:
    """`generator-0 24 switches in 1.3 s, trainer 25 switches in 2.0 s`."""
    told = (f"{name} {own['switches']:.0f} switches in {own['switch_s']:.1f} s" for name, own in stations.items())
    return ", ".join(told)


def _set_aside(found: list[Mapping[str, Any]]) -> str:
    """`2: open-v3 with seed 7 (environment raised), …`."""
    named = [f"{one['task']} with seed {one['seed']} ({one['reason']})" for one in found[:_NAMED]]
    return f"{len(found)}: {', '.join(named)}{', …' if len(found) > _NAMED else ''}"


def _faults(faults: list[Mapping[str, Any]]) -> str:
    stations = ", ".join(dict.fromkeys(fault["station"] for fault in faults))
    return f"{len(faults)}, survived ({stations})" if faults else "none"
