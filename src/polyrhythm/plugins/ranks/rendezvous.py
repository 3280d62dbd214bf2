"""Where the ranks of an incarnation meet, and the network interface by which they connect.

    one host       a file in the run's private folder (torch's FileStore); the loopback interface, or that of the host's
                   address where containers with addresses of their own share the memory
    several hosts  a store that rank 0 serves at a free port of its host's address (torch's TCPStore), which the other
                   ranks read over the run's sealed connections; the interface that has the host's address

The address and a word of its own go by the file `Meeting.find` reads, so that a rank of an earlier incarnation, whose
port may be in use again, finds nothing. What torch then sends is neither authenticated nor encrypted.

Invariant: no rank builds a process group before all have come, or after the deadline.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address

import psutil
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from polyrhythm.errors import StartError, first_line
from polyrhythm.files import atomic_write
from polyrhythm.plugins.ranks.store import serve_store
from polyrhythm.training.ranks import Meeting

#: Timeout of what has no deadline of its own: supervision ends a rank that waits too long much earlier.
FOREVER = timedelta(days=7)
#: Environment variables by which gloo and NCCL choose the network interface.
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
#: Seconds after the deadline until ranks other than 0 give up, and between two looks for rank 0's file: rank 0 knows
#: who has come, so it shall be the first.
_LATER_S, _AGAIN_S = 2.0, 0.1


def is_far(meeting: Meeting) -> bool:
    """Whether the ranks are on several hosts."""
    return len(set(meeting.hosts)) > 1


def meet(rank: int, size: int, meeting: Meeting) -> Store:
    """A store of all ranks, once all have come. StartError: not all have by `meeting.by`."""
    store, address = _open_store(rank, meeting) if is_far(meeting) else (FileStore(str(meeting.file), size), "")
    try:
        store.set_timeout(left(meeting, _LATER_S))
        store.set(f"here/{rank}", "1")
        store.wait([f"here/{other}" for other in range(size)], left(meeting, _LATER_S if rank else 0.0))
    except RuntimeError as error:  # torch's
        raise StartError(_who_came(store, size, meeting, address)) from error
    store.set_timeout(FOREVER)
    return store


def left(meeting: Meeting, more_s: float = 0.0) -> timedelta:
    """Time until the deadline, and so many seconds; at least one, as torch takes none for no limit."""
    seconds = max(1.0, meeting.by + more_s - time.monotonic())
    return timedelta(seconds=min(seconds, FOREVER.total_seconds()))


def _open_store(rank: int, meeting: Meeting) -> tuple[Store, str]:
    """Rank 0's store, and its address. StartError: it cannot be reached."""
    if rank == 0:
        try:
            store, port = serve_store(meeting.address, FOREVER)
        except OSError as error:
            raise StartError(
                f"the trainer's ranks cannot meet at {meeting.address}, the address of rank 0's host "
                f"{meeting.hosts[0]} ({error.strerror or error}); start the cluster there with an address of that "
                "machine"
            ) from error
        word = secrets.token_hex(8)
        with atomic_write(meeting.file) as file:
            file.write_text(json.dumps([meeting.address, port, word]))
        return PrefixStore(word, store), f"{meeting.address}:{port}"
    while not (found := meeting.find()):  # a question to rank 0's host, which answers at once
        if time.monotonic() >= meeting.by + _LATER_S:
            raise StartError(
                f"it came, but rank 0 ({meeting.hosts[0]}) has not said in time (supervision.start_s) where the ranks "
                f"meet; {_READ_LOG}"
            )
        time.sleep(_AGAIN_S)
    address, port, word = json.loads(found)
    try:
        store = TCPStore(address, port, is_master=False, timeout=left(meeting, _LATER_S), wait_for_workers=False)
    except RuntimeError as error:
        raise StartError(
            f"it cannot connect from {meeting.hosts[rank]} to rank 0 ({meeting.hosts[0]}); "
            f"{_check_network(f'{address}:{port}')}"
        ) from error
    return PrefixStore(word, store), f"{address}:{port}"


def _who_came(store: Store, size: int, meeting: Meeting, address: str) -> str:
    came, absent = list[int](), list[int]()
    try:
        for rank in range(size):
            (came if store.check([f"here/{rank}"]) else absent).append(rank)
    except RuntimeError:  # rank 0 has ended, with its store
        return f"rank 0 ended while the ranks met; {_READ_LOG}"
    check = f"{_READ_LOG}; if it runs, {_check_network(address)}" if address else _READ_LOG
    names = [f"{rank} ({meeting.hosts[rank]})" if address else str(rank) for rank in range(size)]
    there, missing = (", ".join(names[rank] for rank in ranks) for ranks in (came, absent))
    return f"of {size} ranks only {there} came in time (supervision.start_s), not {missing}; {check}"


_READ_LOG = "its log says how far it got"


def _check_network(address: str) -> str:
    return (
        f"each rank's host has to reach {address}, and the ranks each other at any port: look for a firewall between "
        "these hosts, and for another interface (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name one)"
    )


def cannot_connect(rank: int, meeting: Meeting, error: Exception) -> StartError:
    """The error of a rank that has met the others and cannot connect to them."""
    why = first_line(error, type(error).__name__)
    return StartError(
        f"it has met the other ranks but cannot connect to all of them from {meeting.hosts[rank]} ({why}); "
        f"{_check_network(f'rank 0 on {meeting.hosts[0]}')}"
    )


@contextmanager
def connecting(meeting: Meeting) -> Iterator[None]:
    """Connections opened in the context use the interface of the ranks' host, unless the user has chosen one."""
    interface = find_interface(meeting.address) if meeting.address else "lo"
    added = [name for name in _INTERFACES if interface and name not in os.environ]
    os.environ.update(dict.fromkeys(added, interface))
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def find_interface(address: str) -> str:
    """The network interface that has this address, "" if none has, as behind a translated address."""
    try:
        wanted = {ip_address(found[4][0]) for found in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)}
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            if found.family in (socket.AF_INET, socket.AF_INET6) and ip_address(found.address) in wanted:
                return name
    return ""
