"""Watches a cluster for nodes that come: a thread of its own looks who is there and opens a host on each new one.

A node whose host was lost and that is there again (its link was cut, for example) is a new one: what it held is gone,
its agent is ended, and another one gets another host.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.cluster.hosts.agent import FOUND_S, Found, Node

log = logging.getLogger(__name__)

#: Seconds between two looks; until a node is tried again on which no host could be opened.
_LOOK_S, _AGAIN_S = 2.0, 10.0


@dataclass(frozen=True, slots=True)
class Sight:
    """What was seen of a cluster. free: of each node that is alive, by name, CPUs that nobody has reserved; reserved:
    of each process that has room reserved, the name of the node; with_devices: nodes where the run has devices."""

    free: Mapping[str, float]
    reserved: Mapping[str, str]
    with_devices: frozenset[str] = frozenset()


class ClusterLost(Exception):
    """The cluster can neither start processes nor answer any more; the message has the reason."""


class ClusterNodes(Protocol):
    """look: the nodes that are alive, by name, and what is free there; called by the survey's thread alone, it may take
    seconds. OSError: the cluster does not answer. ClusterLost: it never will."""

    def look(self) -> tuple[Mapping[str, Node], Sight]: ...


@dataclass(frozen=True, slots=True)
class HostedNode:
    """A node, the host that it is on, and the run's folder there."""

    node: Node
    host: str
    folder: str


class Survey:
    """open_host: opens the host of a node, lost hosts are not to be found there again. sight: what was seen last.
    usable: names of the nodes that need nothing; set by the caller of `take`. failure: why the cluster is lost, ""
    while it is not."""

    def __init__(self, cluster: ClusterNodes, open_host: Callable[[Node], Found], look_s: float = _LOOK_S) -> None:
        self.sight: Sight | None = None
        self.usable: frozenset[str] = frozenset()
        self.failure = ""
        self._cluster, self._open_host, self._look_s = cluster, open_host, look_s
        self._found: queue.SimpleQueue[tuple[HostedNode, str]] = queue.SimpleQueue()
        self._offered: dict[str, str] = {}
        self._tried: dict[str, float] = {}
        self._opened: list[Node] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="survey", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> list[tuple[HostedNode, str]]:
        """The nodes that came since the last call, each with the endpoint of a new host's server, or ""."""
        taken = []
        while not self._found.empty():
            taken.append(self._found.get())
        return taken

    def _run(self) -> None:
        """Consumes: the cluster's word on its nodes. Waits for: time. Unblocked by: `look_s`, or `close`. Produces:
        `sight`, and new nodes with their hosts; or `failure`, and ends. A look that fails for any other reason is
        logged; the next one follows."""
        while not self._over.wait(self._look_s):
            try:
                self._look()
            except ClusterLost as lost:
                self.failure = str(lost)
                return
            except OSError as error:
                log.warning("the cluster does not say which nodes it has: %s", error)
            except Exception:
                log.exception("a look at the cluster failed; nodes that come are not used while this lasts")

    def _look(self) -> None:
        """Open the hosts of nodes that came, unless that failed just now."""
        nodes, self.sight = self._cluster.look()
        for name, node in nodes.items():
            again = self._tried.get(name, -_AGAIN_S) + _AGAIN_S
            if name in self.usable:
                self._offered.pop(name, None)
            elif name not in self._offered and not self._over.is_set() and time.monotonic() >= again:
                self._open(node)

    def _open(self, node: Node) -> None:
        self._tried[node.name] = time.monotonic()
        try:
            node.close()  # the agent of a host that is lost
            found = self._open_host(node)
        except (PolyrhythmError, OSError) as error:
            log.warning("%s is there, but cannot be used: %s; it is tried again", node.name, error)
            self._tried[node.name] = time.monotonic()
            return
        del self._tried[node.name]
        self._opened.append(node)
        self._offered[node.name] = found.host
        self._found.put((HostedNode(node, found.host, found.folder), found.endpoint))

    def withdraw(self, name: str) -> None:
        """A node of this name is no longer usable: it is opened again once it is there."""
        self.usable -= {name}
        self._offered.pop(name, None)

    def close(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(FOUND_S)
        for node in self._opened:
            node.close()
