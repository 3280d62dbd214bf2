"""The launcher of a run whose stations are on several hosts.

Which hosts there are is found by their agents: nodes that share memory are one host. The first host is main's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from polyrhythm.errors import StartError
from polyrhythm.runtime.factories import StationList
from polyrhythm.runtime.hosts.agent import AgentSpec, Found
from polyrhythm.runtime.hosts.identity import Known, write_identity
from polyrhythm.runtime.hosts.memory import MIRROR, HostMemory, segment_sizes
from polyrhythm.runtime.hosts.nodes import LocalNode, Node
from polyrhythm.runtime.hosts.payloads import HostedPayloads
from polyrhythm.runtime.hosts.questions import HostView
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.runtime.local import LocalHosting
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.process import Handle
from polyrhythm.runtime.processes.supervision import SupervisionLimits
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.authentication import RunKeys, make_keys
from polyrhythm.runtime.transport.sockets import Sockets
from polyrhythm.specs import WeightsLayout

log = logging.getLogger(__name__)

#: The name of main's host.
MAIN = "main"


@dataclass(frozen=True, slots=True)
class Places:
    """Where the stations of a run are. address: of this machine for other hosts; nodes: of each station; slots: of each
    simulator; trainer: the station that publishes, "" for none; leave: called when everything there has ended."""

    address: str
    nodes: Mapping[str, Node]
    slots: Mapping[str, Sequence[str]]
    trainer: str = ""
    leave: Callable[[], None] = lambda: None


class _Hosts:
    """Finds the hosts of a run, one after another."""

    def __init__(self, layout: ArenaLayout, weights: WeightsLayout, keys: RunKeys) -> None:
        self._layout, self._weights, self._keys = layout, weights, keys
        self.publishers: tuple[str, ...] = (MAIN,)
        self.known: list[Known] = []
        self.servers: dict[str, str] = {}

    def open(self, node: Node, folder: str = "", token: str = "", *, publishes: bool = False) -> Found:
        """The host of a node. folder, token: of main's, which has one; publishes: the trainer works there. StartError:
        its agent does not start."""
        host = MAIN if folder else f"host-{len(self.servers)}"
        publishers = (host, MAIN) if publishes and not folder else self.publishers
        spec = AgentSpec(
            host=host,
            known=tuple(self.known),
            folder=folder,
            layout=self._layout,
            weights=self._weights,
            publishers=publishers,
            address=node.address,
            keys=self._keys,
        )
        try:
            found = node.start_agent(spec)
        except StartError as error:
            raise StartError(f"{node.name}: {error}") from error
        if found.endpoint:
            self.publishers = publishers
            self.servers[found.host] = found.endpoint
            self.known.append(Known(found.host, Path(found.folder).name, found.token or token))
        return found


def build_hosts_launcher(
    stations: StationList,
    layout: ArenaLayout,
    weights: WeightsLayout,
    limits: SupervisionLimits,
    logs: Path,
    places: Places,
    check_report: Callable[[Mapping[str, float]], None] = lambda _: None,
) -> Launcher:
    """Each station in a process on its node; what a host holds is fetched from there over tcp, once for each host.

    check_report: as for the local launcher. StartError: a host lacks memory or an address; then nothing is left.
    """
    keys, names = make_keys(), [factory.name for factory, *_ in stations]
    with ExitStack() as undo:
        agents = undo.enter_context(ExitStack())
        agents.callback(places.leave)
        folder = SharedRunFolder(segment_sizes(layout, weights, MAIN, (MAIN,)))
        undo.callback(folder.remove)
        hosts = _Hosts(layout, weights, keys)
        views = _find_hosts(hosts, folder, places, names, agents)
        own = views[""]
        hosting = LocalHosting(
            stations,
            layout,
            folder.folder,
            weights,
            limits,
            logs,
            transport="tcp",
            check_report=check_report,
            spawn=_spawn_on(places.nodes),
            views=views,
            address=places.address,
            keys=keys,
        )
        undo.callback(hosting.close)
        sockets = Sockets("tcp", str(folder.folder), keys, lambda: None, wire.LARGEST, address=places.address)
        agents.callback(sockets.close)
        memory = HostMemory(layout, weights, folder.folder, own, sockets)
        agents.callback(memory.close)
        payloads = HostedPayloads(memory.arena(), MAIN, {name: views[name].own for name in names})
        channel = memory.weights("cpu", None)
        undo.pop_all()
    return Launcher(hosting, payloads, channel, folder=folder, undo=agents)


def _find_hosts(
    hosts: _Hosts, folder: SharedRunFolder, places: Places, names: Sequence[str], agents: ExitStack
) -> dict[str, HostView]:
    """What each station knows of the hosts, and under "" what main knows."""
    own = LocalNode("main", places.address)
    agents.callback(own.close)
    token = write_identity(folder.folder)
    hosts.open(own, str(folder.folder), token)
    found: dict[str, Found] = {}
    trainers_first = sorted(names, key=lambda name: name != places.trainer)
    for name in trainers_first:
        node = places.nodes[name]
        if node.name not in found:
            agents.callback(node.close)
            found[node.name] = hosts.open(node, publishes=name == places.trainer)
            log.info("%s: host %s at %s", node.name, found[node.name].host, node.address)
    if len(hosts.publishers) > 1:
        folder.add(MIRROR, segment_sizes(hosts._layout, hosts._weights, MAIN, hosts.publishers)[MIRROR])
    slots = {slot: found[places.nodes[name].name].host for name in names for slot in places.slots.get(name, ())}
    views = {
        name: HostView(
            found[places.nodes[name].name].host,
            found[places.nodes[name].name].folder,
            places.nodes[name].address,
            hosts.servers,
            slots,
            hosts.publishers,
        )
        for name in names
    }
    views[""] = HostView(MAIN, str(folder.folder), places.address, hosts.servers, slots, hosts.publishers)
    return views


def _spawn_on(nodes: Mapping[str, Node]) -> Callable[[ChildSpec, IO[bytes]], Handle]:
    return lambda spec, file: nodes[spec.station].spawn(spec, file)
