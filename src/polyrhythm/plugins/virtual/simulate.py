"""Run the scheduler on a simulated cluster, in virtual time: throughput, utilisation, waiting, lag, ledger."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polyrhythm.cli import show
from polyrhythm.conductors import build_conductor
from polyrhythm.config.base import models_in, quoted
from polyrhythm.config.recipes import examples_folder, read
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.timeline.trace import TraceWriter
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster, summarise
from polyrhythm.plugins.virtual.clustersim.measures import Span
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler.settings import SchedulerSettings


def find_cluster(file: Path) -> Path:
    """The file, or the shipped one of this name. ConfigError: there is neither."""
    shipped = {path.stem: path for path in sorted((examples_folder() / "clusters").glob("*.yaml"))}
    if not file.is_file() and str(file) not in shipped:
        raise ConfigError(
            f"file {str(file)!r} does not exist; name a YAML description of a cluster, or a shipped one: "
            f"{', '.join(shipped)}"
        )
    return file if file.is_file() else shipped[str(file)]


def rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The summary as names and texts."""
    throughput, requests = summary["throughput"], summary["requests"]
    trained, per_batch = throughput["trained_samples_per_s"], requests["rows_per_batch"]
    yield "simulated", f"{summary['versions']} versions in {summary['virtual_s']:,.1f} s, {summary['gpus']:g} GPUs"
    if summary["halted"]:
        yield "halted", summary["halted"]
    yield "throughput", f"{throughput['transitions_per_s']:,.0f} transitions/s, {trained:,.1f} samples/s trained"
    yield "busy", show.shares(summary["utilisation"])
    for name, states in summary["time"].items():
        yield f"{name} spent", show.shares({state: spent["share"] for state, spent in states.items()})
    served = f"{requests['served']:,} served in {requests['batches']:,} batches of {per_batch:.1f} rows"
    yield "requests", f"{served}, each after {1000 * requests['wait_s']:.1f} ms"
    if links := summary.get("links"):
        waited = ", ".join(f"{what} {seconds:,.3g} s" for what, seconds in links["waited_s"].items())
        busiest = f"busiest NIC {100 * links['busiest_share']:.1f}% ({links['busiest']})"
        mean = f"mean {100 * links['mean_share']:.1f}%"
        yield "links", f"{links['gb']:,.1f} GB, {busiest}, {mean}; waited for {waited}"
    if conductor := summary.get("conductor"):
        heard = f"{100 * conductor['share']:.1f}% of a thread, {conductor['events']:,} events"
        halves = f"; {conductor['halves']} serving halves, the busiest {100 * conductor['halves_share']:.1f}%"
        waited = f"each after {1000 * conductor['wait_s']:.2f} ms"
        yield "conductor", f"{heard}, {waited}" + halves * bool(conductor["halves"])
    yield "lag", show.lag(summary["lag"])
    yield "samples", show.samples(summary["ledger"])
    if summary["stations_lost"]:
        down = ", ".join(f"{kind} {seconds:g} s" for kind, seconds in summary["down_s"].items() if seconds)
        yield "stations lost", f"{summary['stations_lost']}, down for: {down}"
    if evaluated := summary["evaluations"]["episodes"]:
        yield "evaluation", f"{evaluated} episodes, {summary['evaluations']['dropped']} dropped"
    for name, value in summary["groups"].items():
        yield name.replace("_", " "), json.dumps(value)


def load_cluster(path: str | Path) -> ClusterSettings:
    """Load the settings from a YAML file. ConfigError: unreadable or invalid."""
    data = read(Path(path))
    try:
        return ClusterSettings.model_validate(data)
    except ValidationError as error:
        raise ConfigError(*_explain(error), origin=str(path)) from None


def simulate(settings: ClusterSettings, span: Span | None = None) -> dict[str, Any]:
    """Run the cluster to its end and return the summary. span: called with every bar of the timeline."""
    conductor = build_conductor(settings.scheduler)
    cluster = VirtualCluster(settings, conductor)
    cluster.driver.measures.span = span
    cluster.run()
    return summarise(cluster.driver, conductor.ledger.as_dict(), settings.gpus, conductor.rollout.summary())


def simulate_file(path: str | Path, trace_path: str | Path | None = None) -> dict[str, Any]:
    """Simulate the cluster that a YAML file describes. trace_path: where to write a timeline for Perfetto or
    chrome://tracing. Raises ConfigError for a wrong file."""
    return simulate_traced(load_cluster(path), trace_path)


def simulate_traced(settings: ClusterSettings, trace_path: str | Path | None) -> dict[str, Any]:
    """As `simulate`, with a timeline in this file, if one is named."""
    if trace_path is None:
        return simulate(settings)
    with TraceWriter(Path(trace_path)) as trace:
        return simulate(settings, SpanWriter(trace, settings.trace_slots).span)


class SpanWriter:
    """Writer of trace bars of all generators, the trainer, and the first `slots` slots that have one."""

    def __init__(self, trace: TraceWriter, slots: int) -> None:
        self._trace = trace
        self._left = slots
        self._shown: set[str] = set()

    def span(self, track: str, name: str, begin: float, end: float) -> None:
        process, _, slot = track.partition("/")
        if slot and track not in self._shown:
            if not self._left:
                return
            self._left -= 1
            self._shown.add(track)
        self._trace.complete(process, track, name, begin, end)


def _explain(error: ValidationError) -> Iterator[str]:
    """One sentence per problem: key, value, problem, fix. Missing keys come last, as most are misspelt ones."""
    details = error.errors(include_url=False)
    written = {_RENAMED.get(str(detail["loc"][-1])) for detail in details if detail["loc"]}
    for detail in sorted(details, key=lambda detail: detail["type"] == "missing"):
        where = ".".join(str(part) for part in detail["loc"]) or "the file"
        if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            shown = "" if isinstance(detail["input"], dict | list) else f" = {quoted(detail['input'])}"
            yield f"{where}{shown}: no such key; {_nearest(detail['loc'])}"
        elif detail["type"] == "missing":
            if where not in written:  # else it is there under its old name
                yield f"{where} is missing; add it"
        else:
            why = detail.get("ctx", {}).get("error", detail["msg"])
            yield f"{where} = {quoted(detail['input'])}: {why}" if detail["loc"] else str(why)


def _nearest(location: tuple[int | str, ...]) -> str:
    """Suggestion for an unknown key, among the keys of the section that `location` ends in."""
    if (name := _RENAMED.get(str(location[-1]))) is not None:
        return f"it is now called {name}"
    keys: list[str] = list(ClusterSettings.model_fields)
    for part in location[:-1]:
        keys = _SECTIONS.get(str(part), keys)
    close = difflib.get_close_matches(str(location[-1]), keys, n=1)
    return f"did you mean {close[0]}?" if close else f"the keys are {', '.join(keys)}"


#: Keys of earlier versions → their present names.
_RENAMED = {"flow": "scheduler", "beside": "background"}
_SECTIONS: dict[str, list[str]] = {
    "scheduler": [field.name for field in fields(SchedulerSettings)],
    **{
        name: list(model.model_fields)
        for name, field in ClusterSettings.model_fields.items()
        for model in models_in(field.annotation)
    },
}
