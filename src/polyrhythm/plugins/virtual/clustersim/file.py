"""`polyrhythm simulate`: reads a cluster file, runs the simulation, returns its summary."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polyrhythm.conductors import build_conductor
from polyrhythm.config.yaml_text import read
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.timeline.trace import TraceWriter
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.measures import Span, summarise
from polyrhythm.plugins.virtual.clustersim.settings import (
    ClusterSettings,
    ConductorSection,
    EvaluationPlan,
    FaultPlan,
    GeneratorGroup,
    LinkSection,
    ScorerGroup,
    SimulatorGroup,
    TrainerSettings,
)
from polyrhythm.scheduler.settings import SchedulerSettings


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
    """Simulate the cluster that a YAML file describes.

    trace_path: where to write a timeline for Perfetto or chrome://tracing. Raises ConfigError for a wrong file.
    """
    settings = load_cluster(path)
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
            shown = "" if isinstance(detail["input"], dict | list) else f" = {detail['input']!r}"
            yield f"{where}{shown}: no such key; {_nearest(detail['loc'])}"
        elif detail["type"] == "missing":
            if where not in written:  # else it is there under its old name
                yield f"{where} is missing; add it"
        else:
            why = detail.get("ctx", {}).get("error", detail["msg"])
            yield f"{where} = {detail['input']!r}: {why}" if detail["loc"] else str(why)


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
    "simulators": list(SimulatorGroup.model_fields),
    "generators": list(GeneratorGroup.model_fields),
    "trainer": list(TrainerSettings.model_fields),
    "scorers": list(ScorerGroup.model_fields),
    "faults": list(FaultPlan.model_fields),
    "links": list(LinkSection.model_fields),
    "conductor": list(ConductorSection.model_fields),
    "evaluations": list(EvaluationPlan.model_fields),
}
