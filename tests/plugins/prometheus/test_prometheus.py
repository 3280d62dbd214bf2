"""A run's numbers as Prometheus gets them: names, labels, and the endpoint's beginning and end."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace

import pytest
import yaml
from tests.long import long
from tests.pipeline.runs import LOCKSTEP, config
from tests.runtime.links import free_port

from polyrhythm.cli.main import main
from polyrhythm.config.load import merge
from polyrhythm.errors import ConfigError, MissingError, StartError
from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.pipeline.observers.totals import StationHosts
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.prometheus.endpoint import (
    PrometheusEndpoint,
    StationSample,
    StationsNow,
    check_endpoint,
    labelled,
)
from polyrhythm.scheduler.records import GeneratorJoined, StationLost


@pytest.fixture
def installed():
    return pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")


@pytest.fixture
def endpoint(installed):
    found = PrometheusEndpoint("127.0.0.1", 0)
    yield found
    found.close()


def scrape(port):
    """Series → value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {series: float(value) for series, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}


@pytest.mark.parametrize(
    ("metric", "name", "labels"),
    [
        ("train/actor/policy_loss", "polyrhythm_train_actor_policy_loss", ()),
        ("time/env/step", "polyrhythm_time_env_step", ()),
        ("samples/running", "polyrhythm_samples", (("state", "running"),)),
        ("samples/dropped/simulator lost", "polyrhythm_samples_dropped", (("reason", "simulator lost"),)),
        ("env/success_once", "polyrhythm_env_success_once", ()),
        ("env/success_once/task_3", "polyrhythm_env_task_success_once", (("task", "3"),)),
        ("env/metrics/grasp.time", "polyrhythm_env_metrics", (("metric", "grasp.time"),)),
        ("evaluation/greedy/rate", "polyrhythm_evaluation_rate", (("way", "greedy"),)),
        ("evaluation/greedy/metrics/x", "polyrhythm_evaluation_metrics", (("way", "greedy"), ("metric", "x"))),
    ],
)
def test_parts_that_differ_from_run_to_run_are_labels(metric, name, labels):
    assert labelled(metric, 0.5) == (name, labels, 0.5)


def test_a_scrape_has_the_newest_numbers_and_no_older_ones(endpoint, tmp_path):
    with MetricsWriter(tmp_path, [endpoint.take]) as writer:
        writer.log(3, {"evaluation/greedy/rate": 0.25}, 1.0)
        writer.log(0, {"throughput/transitions": 5.0, "env/success_once": 1.0, "env/return": 2.0}, 1.0)
        unknown = {"env/success_once": None, "env/success_once/task_0": None}
        writer.log(1, {"throughput/transitions": 9.0, "env/return": float("nan"), **unknown}, 2.0)
    endpoint.take_stations(
        [
            StationSample("generator-0", "host-1", 0.5, {"busy_s": 4.0, "faults": 1.0}),
            StationSample("trainer", "main", None, {"busy_s": float("inf")}),
        ]
    )
    found = scrape(endpoint.port)
    assert found["polyrhythm_update"] == 1
    assert found["polyrhythm_throughput_transitions"] == 9
    assert found['polyrhythm_evaluation_rate{way="greedy"}'] == 0.25
    assert str(found["polyrhythm_env_return"]) == "nan"
    assert not [name for name in found if "success_once" in name], "not known"
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert {name: last[name] for name in unknown} == unknown
    assert found['polyrhythm_station_utilisation{host="host-1",station="generator-0"}'] == 0.5
    assert found['polyrhythm_station_busy_seconds_total{host="host-1",station="generator-0"}'] == 4
    assert found['polyrhythm_station_faults_total{host="host-1",station="generator-0"}'] == 1
    assert not any("trainer" in series for series in found)


@long(2, "idle connections, ten seconds of waiting")
def test_idle_connections_are_bounded_and_end_in_time(installed, tmp_path):
    with closing(PrometheusEndpoint("127.0.0.1", 0, ask_s=0.3)) as endpoint, ExitStack() as held:
        idle = [held.enter_context(socket.create_connection(("127.0.0.1", endpoint.port), 5)) for _ in range(100)]
        assert threading.active_count() < 60
        for connection in idle:
            connection.settimeout(10)
            with suppress(ConnectionError):
                assert connection.recv(1) == b""
        scrape(endpoint.port)


