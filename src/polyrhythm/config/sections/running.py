"""Settings of processes and files: transport, joined simulators, Prometheus, Ray, supervision, checkpoints,
scorers."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import model_validator

from polyrhythm.config.base import Count, InvalidSetting, NotNegative, Port, Positive, Section, Whole, function_address


class DataPlaneSettings(Section):
    """How processes exchange messages; payloads lie in shared memory."""

    transport: Literal["ipc", "tcp"] = "ipc"
    """ipc: sockets in the run's folder; tcp: free ports of this machine, encrypted, for this run's processes alone."""


class JoinSettings(Section):
    """Simulators that join the run by `polyrhythm join`, from any machine or Python (docs/joining.md)."""

    simulators: Whole = 0
    """Simulators that may join; with 0 no port is opened."""
    min_simulators: Whole = 0
    """Simulators, those of rollout.simulators included, that must be there before the run starts."""
    rows: Count | None = None
    """Rows of each of them; null: rollout.rows."""
    address: str = "127.0.0.1"
    """Address that the ports are opened on; the default is reached by no other machine, 0.0.0.0 by all."""
    port: Port = 7710
    """Port of the first place; each further one has the next."""
    reconnect_s: Positive = 20.0
    """Seconds within which a broken connection may come back; then its episodes run again elsewhere."""


class PrometheusSettings(Section):
    """An HTTP endpoint with the run's present numbers, for Prometheus (docs/metrics.md)."""

    port: Port | None = None
    """Port of http://ADDRESS:PORT/metrics; null: no endpoint."""
    address: str = "127.0.0.1"
    """Address that the port is opened on; one that other machines reach needs the three files below."""
    certificate: str = ""
    """File with the endpoint's certificate (PEM); then it speaks https."""
    key: str = ""
    """File with the certificate's private key."""
    client_ca: str = ""
    """File with the authority whose clients are answered; all others are refused."""

    @property
    def tls(self) -> tuple[str, str, str] | None:
        """The three files for TLS; None for plain http."""
        return (self.certificate, self.key, self.client_ca) if self.certificate else None

    @model_validator(mode="after")
    def _files_agree(self) -> PrometheusSettings:
        files = {"certificate": self.certificate, "key": self.key, "client_ca": self.client_ca}
        if missing := [name for name, file in files.items() if not file]:
            if len(missing) < len(files):
                raise InvalidSetting(missing[0], "''", "https needs certificate, key and client_ca; name all three")
            if not is_loopback(self.address):
                raise self.refusal(
                    "address",
                    "other machines reach it, and plain http would answer everybody; set certificate, key and "
                    "client_ca, or use 127.0.0.1",
                )
        return self


def is_loopback(address: str) -> bool:
    """Whether the address is unreachable from other machines."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def is_description(address: str) -> bool:
    """Whether `ray.address` names a file that describes a cluster, for checks."""
    return address.endswith((".yaml", ".yml"))


class RaySettings(Section):
    """The Ray cluster of `launcher: ray`; it starts, places and ends processes (docs/clusters.md)."""

    address: str = "local"
    """local: one on this machine for the run; auto: the one that runs here; HOST:PORT of a head; FILE.yaml: checks."""
    cpus_per_station: Positive = 1.0
    """CPUs of the cluster that each process of a station takes; 0.25 lets four share a core."""
    strategy: Literal["pack", "spread"] = "pack"
    """pack: stations on as few nodes as they fit; spread: on as many as there are."""
    start_s: Positive = 20.0
    """Seconds until the cluster must have a place for every station."""
    min_simulators: Count | None = None
    """Of the run's own simulators, how many work even if a lost node leaves no CPUs free for them; null: all."""
    min_generators: Count | None = None
    """The same of its generators."""
    working_dir: str = ""
    """Folder that Ray copies to every node, with modules of your own; empty: nodes have them already."""

    @model_validator(mode="after")
    def _is_an_address(self) -> RaySettings:
        host, _, port = self.address.rpartition(":")
        if (
            self.address in {"local", "auto"}
            or is_description(self.address)
            or (host and "//" not in host and port.isdecimal() and int(port) < 2**16)
        ):
            return self
        why = "no address of a cluster; write local, auto, or HOST:PORT as `ray start --head` prints it (port 6379)"
        if self.address.startswith("ray://"):
            why = "a run's driver is on a node of the cluster, no client of it; start it there, with auto or HOST:PORT"
        raise self.refusal("address", why)


class SupervisionSettings(Section):
    """When a station's process is given up and replaced, and when the run is."""

    heartbeat_s: Positive = 20.0
    """Seconds without a heartbeat (a stopped process; a call that lets no other thread run)."""
    start_s: Positive = 300.0
    """Seconds until a process must be ready, for each station that is in it."""
    reset_s: Positive = 180.0
    """Seconds for one reset of an environment."""
    step_s: Positive = 60.0
    """Seconds for one env step, or one observation."""
    pass_s: Positive = 180.0
    """Seconds for one forward pass of a generator."""
    update_s: Positive = 900.0
    """Seconds for one optimizer step, publication or save of the trainer, or to fetch an update's samples."""
    score_s: Positive = 60.0
    """Seconds for one call of the reward function; then its scorer is ended, and the sample is tried again."""
    max_failures: Whole = 100
    """Failures of stations that a run survives; fewer if one fails time and again in the same way."""
    max_start_failures: Whole = 2
    """The same for one station in a row before it is ready; one that somebody else killed does not count here."""
    forgive_s: Positive = 600.0
    """Failures count no more after so many seconds without one, if an update was done meanwhile."""


class CheckpointSettings(Section):
    """What is kept so that a lost trainer, or a lost run, goes on."""

    every_versions: Count = 1
    """The trainer's state is saved before every so many publications; a lost trainer goes back to the last."""
    run_every_s: NotNegative = 60.0
    """Seconds between two saves of the whole run, trainer's state and waiting samples included; the run goes on."""
    keep_last: Count = 2
    """So many saved runs, and states of the trainer, stay: the newest."""
    keep_every: Whole = 0
    """The trainer's state of every `keep_every`-th version stays, to evaluate or export the curve; 0 for none."""
    keep_best: Count = 1
    """So many policies that were evaluated during training stay: those with the highest lower end of the interval."""


class ScoringSettings(Section):
    """A reward function of your own, called on finished samples in processes of its own (docs/scoring.md)."""

    function: Annotated[str, function_address("my_rewards:judge")]
    """module:function of a sample, which returns a number or a Score; or module:Class, made once per process."""
    options: Mapping[str, Any] = {}
    """Further keyword arguments of the function, or of the class."""
    processes: Count = 1
    """Scorer processes."""
    at_a_time: Count = 1
    """Samples that each of them scores at a time, in threads; more than 1 for functions that wait for others."""
    max_attempts: Count = 3
    """Tries of a sample before it is dropped, with its group, and replaced."""
    try_first: bool = True
    """Call the function before the start, on an episode of a text environment."""
