"""The hosts of a run that has several: how busy their stations were, and how many were lost on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyrhythm.observe.activity import by_kind
from polyrhythm.plugins.report.charts import share_bars, share_curves
from polyrhythm.plugins.report.data import each
from polyrhythm.plugins.report.parts import Part, table, text
from polyrhythm.plugins.report.read import ReportSection, Run

_UTILISATION, _FAULTS = "hosts/utilisation/", "hosts/faults/"
#: More hosts than this are drawn together.
_HOSTS = 8


def draw(runs: Sequence[Run]) -> list[Part]:
    """Of one run figures and a table, of several the tables."""
    return (hosts(runs[0]) if len(runs) == 1 else []) + each(runs, host_table)


def hosts(run: Run) -> list[Part]:
    """Utilisation of each host: bars for the whole training, and curves; none if the run has one."""
    found = by_host(run)
    if not found:
        return []
    shares = by_kind({name: own["utilisation"] for name, own in found.items()}, _HOSTS)
    sentence = (
        "The mean over the stations of a host of the share of training in which each was at work (bars), and of the "
        "last ten seconds (curves). Nodes that share memory are one host; main is that of the main process."
    )
    bars = share_bars("hosts-bars", "Utilisation of each host", [run], [shares])
    return [text(sentence, "soft"), bars, *share_curves("hosts", run, _UTILISATION, list(found))]


def host_table(run: Run) -> list[Part]:
    rows = [
        [name, ", ".join(own["stations"]) or "–", f"{100 * own['utilisation']:.0f}%", str(own["faults"])]
        for name, own in by_host(run).items()
    ]
    caption = "Hosts of the run, with the stations that were there last, and how many were lost there."
    return [table(["host", "stations", "utilisation", "faults"], rows, caption)] if rows else []


def by_host(run: Run) -> Mapping[str, Mapping[str, Any]]:
    """As in summary.json; of an unfinished run from its updates, without the names of stations."""
    if "hosts" in run.summary:
        found: Mapping[str, Mapping[str, Any]] = run.summary["hosts"]
        return found
    names = dict.fromkeys(
        name.removeprefix(prefix)
        for line in run.updates
        for prefix in (_UTILISATION, _FAULTS)
        for name in line
        if name.startswith(prefix)
    )
    so_far: dict[str, dict[str, Any]] = {}
    for name in names:
        shares = [share for line in run.updates if (share := line.get(_UTILISATION + name)) is not None]
        faults = [count for line in run.updates if (count := line.get(_FAULTS + name)) is not None]
        mean = sum(shares) / len(shares) if shares else 0.0
        so_far[name] = {"utilisation": mean, "faults": int(faults[-1]) if faults else 0, "stations": []}
    return so_far


SECTION = ReportSection("hosts", "Hosts", draw, after="utilisation")
