"""The launcher of a run whose stations are on several hosts.

Which hosts there are is found by their agents: nodes that share memory are one host. The first host is main's. Agents
of nodes with different addresses start together; if two of these share memory all the same, the later one is ended.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from polyrhythm.errors import StartError
from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.agent import AgentSpec, Found, LocalNode, Node
from polyrhythm.plugins.cluster.hosts.client import DataClient, HostSilent, HostWatch, client_of
from polyrhythm.plugins.cluster.hosts.directory import (
    NO_NEEDS,
    HostDirectory,
    HostedPayloads,
    Needs,
    by_station,
    silence_limit,
)
from polyrhythm.plugins.cluster.hosts.memory import HostMemory, segment_sizes, start_cleaner
from polyrhythm.plugins.cluster.hosts.relay import MIRROR
from polyrhythm.plugins.cluster.hosts.survey import ClusterNodes, HostedNode, Survey
from polyrhythm.plugins.cluster.sealed import check_sealing
from polyrhythm.runtime.factories import NOBODY_JOINS, Joining, StationList
from polyrhythm.runtime.hosts import MAIN, HostView
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.runtime.local import LocalHosting, RunMemory, RunSockets
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.runtime.memory.published import shared_nbytes
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.messages import rank_name
from polyrhythm.runtime.processes.incarnation import SupervisionLimits
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.authentication import RunKeys, make_keys
from polyrhythm.runtime.transport.sockets import Sockets
from polyrhythm.specs import WeightsLayout

log = logging.getLogger(__name__)

#: How the names of all hosts begin but main's; a number follows.
_HOST = "host-"
#: Makes a client of a host's server: its name, the endpoint.
Connect = Callable[[str, str], DataClient]


class HostOpener:
    """silence_s: after which the processes of a host end that cannot reach main's; first: the number of the first host
    that is found; saves: says of a node's name which folder it has to see, "" for none. lost: hosts that are not to be
    found again."""

    def __init__(
        self,
        layout: ArenaLayout,
        weights: WeightsLayout,
        keys: RunKeys,
        silence_s: float,
        first: int = 1,
        saves: Callable[[str], str] = lambda _: "",
    ) -> None:
        self._layout, self._weights, self._keys, self._silence_s = layout, weights, keys, silence_s
        self.lost: AbstractSet[str] = frozenset()
        self.publishers: tuple[str, ...] = (MAIN,)
        self.known: list[q.Known] = []
        self.servers: dict[str, str] = {}
        self._numbers, self._saves = itertools.count(first), saves

    def open_main(self, node: Node, folder: Path, token: str) -> None:
        self._register(self._begin(node, MAIN, self.publishers, str(folder))(), token)

    def open(self, node: Node, *, publishes: bool = False) -> Found:
        """The host of a node. publishes: the trainer works there. StartError: its agent does not start."""
        host = self._next_name()
        publishers = (host, MAIN) if publishes else self.publishers
        found = self._begin(node, host, publishers)()
        if found.endpoint:
            self.publishers = publishers
        return self._register(found)

    def open_together(self, nodes: Sequence[Node], connect: Connect) -> list[Found]:
        """The hosts of several nodes, whose agents start at once. connect: to their servers."""
        begun = [self._begin(node, self._next_name(), self.publishers) for node in nodes]
        opened: list[q.Known] = []
        settled = []
        for node, wait in zip(nodes, begun, strict=True):
            found = wait()
            if found.endpoint:
                shared = _find_sharing(found, opened, connect)
                if shared is not None:
                    node.close()
                    found = shared
                else:
                    opened.append(_known(found))
            settled.append(self._register(found))
        return settled

    def _next_name(self) -> str:
        return f"{_HOST}{next(self._numbers)}"

    def _begin(self, node: Node, host: str, publishers: tuple[str, ...], folder: str = "") -> Callable[[], Found]:
        """Start the agent of a node; returns the function that waits for its answer."""
        spec = AgentSpec(
            host=host,
            known=tuple(known for known in self.known if known.host not in self.lost),
            folder=folder,
            layout=self._layout,
            weights=self._weights,
            publishers=publishers,
            address=node.address,
            keys=self._keys,
            main=self.servers.get(MAIN, ""),
            silence_s=self._silence_s,
            saves=self._saves(node.name),
        )
        wait = node.start_agent(spec)

        def found() -> Found:
            try:
                return wait()
            except StartError as error:
                raise StartError(f"{node.name}: {error}") from error

        return found

    def _register(self, found: Found, token: str = "") -> Found:
        """Add this host to those of the run, if it is another."""
        if found.endpoint:
            self.servers[found.host] = found.endpoint
            self.known.append(_known(found, token))
        return found


def next_number(logs: Path) -> int:
    """The number after those of the hosts that have logged there, in earlier parts of the run: their memory is gone,
    and a host of this part may be another machine."""
    found = (folder.name.removeprefix(_HOST) for folder in logs.glob(f"{_HOST}*"))
    return max((int(number) for number in found if number.isdecimal()), default=0) + 1


def in_rounds(nodes: Sequence[Node]) -> list[list[Node]]:
    """Nodes that are opened together, in order: the nodes of one address share memory as a rule, so they are not."""
    rounds: list[list[Node]] = []
    for node in nodes:
        free = (one for one in rounds if all(other.address != node.address for other in one))
        this = next(free, None)
        if this is None:
            rounds.append([node])
        else:
            this.append(node)
    return rounds


def _find_sharing(found: Found, opened: Sequence[q.Known], connect: Connect) -> Found | None:
    """The host among `opened` whose memory is that of the one that was found; None if there is none."""
    if not opened:
        return None
    client = connect(found.host, found.endpoint)
    try:
        answer = [bytes(piece).decode() for piece in client.ask(q.Sees(opened))]
    except HostSilent as silent:
        raise StartError(f"{silent}, just after its agent has started") from silent
    finally:
        client.close()
    if not answer:
        return None
    host, folder = answer
    return Found(host, folder)


def _known(found: Found, token: str = "") -> q.Known:
    return q.Known(found.host, Path(found.folder).name, found.token or token)


@dataclass(frozen=True, slots=True)
class StationNodes:
    """Where the processes of a run are. address: of this machine for other hosts; nodes: of each process, by
    `rank_name`; slots: of each simulator; trainer: the station that publishes, "" for none; leave: called when
    everything there has ended. cluster: whose nodes come and go, None where they are fixed; needs: of the processes
    there."""

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
    placement: StationNodes,
    check_report: Callable[[Mapping[str, float]], None] = lambda _: None,
    joining: Joining = NOBODY_JOINS,
) -> HostedStations:
    """The hosts of the run, and who hosts its stations there, each in a process on its node.

    check_report: as for the local launcher. StartError: a host lacks memory or an address; then nothing is left.
    """
    check_sealing()
    keys = make_keys()
    names = [rank_name(factory.name, rank) for factory, *seats in stations for rank in range(len(seats))]
    with ExitStack() as undo:
        agents = undo.enter_context(ExitStack())
        agents.callback(placement.leave)
        folder = SharedRunFolder(segment_sizes(layout, weights, MAIN, (MAIN,)))
        undo.callback(folder.remove)
        agents.enter_context(start_cleaner(folder.folder))
        sockets = Sockets("tcp", str(folder.folder), keys, lambda: None, wire.LARGEST, address=placement.address)
        agents.callback(sockets.close)
        saves = _saving(placement, names, logs.parent)
        opener = HostOpener(layout, weights, keys, silence_limit(limits.heartbeat_s), next_number(logs), saves)
        connect = partial(client_of, sockets)
        directory = _find_hosts(opener, folder, placement, names, agents, connect, limits.heartbeat_s)
        if len(opener.publishers) > 1:
            folder.add(MIRROR, shared_nbytes(weights))
        in_flight = InFlight(layout, check_report)
        hosting = LocalHosting(
            stations,
            RunMemory(in_flight, weights, folder.folder),
            limits,
            logs,
            network=RunSockets("tcp", placement.address, keys),
            spawn=directory.spawn,
            hosts=directory,
            joining=joining,
        )
        undo.callback(hosting.close)
        own = directory.view_from(HostView(MAIN, str(folder.folder), placement.address))
        memory = HostMemory(layout, weights, folder.folder, own, sockets)
        agents.callback(memory.close)
        directory.on_host = memory.add_host
        answer_s = min(q.ANSWER_S, limits.heartbeat_s / 2)
        directory.watch_hosts(lambda host, endpoint: HostWatch(memory.client(host, endpoint, answer_s)))
        agents.callback(directory.close)
        undo.pop_all()
    return HostedStations(folder, directory, hosting, in_flight, memory, agents)


def _saving(placement: StationNodes, names: Sequence[str], folder: Path) -> Callable[[str], str]:
    """Says of a node's name whether it has to see the run's folder: those of the trainer's ranks have to, and if it has
    several, so do all others, as a rank may go there. folder: of the run, made if there is a trainer."""
    ranks = by_station(names).get(placement.trainer, [])
    if not ranks:
        return lambda _: ""
    folder.mkdir(parents=True, exist_ok=True)
    own = placement.nodes[placement.trainer].name
    return lambda name: str(folder.resolve()) if name == own or len(ranks) > 1 else ""


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
    placement: StationNodes,
    names: Sequence[str],
    agents: ExitStack,
    connect: Connect,
    heartbeat_s: float,
) -> HostDirectory:
    """The hosts of main and of all nodes, the trainer's first: the others are told where weights are published.
    heartbeat_s: of silence make one lost."""
    own = LocalNode("main", placement.address)
    agents.callback(own.close)
    hosts.open_main(own, folder.folder, q.write_identity(folder.folder))
    nodes = {placement.nodes[name].name: placement.nodes[name] for name in names}
    found: dict[str, HostedNode] = {}

    def keep(node: Node, answer: Found) -> None:
        found[node.name] = HostedNode(node, answer.host, answer.folder)
        log.info("%s: host %s at %s", node.name, answer.host, node.address)

    for node in nodes.values():
        agents.callback(node.close)
    if placement.trainer in names:
        first = nodes.pop(placement.nodes[placement.trainer].name)
        keep(first, hosts.open(first, publishes=True))
    for together in in_rounds(list(nodes.values())):
        for node, answer in zip(together, hosts.open_together(together, connect), strict=True):
            keep(node, answer)
    at = {name: found[placement.nodes[name].name] for name in names}
    survey = None
    if placement.cluster is not None:
        survey = Survey(placement.cluster, hosts.open)
        agents.callback(survey.close)
    directory = HostDirectory(
        at,
        placement.slots,
        hosts.servers,
        hosts.publishers,
        survey,
        placement.needs,
        heartbeat_s,
        own=HostedNode(own, MAIN, str(folder.folder)),
    )
    hosts.lost = directory.lost
    if survey is not None:
        survey.usable = frozenset(found)
        survey.start()
    return directory
