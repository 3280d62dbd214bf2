"""Serves a run's numbers to Prometheus over HTTP: each line of metrics, and once a second those of the stations.

A name is `polyrhythm_` and the metric's name (docs/metrics.md) with `_` between its parts. Parts that vary between
runs, such as a station, a task or a reason, are labels. Only the newest numbers are kept; Prometheus polls and stores
them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import ssl
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.running import PrometheusSettings
from polyrhythm.errors import MissingError, StartError, install_command
from polyrhythm.observe.activity import Activity
from polyrhythm.pipeline.build import Pipeline
from polyrhythm.pipeline.hooks import RunHooks, RunPart
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.observers.totals import StationHosts
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.scheduler import records

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


#: Seconds that the end of a run waits for a running response.
_CLOSE_S = 5.0
#: Maximum number of connections.
_CONNECTIONS = 32
_PREFIX = "polyrhythm"
_STATION = ("station", "host")
_OTHER = re.compile(r"[^a-zA-Z0-9_]")

#: Label rules: pattern → name and labels, in the pattern's order; the first match counts.
_LABELLED: tuple[tuple[re.Pattern[str], str, tuple[str, ...]], ...] = (
    (re.compile(r"samples/dropped/(.+)"), "samples_dropped", ("reason",)),
    (re.compile(r"samples/(.+)"), "samples", ("state",)),
    (re.compile(r"hosts/utilisation/(.+)"), "host_utilisation", ("host",)),
    (re.compile(r"hosts/faults/(.+)"), "host_faults", ("host",)),
    (re.compile(r"gpu/([^/]+)/(.+)"), "gpu_{}", ("gpu",)),
    (re.compile(r"env/success_once/task_(.+)"), "env_task_success_once", ("task",)),
    (re.compile(r"env/metrics/(.+)"), "env_metrics", ("metric",)),
    (re.compile(r"evaluation/([^/]+)/metrics/(.+)"), "evaluation_metrics", ("way", "metric")),
    (re.compile(r"evaluation/([^/]+)/task_([^/]+)/(.+)"), "evaluation_task", ("way", "task", "metric")),
    (re.compile(r"evaluation/([^/]+)/([^/]+)"), "evaluation_{}", ("way",)),
)
#: Exported by station and host instead (`StationSample`).
_BY_STATION = "stations/utilisation/"


class Labelled(NamedTuple):
    """A sample of Prometheus. labels: (label, value) pairs."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class StationSample(NamedTuple):
    """One station's numbers.

    host: "main" in runs of one host; utilisation: share of the last ten seconds, 0..1, None if unknown; counts:
    cumulative counters by name (`busy_s`, `env_steps`, `faults`, …).
    """

    station: str
    host: str
    utilisation: float | None
    counts: Mapping[str, float]


def labelled(metric: str, value: float) -> Labelled:
    """Convert a metric of docs/metrics.md: `samples/dropped/filtered` is
    `polyrhythm_samples_dropped{reason="filtered"}`."""
    for pattern, name, labels in _LABELLED:
        if found := pattern.fullmatch(metric):
            parts = found.groups()
            full = name.format(_plain(parts[-1]))
            return Labelled(f"{_PREFIX}_{full}", tuple(zip(labels, parts, strict=False)), value)
    return Labelled(f"{_PREFIX}_{_plain(metric)}", (), value)


def _plain(name: str) -> str:
    return _OTHER.sub("_", name)


def _family(metric: str) -> str:
    """Key of the metrics that are replaced together: an evaluation's mode, else the first part of the name."""
    return "/".join(metric.split("/")[: 2 if metric.startswith("evaluation/") else 1])


class PrometheusEndpoint:
    """`http://ADDRESS:PORT/metrics`, from its construction to `close`.

    tls: files of the certificate, the key and the clients' authority; then https, only for clients with a certificate
    of that authority. ask_s: seconds that a connection may be silent. MissingError: prometheus_client is not
    installed; StartError: the address or the files cannot be used.
    """

    def __init__(self, address: str, port: int, tls: tuple[str, str, str] | None = None, ask_s: float = 5.0) -> None:
        check_installed()
        from prometheus_client import CollectorRegistry, start_http_server

        self._latest: dict[str, float] = {}
        self._stations: tuple[StationSample, ...] = ()
        registry = CollectorRegistry()
        registry.register(self)
        secured: dict[str, Any] = {}
        if tls is not None:
            secured = dict(zip(("certfile", "keyfile", "client_cafile"), tls, strict=True), client_auth_required=True)
        try:
            if tls is not None:
                _check_files(*tls)
            self._server, self._thread = start_http_server(port, address, registry, **secured)
            _bound_connections(self._server, ask_s)
        except OSError as error:
            raise StartError(
                f"prometheus.port = {port}: {address}:{port} cannot be opened ({error.strerror or error}); choose "
                "another port, or end what has it"
            ) from error
        self.port = int(self._server.server_port)

    def take(self, step: int, values: Mapping[str, float | None]) -> None:
        """Store the newest numbers of an update, or of an evaluation of version `step`. They replace all of the same
        groups."""
        groups = {_family(name) for name in values}
        kept = {name: value for name, value in self._latest.items() if _family(name) not in groups}
        if "throughput" in groups:
            kept["update"] = float(step)
        own = {
            name: float(value)
            for name, value in values.items()
            if value is not None and not name.startswith(_BY_STATION)
        }
        self._latest = kept | own  # replaced as a whole: the server's threads read it

    def take_stations(self, stations: Iterable[StationSample]) -> None:
        self._stations = tuple(stations)

    def collect(self) -> Iterable[Metric]:
        """All metric families, for a scrape; called in a thread of the server."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        by_name: dict[str, list[Labelled]] = {}
        for metric, value in self._latest.items():
            one = labelled(metric, value)
            by_name.setdefault(one.name, []).append(one)
        for name, own in by_name.items():
            gauge = GaugeMetricFamily(name, "docs/metrics.md", labels=[label for label, _ in own[0].labels])
            for one in own:
                gauge.add_metric([value for _, value in one.labels], one.value)
            yield gauge
        stations = self._stations
        share = GaugeMetricFamily(f"{_PREFIX}_station_utilisation", "share of the last ten seconds", labels=_STATION)
        for station in stations:
            if station.utilisation is not None:
                share.add_metric([station.station, station.host], station.utilisation)
        yield share
        for counter in sorted({name for station in stations for name in station.counts}):
            name = _plain(re.sub(r"_s$", "_seconds", counter))
            counted = CounterMetricFamily(f"{_PREFIX}_station_{name}", "so far", labels=_STATION)
            for station in stations:
                count = station.counts.get(counter)
                if count is not None and math.isfinite(count):
                    counted.add_metric([station.station, station.host], count)
            yield counted

    def close(self) -> None:
        """End the server and free the port; a second call does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_CLOSE_S)


