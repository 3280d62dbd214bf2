"""Whether a run can have a Ray cluster, decided without Ray, whose own attempts may wait for minutes: what its settings
ask, whether a cluster answers at the address and takes the token here, and whether its nodes have the same versions and
enough CPUs.

Messages between processes have the form of one version of polyrhythm, and saved states and modules of one's own are
read by the Python that wrote them, patch versions aside.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from polyrhythm.config.sections.running import is_description
from polyrhythm.errors import ConfigError, MissingError, StartError, install_command
from polyrhythm.plugins.cluster.description import read_description
from polyrhythm.runtime.devices import CPU

if TYPE_CHECKING:
    from polyrhythm.config.schema import RunConfig
    from polyrhythm.runtime.factories import Resources

#: Seconds until a cluster's port must be open, and from then on until it must have answered.
_REACH_S = 5.0
#: What begins a connection of HTTP/2, which gRPC uses: the preface and an empty frame of settings.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
#: The kind of HTTP/2's frames of settings, which are a server's first, and of TLS's alerts.
_SETTINGS, _ALERT = b"\x04", b"\x15"
LOCAL, AUTO = "local", "auto"
#: What Ray itself asks first, and the word in the answer of a cluster that does not take the token.
_QUESTION, _NO_TOKEN = "/ray.rpc.NodeInfoGcsService/GetClusterId", b"InvalidAuthToken"
#: What ends an answer, without an error; the bytes that are read at once and at most; seconds for the rest of an end.
_STATUS, _NO_ERROR, _PIECE, _MOST, _REST_S = b"grpc-status", b"grpc-status\x010", 4096, 1 << 16, 0.5
#: Kinds of HTTP/2's frames, and the flags of the last one of each.
_HEADERS, _DATA, _END_HEADERS, _END_STREAM = 1, 0, 4, 1


def check_launcher(config: RunConfig, *, starts: bool = True) -> None:
    """Whether a run can be launched on its Ray cluster. starts: it is about to start, so a description of one does not
    do. MissingError: Ray is not installed, or no cluster answers at the address. ConfigError: stations cannot take
    turns there, or the description is wrong."""
    placement, address = config.placement, config.ray.address
    asked = [placement.simulators, placement.generators, placement.trainer]
    if placement.sharing == "lease" and not placement.preset and all(one.devices in (None, CPU) for one in asked):
        raise ConfigError(
            "placement.sharing = lease: no station has a device, and those on CPUs are on several nodes; name devices "
            "(such as placement.preset=colocated), or set it to share"
        )
    if is_description(address):
        read_description(address)
        if starts:
            raise ConfigError(
                f"ray.address = {address}: it describes a cluster, for --check; name the address of one that runs"
            )
        return
    check_ray_installed()
    try:
        check_reachable(address)
    except StartError as error:
        raise MissingError(str(error)) from error


def check_ray_installed() -> None:
    """MissingError: it is not."""
    if importlib.util.find_spec("ray") is None:
        command = install_command("ray")
        raise MissingError(f"launcher = ray: the package ray is not installed; install it: {command}")


def check_reachable(address: str, reach_s: float = _REACH_S) -> None:
    """StartError unless a server of gRPC, as a cluster's head is, answers at HOST:PORT in time: with a frame of
    settings or, where it wants TLS, with an alert or nothing; or if it does not take the token here, or the absence of
    one, or takes what has none though RAY_AUTH_MODE is token. `local` and `auto` are not looked for."""
    if address == AUTO:
        _check_token(address)
    if not address.rpartition(":")[0]:
        return
    mode = _auth_mode()
    wants = _ask(address, "" if mode in ("token", "disabled") else None, reach_s)
    if mode == "token":
        if wants is False:
            raise StartError(
                f"RAY_AUTH_MODE = token: the cluster asks for none (ray.address = {address}), so nothing would start "
                "there; unset RAY_AUTH_MODE here, or set it where the cluster is started"
            )
        _check_token(address)
        wants = wants and _ask(address, own_token(), reach_s)
    if wants:
        raise StartError(
            f"ray.address = {address}: the cluster wants its token, which is not the one here; set RAY_AUTH_MODE=token "
            "and copy ~/.ray/auth_token from its head node (RAY_AUTH_TOKEN and RAY_AUTH_TOKEN_PATH go before that file)"
        )


def _ask(address: str, token: str | None, reach_s: float) -> bool | None:
    """Whether the cluster at HOST:PORT refuses a question with this token, "" for none; None: it does not say, or is
    not asked, as without a token. StartError: no cluster answers there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), reach_s) as connection:
            until = time.monotonic() + reach_s
            connection.settimeout(reach_s)
            connection.sendall(_HELLO)
            connection.settimeout(_left(until))
            answer = connection.recv(9)
            asks = answer[3:4] == _SETTINGS and token is not None
            refused = _refuses_token(connection, token or "", until) if asks else None
    except TimeoutError as error:
        raise _refusal(address, f"no cluster answers there within {reach_s:g} s") from error
    except ConnectionResetError:
        return None
    except (OSError, OverflowError, UnicodeError) as error:
        raise _refusal(address, f"no cluster answers there ({error})") from error
    if answer.startswith(b"HTTP"):
        raise _refusal(address, "a web server answers there, which is no head node (perhaps Ray's dashboard)")
    if answer and answer[3:4] != _SETTINGS and answer[:1] != _ALERT:
        raise _refusal(address, f"what answers there is no head node (it says {answer!r})")
    return refused


