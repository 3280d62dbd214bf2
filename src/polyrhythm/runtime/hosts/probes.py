"""Asks hosts whether they answer, each in a thread of its own, so that nobody waits for one that is silent."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import zmq

from polyrhythm.runtime.hosts import questions as q
from polyrhythm.runtime.hosts.client import DataClient, HostSilent


class HostProbes:
    """clients: of the servers of all hosts that can be asked."""

    def __init__(self, clients: Mapping[str, DataClient]) -> None:
        self._clients = clients
        self._asked: dict[str, threading.Thread] = {}
        self._silent: dict[str, bool] = {}

    def begin(self, hosts: Iterable[str]) -> None:
        """Ask those of these hosts that are not being asked."""
        for host in hosts:
            if host in self._clients and host not in self._asked:
                thread = threading.Thread(target=self._ask, args=(host,), name=f"ask-{host}", daemon=True)
                self._asked[host] = thread
                thread.start()

    @property
    def asked(self) -> set[str]:
        """The hosts that have yet to answer."""
        return set(self._asked)

    def take_silent(self) -> list[str]:
        """The hosts that were found to be silent since the last call; all that have answered can be asked again."""
        found = [host for host in self._asked if host in self._silent]
        for host in found:
            del self._asked[host]
        return [host for host in found if self._silent.pop(host)]

    def _ask(self, host: str) -> None:
        """Consumes: nothing. Waits for: the host's answer. Unblocked by: it, or the client's limit. Produces: whether
        it is silent."""
        silent = True
        try:
            self._clients[host].ask(q.Held())
            silent = False
        except (HostSilent, LookupError, zmq.ZMQError):  # the last: the run ends
            pass
        finally:
            self._silent[host] = silent
