"""The launcher of a run whose stations are on several hosts.

Which hosts there are is found by their agents: nodes that share memory are one host. The first host is main's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from polyrhythm.plugins.cluster.hosts.agent import Found
from polyrhythm.plugins.cluster.hosts.client import client_of
from polyrhythm.plugins.cluster.hosts.directory import NO_NEEDS, HostDirectory, Needs, silence_limit
from polyrhythm.plugins.cluster.hosts.identity import start_cleaner, write_identity
from polyrhythm.plugins.cluster.hosts.memory import MIRROR, HostMemory, segment_sizes
from polyrhythm.plugins.cluster.hosts.nodes import LocalNode, Node
from polyrhythm.plugins.cluster.hosts.opening import Connect, HostOpener, in_rounds, next_number
from polyrhythm.plugins.cluster.hosts.payloads import HostedPayloads
from polyrhythm.plugins.cluster.hosts.questions import ANSWER_S
from polyrhythm.plugins.cluster.hosts.survey import ClusterNodes, HostPlace, Survey
from polyrhythm.plugins.cluster.hosts.watch import HostWatch
from polyrhythm.plugins.cluster.transport.sealed import check_sealing
from polyrhythm.runtime.factories import NOBODY_JOINS, Joining, StationList
from polyrhythm.runtime.hosts import MAIN, HostView
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.runtime.local import LocalHosting, RunMemory, RunSockets
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.processes.supervision import SupervisionLimits
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.authentication import make_keys
from polyrhythm.runtime.transport.sockets import Sockets
from polyrhythm.specs import WeightsLayout

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the stations of a run are. address: of this machine for other hosts; nodes: of each station; slots: of each
    simulator; trainer: the station that publishes, "" for none; leave: called when everything there has ended. cluster:
    whose nodes come and go, None where they are fixed; needs: of the stations there."""

    address: str
    nodes: Mapping[str, Node]
    slots: Mapping[str, Sequence[str]]
    trainer: str = ""
    leave: Callable[[], None] = lambda: None
    cluster: ClusterNodes | None = None
    needs: Needs = NO_NEEDS


@dataclass(frozen=True, slots=True)
class HostedStations:
    """Stations on their nodes, before their start. memory: main's, of what all hosts hold; undo: closed after the
    hosting, before the folder goes."""

    folder: SharedRunFolder
    directory: HostDirectory
    hosting: LocalHosting
    in_flight: InFlight
    memory: HostMemory
    undo: ExitStack


def open_hosts(
    stations: StationList,
    layout: ArenaLayout,
    weights: WeightsLayout,
    limits: SupervisionLimits,
    logs: Path,
    places: Places,
    check_report: Callable[[Mapping[str, float]], None] = lambda _: None,
    joining: Joining = NOBODY_JOINS,
) -> HostedStations:
    """The hosts of the run, and who hosts its stations there, each in a process on its node.

    check_report: as for the local launcher. StartError: a host lacks memory or an address; then nothing is left.
    """
    check_sealing()
    keys, names = make_keys(), [factory.name for factory, *_ in stations]
    with ExitStack() as undo:
        agents = undo.enter_context(ExitStack())
        agents.callback(places.leave)
        folder = SharedRunFolder(segment_sizes(layout, weights, MAIN, (MAIN,)))
        undo.callback(folder.remove)
        agents.enter_context(start_cleaner(folder.folder))
        sockets = Sockets("tcp", str(folder.folder), keys, lambda: None, wire.LARGEST, address=places.address)
        agents.callback(sockets.close)
        opener = HostOpener(layout, weights, keys, silence_limit(limits.heartbeat_s), next_number(logs))
        connect = partial(client_of, sockets)
        directory = _find_hosts(opener, folder, places, names, agents, connect, limits.heartbeat_s)
        in_flight = InFlight(layout, check_report)
        hosting = LocalHosting(
            stations,
            RunMemory(in_flight, weights, folder.folder),
            limits,
            logs,
            network=RunSockets("tcp", places.address, keys),
            spawn=directory.spawn,
            hosts=directory,
            joining=joining,
        )
        undo.callback(hosting.close)
        own = directory.view_from(HostView(MAIN, str(folder.folder), places.address))
        memory = HostMemory(layout, weights, folder.folder, own, sockets)
        agents.callback(memory.close)
        directory.on_host = memory.add_host
        answer_s = min(ANSWER_S, limits.heartbeat_s / 2)
        directory.watch_hosts(lambda host, endpoint: HostWatch(memory.client(host, endpoint, answer_s)))
        agents.callback(directory.close)
        undo.pop_all()
    return HostedStations(folder, directory, hosting, in_flight, memory, agents)


def build_hosts_launcher(hosts: HostedStations) -> Launcher:
    """A run's launcher on these hosts; what a host holds is fetched from there over tcp, once for each host."""
    with ExitStack() as undo:
        undo.callback(hosts.folder.remove)
        undo.callback(hosts.undo.close)
        undo.callback(hosts.hosting.close)
        payloads = HostedPayloads(hosts.memory.arena(), MAIN, hosts.directory, hosts.in_flight)
        channel = hosts.memory.weights("cpu", None)
        undo.pop_all()
    return Launcher(hosts.hosting, payloads, channel, shared=hosts.folder, undo=hosts.undo)


def _find_hosts(
    hosts: HostOpener,
    folder: SharedRunFolder,
    places: Places,
    names: Sequence[str],
    agents: ExitStack,
    connect: Connect,
    heartbeat_s: float,
) -> HostDirectory:
    """The hosts of main and of all nodes, the trainer's first: the others are told where weights are published.
    heartbeat_s: of silence make one lost."""
    own = LocalNode("main", places.address)
    agents.callback(own.close)
    hosts.open_main(own, folder.folder, write_identity(folder.folder))
    nodes = {places.nodes[name].name: places.nodes[name] for name in names}
    found: dict[str, HostPlace] = {}

    def note(node: Node, answer: Found) -> None:
        found[node.name] = HostPlace(node, answer.host, answer.folder)
        log.info("%s: host %s at %s", node.name, answer.host, node.address)

    for node in nodes.values():
        agents.callback(node.close)
    if places.trainer in names:
        first = nodes.pop(places.nodes[places.trainer].name)
        note(first, hosts.open(first, publishes=True))
    for together in in_rounds(list(nodes.values())):
        for node, answer in zip(together, hosts.open_together(together, connect), strict=True):
            note(node, answer)
    if len(hosts.publishers) > 1:
        folder.add(MIRROR, hosts.mirror_nbytes)
    at = {name: found[places.nodes[name].name] for name in names}
    survey = None
    if places.cluster is not None:
        survey = Survey(places.cluster, hosts.open)
        agents.callback(survey.close)
    directory = HostDirectory(
        at,
        places.slots,
        hosts.servers,
        hosts.publishers,
        survey,
        places.needs,
        heartbeat_s,
        own=HostPlace(own, MAIN, str(folder.folder)),
    )
    hosts.lost = directory.lost
    if survey is not None:
        survey.usable = frozenset(found)
        survey.start()
    return directory
