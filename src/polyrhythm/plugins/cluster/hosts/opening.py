"""Opens the hosts of a run: starts the agents of its nodes, and finds out which nodes share memory.

Agents of nodes with different addresses start together. Such nodes may share memory all the same: then two agents have
made a host each, and the later one is ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from polyrhythm.errors import StartError
from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.agent import AgentSpec, Found
from polyrhythm.plugins.cluster.hosts.client import DataClient, HostSilent
from polyrhythm.plugins.cluster.hosts.identity import Known
from polyrhythm.plugins.cluster.hosts.nodes import Node
from polyrhythm.runtime.hosts import MAIN
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.published import shared_nbytes
from polyrhythm.runtime.transport.authentication import RunKeys
from polyrhythm.specs import WeightsLayout

#: How the names of all hosts begin but main's; a number follows.
_HOST = "host-"
#: Makes a client of a host's server: its name, the endpoint.
Connect = Callable[[str, str], DataClient]


class HostOpener:
    """silence_s: after which the processes of a host end that cannot reach main's; first: the number of the first host
    that is found. lost: hosts that are not to be found again."""

    def __init__(
        self, layout: ArenaLayout, weights: WeightsLayout, keys: RunKeys, silence_s: float, first: int = 1
    ) -> None:
        self._layout, self._weights, self._keys, self._silence_s = layout, weights, keys, silence_s
        self.lost: AbstractSet[str] = frozenset()
        self.publishers: tuple[str, ...] = (MAIN,)
        self.known: list[Known] = []
        self.servers: dict[str, str] = {}
        self._numbers = itertools.count(first)

    @property
    def mirror_nbytes(self) -> int:
        """Bytes of a mirror of the published weights."""
        return shared_nbytes(self._weights)

    def open_main(self, node: Node, folder: Path, token: str) -> None:
        """Main's host, which has its folder."""
        self._settle(self._begin(node, MAIN, self.publishers, str(folder))(), token)

    def open(self, node: Node, *, publishes: bool = False) -> Found:
        """The host of a node. publishes: the trainer works there. StartError: its agent does not start."""
        host = self._next_name()
        publishers = (host, MAIN) if publishes else self.publishers
        found = self._begin(node, host, publishers)()
        if found.endpoint:
            self.publishers = publishers
        return self._settle(found)

    def open_together(self, nodes: Sequence[Node], connect: Connect) -> list[Found]:
        """The hosts of several nodes, whose agents start at once. connect: to their servers."""
        begun = [self._begin(node, self._next_name(), self.publishers) for node in nodes]
        opened: list[Known] = []
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
            settled.append(self._settle(found))
        return settled

    def _next_name(self) -> str:
        return f"{_HOST}{next(self._numbers)}"

    def _begin(self, node: Node, host: str, publishers: tuple[str, ...], folder: str = "") -> Callable[[], Found]:
        """Start the agent of a node; what waits for what it finds."""
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
        )
        wait = node.start_agent(spec)

        def found() -> Found:
            try:
                return wait()
            except StartError as error:
                raise StartError(f"{node.name}: {error}") from error

        return found

    def _settle(self, found: Found, token: str = "") -> Found:
        """The run has this host, if it is another."""
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


def _find_sharing(found: Found, opened: Sequence[Known], connect: Connect) -> Found | None:
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


def _known(found: Found, token: str = "") -> Known:
    return Known(found.host, Path(found.folder).name, found.token or token)