def test_a_station_is_labelled_with_its_host_and_its_faults_are_counted(endpoint):
    class Launcher:
        names = ("generator-0", "trainer")

        @property
        def hosting(self):
            return self

        def statistics(self):
            return {"generator-0": {"busy_s": 2.0, "passes": 3.0, "dropped/late": 1.0}, "trainer": {"busy_s": 1.0}}

        def station(self, name):
            return SimpleNamespace(host={"generator-0": "host-2", "trainer": "host-1"}[name])

    launcher = Launcher()
    hosts = StationHosts(launcher)
    observer = StationsNow(endpoint, launcher, hosts)
    hosts.on_decision(0.0, GeneratorJoined("generator-0", 0, host="host-1"), [])
    observer.on_decision(0.0, StationLost("trainer", 0, "killed"), [])
    observer.on_decision(0.0, StationLost("trainer", 1, "gives way", blame=False, moves=True), [])
    observer.on_tick(1.0)
    found = scrape(endpoint.port)
    assert found['polyrhythm_station_passes_total{host="host-1",station="generator-0"}'] == 3
    assert found['polyrhythm_station_faults_total{host="host-1",station="trainer"}'] == 1
    assert not any("dropped" in series for series in found)


def test_a_run_is_scraped_while_it_trains_and_gives_the_port_back(installed, tmp_path):
    from polyrhythm.pipeline.callbacks import Callbacks

    port, seen = free_port(), []
    checked = validate_run(config(prometheus={"port": port}, training={"versions": 2}))
    train(checked, tmp_path, callbacks=Callbacks([lambda metrics: seen.append((metrics, scrape(port)))]))
    metrics, found = seen[-1]
    assert found["polyrhythm_train_actor_policy_loss"] == pytest.approx(metrics["train/actor/policy_loss"])
    assert found["polyrhythm_update"] == metrics["step"]
    assert found['polyrhythm_samples{state="trained"}'] == metrics["samples/trained"]
    assert any(series.startswith("polyrhythm_station_env_steps_total") for series in found)
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(port)


def test_a_taken_port_is_one_error_before_the_start(installed, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        recipe.write_text(yaml.safe_dump(merge(LOCKSTEP, {"prometheus": {"port": port}})))
        assert main(["train", str(recipe), f"out_dir={tmp_path / 'runs'}"]) != 0
        with pytest.raises(StartError, match="already in use"):
            check_endpoint(config(prometheus={"port": port}).prometheus)
    assert f"prometheus.port = {port}: 127.0.0.1:{port} cannot be opened" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_files_that_are_not_there_are_one_error(installed):
    files = {"certificate": "none.pem", "key": "none.pem", "client_ca": "none.pem"}
    with pytest.raises(StartError, match="cannot be opened"):
        check_endpoint(config(prometheus={"port": free_port(), **files}).prometheus)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_over_https_only_clients_of_the_authority_are_answered(installed, tmp_path):
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key -out cert -days 2"
    subprocess.run(
        [*make.split(), "-subj", "/CN=own", "-addext", "subjectAltName=IP:127.0.0.1"], cwd=tmp_path, check=True
    )
    certificate, key = str(tmp_path / "cert"), str(tmp_path / "key")
    endpoint = PrometheusEndpoint("127.0.0.1", 0, (certificate, key, certificate))
    try:
        context, url = ssl.create_default_context(cafile=certificate), f"https://127.0.0.1:{endpoint.port}/metrics"
        with pytest.raises((ssl.SSLError, urllib.error.URLError, ConnectionError)):
            urllib.request.urlopen(url, context=context, timeout=10)
        context.load_cert_chain(certificate, key)
        with urllib.request.urlopen(url, context=context, timeout=10) as answer:
            assert b"polyrhythm_station_utilisation" in answer.read()
    finally:
        endpoint.close()


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(MissingError, match=r"polyrhythm\[prometheus\]"):
        check_endpoint(config(prometheus={"port": 9464}).prometheus)


def test_plain_http_is_for_this_machine_alone():
    assert config(prometheus={"port": 9464, "address": "::1"}).prometheus.tls is None
    with pytest.raises(ConfigError, match=r"prometheus.address = '0.0.0.0': other machines reach it"):
        config(prometheus={"port": 9464, "address": "0.0.0.0"})
    with pytest.raises(ConfigError, match=r"prometheus.key = .*https needs"):
        config(prometheus={"port": 9464, "certificate": "a"})
