"""Run the scheduler on a simulated cluster, in virtual time: throughput, utilisation, waiting, lag, ledger."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyrhythm.cli import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="YAML description of the cluster and its workload, or a shipped one"
    )
    parser.add_argument("--trace", type=Path, metavar="PATH", help="write a timeline for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.plugins.virtual.clustersim.file import simulate_file

    summary = simulate_file(_find(arguments.file), trace_path=arguments.trace)
    print(json.dumps(summary, indent=2) if arguments.json else show.aligned(_rows(summary)))
    return 0


def _find(file: Path) -> Path:
    from polyrhythm.config.recipes import examples_folder
    from polyrhythm.errors import ConfigError

    shipped = {path.stem: path for path in sorted((examples_folder() / "clusters").glob("*.yaml"))}
    if not file.is_file() and str(file) not in shipped:
        raise ConfigError(
            f"file {str(file)!r} does not exist; name a YAML description of a cluster, or a shipped one: "
            f"{', '.join(shipped)}"
        )
    return file if file.is_file() else shipped[str(file)]


def _rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    throughput, requests = summary["throughput"], summary["requests"]
    trained, rows = throughput["trained_samples_per_s"], requests["rows_per_batch"]
    yield "simulated", f"{summary['versions']} versions in {summary['virtual_s']:,.1f} s, {summary['gpus']:g} GPUs"
    if summary["halted"]:
        yield "halted", summary["halted"]
    yield "throughput", f"{throughput['transitions_per_s']:,.0f} transitions/s, {trained:,.1f} samples/s trained"
    yield "busy", show.shares(summary["utilisation"])
    for name, states in summary["time"].items():
        yield f"{name} spent", show.shares({state: spent["share"] for state, spent in states.items()})
    served = f"{requests['served']:,} served in {requests['batches']:,} batches of {rows:.1f} rows"
    yield "requests", f"{served}, each after {1000 * requests['wait_s']:.1f} ms"
    if "links" in summary:
        yield "links", _links(summary["links"])
    if "conductor" in summary:
        yield "conductor", _conductor(summary["conductor"])
    yield "lag", show.lag(summary["lag"])
    yield "samples", show.samples(summary["ledger"])
    if summary["stations_lost"]:
        down = ", ".join(f"{kind} {seconds:g} s" for kind, seconds in summary["down_s"].items() if seconds)
        yield "stations lost", f"{summary['stations_lost']}, down for: {down}"
    if evaluated := summary["evaluations"]["episodes"]:
        yield "evaluation", f"{evaluated} episodes, {summary['evaluations']['dropped']} dropped"
    for name, value in summary["groups"].items():
        yield name.replace("_", " "), json.dumps(value)


def _links(links: Mapping[str, Any]) -> str:
    waited = ", ".join(f"{what} {seconds:,.3g} s" for what, seconds in links["waited_s"].items())
    busiest = f"busiest NIC {100 * links['busiest_share']:.1f}% ({links['busiest']})"
    return f"{links['gb']:,.1f} GB, {busiest}, mean {100 * links['mean_share']:.1f}%; waited for {waited}"


def _conductor(conductor: Mapping[str, Any]) -> str:
    heard = f"{100 * conductor['share']:.1f}% of a thread, {conductor['events']:,} events"
    halves = f"; {conductor['halves']} serving halves, the busiest {100 * conductor['halves_share']:.1f}%"
    return f"{heard}, each after {1000 * conductor['wait_s']:.2f} ms" + halves * bool(conductor["halves"])