def check_endpoint(settings: PrometheusSettings) -> None:
    """Open and close the endpoint, to raise its errors before anything starts."""
    if settings.port is not None:
        PrometheusEndpoint(settings.address, settings.port, settings.tls).close()


def check_installed() -> None:
    """MissingError: prometheus_client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        command = install_command("prometheus")
        raise MissingError(f"prometheus.port: prometheus_client is not installed; install it: {command}") from error


def _bound_connections(server: Any, ask_s: float) -> None:
    """Limit a server of prometheus_client, which has a thread per connection: connections beyond `_CONNECTIONS` are
    closed, and so are those silent for `ask_s`."""
    places, finish = threading.BoundedSemaphore(_CONNECTIONS), server.finish_request
    if isinstance(server.socket, ssl.SSLSocket):
        # Otherwise a silent connection blocks all others.
        server.socket.do_handshake_on_connect = False  # type: ignore[attr-defined]

    def may_come(request: Any, _address: Any) -> bool:
        request.settimeout(ask_s)
        return places.acquire(blocking=False)

    def answer(request: Any, address: Any) -> None:
        try:
            with contextlib.suppress(OSError):
                finish(request, address)
        finally:
            places.release()

    server.verify_request, server.finish_request = may_come, answer


def _check_files(certificate: str, key: str, client_ca: str) -> None:
    """OSError: the files cannot be used. Checked first, because a server that fails on them leaves its port open."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(client_ca)


log = logging.getLogger(__name__)

#: Seconds between two readings of the stations' counters: Prometheus scrapes every 15 s by default.
_SCRAPE_S = 1.0
#: Counters that are exported; summary.json has all of them.
_COUNTERS = ("busy_s", "env_s", "env_steps", "chunk_steps", "passes", "rows", "tokens", "updates", "scored")


class StationsNow(Observer):
    """Passes each station's host, utilisation, counters and faults to the Prometheus endpoint once a second."""

    hears: ClassVar[tuple[type, ...]] = (records.StationLost,)
    tick_s: ClassVar[float] = _SCRAPE_S

    def __init__(self, endpoint: PrometheusEndpoint, launcher: Launcher, hosts: StationHosts) -> None:
        self._endpoint, self._launcher, self._hosts = endpoint, launcher, hosts
        self._activity, self._faults = Activity(), Counter[str]()

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        if isinstance(event, records.StationLost) and not event.moves:
            self._faults[event.station] += 1

    def on_tick(self, now: float) -> None:
        counters = self._launcher.hosting.statistics()
        self._activity.take(now, counters)
        shares = self._activity.utilisation()
        names = sorted({*counters, *self._faults})
        self._endpoint.take_stations(
            StationSample(
                name,
                self._hosts.of(name),
                shares.get(name),
                {
                    **{each: counters[name][each] for each in _COUNTERS if each in counters.get(name, {})},
                    "faults": float(self._faults[name]),
                },
            )
            for name in names
        )


class EndpointPart(RunPart):
    """An open endpoint."""

    def __init__(self, endpoint: PrometheusEndpoint) -> None:
        self._endpoint = endpoint

    def on_metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        self._endpoint.take(step, values)

    def observers(self, pipeline: Pipeline) -> Sequence[Observer]:
        return [StationsNow(self._endpoint, pipeline.launcher, pipeline.hosts)]

    def close(self) -> None:
        self._endpoint.close()


class EndpointHooks(RunHooks):
    def begin(self, config: RunConfig) -> RunPart | None:
        settings = config.prometheus
        if settings.port is None:
            return None
        endpoint = PrometheusEndpoint(settings.address, settings.port, settings.tls)
        scheme = "https" if settings.tls else "http"
        log.info("metrics for Prometheus: %s://%s:%d/metrics", scheme, settings.address, endpoint.port)
        return EndpointPart(endpoint)


HOOKS = EndpointHooks()