def _check_token(address: str) -> None:
    """StartError: RAY_AUTH_MODE asks for a token, for the cluster at this address, and none is here."""
    if _auth_mode() != "token":
        return
    file = os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    try:
        if own_token():
            return
        why = "is empty"
    except (OSError, ValueError, RuntimeError) as error:
        why = f"cannot be read ({getattr(error, 'strerror', None) or error})"
    raise StartError(
        f"RAY_AUTH_MODE = token: RAY_AUTH_TOKEN is not set and {file} {why}; copy ~/.ray/auth_token from the head node "
        f"of the cluster (ray.address = {address}), or unset RAY_AUTH_MODE if that asks for none"
    )


def own_token() -> str:
    """The token that Ray uses here, from the first of its places that is set, where RAY_AUTH_MODE is token. OSError,
    ValueError, RuntimeError: its file cannot be read."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser().read_text().strip()


def _auth_mode() -> str:
    names = ("RAY_AUTH_MODE", "RAY_auth_mode")  # Ray knows both
    return next(filter(None, map(os.environ.get, names)), "disabled").lower()


def _refuses_token(connection: socket.socket, token: str, until: float) -> bool | None:
    """Whether a cluster, which has been greeted, says by then and in 64 KiB that it does not take the token, or that it
    does; None if it says nothing of it."""
    said = bytearray()
    headers = {":method": "POST", ":scheme": "http", ":path": _QUESTION, ":authority": "ray", "te": "trailers"}
    headers |= {"content-type": "application/grpc"} | ({"authorization": f"Bearer {token}"} if token else {})
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
    with suppress(OSError):
        connection.settimeout(_left(until))
        connection.sendall(_frame(_HEADERS, _END_HEADERS, block) + _frame(_DATA, _END_STREAM, bytes(5)))
        while _NO_TOKEN not in said and _NO_ERROR not in said and len(said) < _MOST:
            connection.settimeout(min(_left(until), _REST_S if _STATUS in said else math.inf))
            if not (more := connection.recv(_PIECE)):
                break
            said += more
    return True if _NO_TOKEN in said else False if _NO_ERROR in said else None


def _left(until: float) -> float:
    """Seconds until then. TimeoutError if none are left."""
    if (left := until - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def _text(text: str) -> bytes:
    """A name or a value of a header, as HPACK has what is not compressed."""
    content = text.encode()
    if len(content) < 127:
        return bytes([len(content)]) + content
    rest, size = len(content) - 127, b"\x7f"
    while rest >= 128:
        rest, size = rest >> 7, size + bytes([rest & 127 | 128])
    return size + bytes([rest]) + content


def _frame(kind: int, flags: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", 1) + content


def _refusal(address: str, problem: str) -> StartError:
    return StartError(
        f"ray.address = {address}: {problem}; start one with `ray start --head` and name the address that it prints, "
        f"or set ray.address to {LOCAL} for one on this machine"
    )


_RAY_SAYS = re.compile(r"Version mismatch:.*?Ray: (\S+).*?Python: (\S+).*?Ray: (\S+).*?Python: (\S+)", re.DOTALL)


class Versions(NamedTuple):
    """Of polyrhythm, as it is installed, and of Python, major and minor."""

    polyrhythm: str
    python: str


def own_versions() -> Versions:
    return Versions(metadata.version("polyrhythm"), f"{sys.version_info.major}.{sys.version_info.minor}")


def why_not(run: Versions, node: Versions) -> str:
    """Why a node with these versions cannot be of this run, in one sentence; "" if it can."""
    if node.polyrhythm != run.polyrhythm:
        return f"polyrhythm {node.polyrhythm} is installed there, {run.polyrhythm} runs here; install the same"
    if node.python != run.python:
        return f"Python {node.python} runs there, {run.python} here; start Ray there with Python {run.python}"
    return ""


def ray_differs(said: str) -> str:
    """What Ray says of a cluster with another Ray or Python, in one sentence; "" if it says something else."""
    found = _RAY_SAYS.search(said)
    if found is None:
        return ""
    ray, python, own_ray, own_python = found.groups()
    return (
        f"the cluster has Ray {ray} and Python {python}, here are Ray {own_ray} and Python {own_python}; start it with "
        "the same, or train from an environment that has what the cluster has"
    )


class Bundle(NamedTuple):
    """CPUs that are wanted on one node. processes: that share them; node: its name, "" for any."""

    cpus: float
    processes: int = 1
    node: str = ""


def bundles_of(seats: Mapping[str, Resources], cpus_per_station: float) -> list[Bundle]:
    """What the processes of these seats want of a cluster: one for each on the CPU, one for each device."""
    on_device = group_by_device(seats)
    alone = len(seats) - sum(map(len, on_device.values()))
    shared = [Bundle(len(own) * cpus_per_station, len(own), seats[own[0]].node) for own in on_device.values()]
    return [Bundle(cpus_per_station)] * alone + shared


def group_by_device(seats: Mapping[str, Resources]) -> dict[str, list[str]]:
    """The processes on each device."""
    found: dict[str, list[str]] = {}
    for name, seat in seats.items():
        if seat.device != CPU:
            found.setdefault(seat.device, []).append(name)
    return found


def check_room(bundles: Sequence[Bundle], cpus_per_station: float, cpus: Mapping[str, float]) -> None:
    """Raise StartError for what can never fit. cpus: of each node that is there now, by name."""
    if gone := {bundle.node for bundle in bundles} - {"", *cpus}:
        raise StartError(f"{min(gone)} has left the cluster since its devices were counted; start again")
    total, most, setting = sum(cpus.values()), max(cpus.values(), default=0.0), f"{cpus_per_station:g}"
    wanted = dict.fromkeys(cpus, 0.0)
    for bundle in bundles:
        if bundle.node:
            wanted[bundle.node] += bundle.cpus
    remedy = "lower it (0.25 shares a core among four stations), use fewer stations, or add nodes"
    if small := [node for node in cpus if wanted[node] > cpus[node]]:
        lacking = ", ".join(f"{wanted[node]:g} on {node}, which has {cpus[node]:g}" for node in small)
        raise StartError(
            f"ray.cpus_per_station = {setting}: CPUs are wanted for processes on devices: {lacking}; {remedy}"
        )
    if sum(bundle.cpus for bundle in bundles) > total or max(bundle.cpus for bundle in bundles) > most:
        found = ", ".join(f"{count:g} on {node}" for node, count in cpus.items())
        raise StartError(
            f"ray.cpus_per_station = {setting}: {describe_wanted(bundles)}, {total:g} are in the cluster ({found}); "
            f"{remedy}"
        )


def node_name(node: Mapping[str, Any]) -> str:
    """A node's name for people, from Ray's record of it: `node 10.0.0.7 (5be1f3a2)`."""
    return f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]})"


def cpus_by_name(nodes: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """CPUs of each node, by its name, from Ray's records of them."""
    return {node_name(node): float(node["Resources"].get("CPU", 0.0)) for node in nodes}


def describe_wanted(bundles: Sequence[Bundle]) -> str:
    cpus, processes = sum(bundle.cpus for bundle in bundles), sum(bundle.processes for bundle in bundles)
    return f"{cpus:g} CPUs are wanted for {processes} stations"
