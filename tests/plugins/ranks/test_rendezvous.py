"""Where ranks meet: a store at rank 0's address, a deadline, and one error that says who came."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import pytest
from tests.long import long

from polyrhythm.errors import StartError
from polyrhythm.plugins.ranks.rendezvous import connecting, find_interface, meet
from polyrhythm.training.ranks import Meeting

HERE = "127.0.0.1"


def read(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""


def meeting_of(folder: Path, hosts: str = "abc", by_s: float = 20.0, address: str = HERE) -> Meeting:
    file = folder / "trainer.0.ranks"
    return Meeting(file, tuple(hosts), address, partial(read, file), time.monotonic() + by_s)


def met(ranks: Sequence[int], meeting: Meeting) -> dict[int, object]:
    """What comes of these ranks of three, each in a thread: a store, or the text of the error."""
    found: dict[int, object] = {}

    def try_to(rank: int) -> None:
        try:
            found[rank] = meet(rank, 3, meeting)
        except StartError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=try_to, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return found


@pytest.mark.parametrize("hosts", ["abc", "aab", "aaa", ""])
def test_all_ranks_get_one_store(hosts: str, tmp_path: Path) -> None:
    stores = met([2, 0, 1], meeting_of(tmp_path, hosts))
    for rank, store in stores.items():
        store.set(f"{rank}", "x")  # type: ignore[attr-defined]
    for store in stores.values():
        store.wait(["0", "1", "2"], timedelta(seconds=10))  # type: ignore[attr-defined]


def test_the_store_listens_at_the_hosts_address_alone(tmp_path: Path) -> None:
    stores = met([0, 1, 2], meeting_of(tmp_path))
    address, port, _ = json.loads((tmp_path / "trainer.0.ranks").read_bytes())
    own = [x.laddr for x in psutil.Process().net_connections() if x.status == "LISTEN"]
    assert [HERE] == [address] == [ip for ip, of in own if of == port]
    del stores


@pytest.mark.parametrize(
    ("came", "words"), [((0, 1), "0 (a), 1 (b)"), pytest.param((0,), "0 (a)", marks=long(2, "rank 0 alone"))]
)
def test_rank_0_says_which_ranks_came_in_time(came: tuple[int, ...], words: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    found = met(came, meeting_of(tmp_path, by_s=1.5))
    others = ", ".join(f"{rank} ({'abc'[rank]})" for rank in range(3) if rank not in came)
    said = str(found[0])
    assert said.startswith(f"of 3 ranks only {words} came in time (supervision.start_s), not {others}; its log says")
    assert f"has to reach {HERE}:" in said
    assert "NCCL_SOCKET_IFNAME" in said
    assert time.monotonic() - begin < 30.0


def test_without_rank_0_the_others_say_so_a_little_later(tmp_path: Path) -> None:
    found = met([1], meeting_of(tmp_path, by_s=0.2))
    assert found == {
        1: "it came, but rank 0 (a) has not said in time (supervision.start_s) where the ranks meet; its "
        "log says how far it got"
    }


@long(4, "ranks of one host of which one does not come")
def test_on_one_host_nobody_is_told_of_a_network(tmp_path: Path) -> None:
    found = met([0, 2], meeting_of(tmp_path, "", by_s=1.5))
    assert found[0] == "of 3 ranks only 0, 2 came in time (supervision.start_s), not 1; its log says how far it got"


@long(4, "a rank that cannot connect")
def test_a_rank_that_cannot_reach_rank_0_names_its_address(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind((HERE, 0))
        port = closed.getsockname()[1]
        (tmp_path / "trainer.0.ranks").write_text(json.dumps([HERE, port, "word"]))
        found = met([1], meeting_of(tmp_path, by_s=0.1))
    assert str(found[1]).startswith(
        f"it cannot connect from b to rank 0 (a); each rank's host has to reach {HERE}:{port}"
    )


def test_an_address_that_the_host_of_rank_0_does_not_have_is_named(tmp_path: Path) -> None:
    found = met([0], meeting_of(tmp_path, address="192.0.2.77"))
    assert str(found[0]).startswith("the trainer's ranks cannot meet at 192.0.2.77, the address of rank 0's host a (")


def test_a_rank_of_an_earlier_incarnation_finds_nothing_in_a_store_at_the_same_port(tmp_path: Path) -> None:
    """It has read the address before, and comes when another store has the port."""
    stores = met([0, 1, 2], meeting_of(tmp_path))
    address, port, _ = json.loads((tmp_path / "trainer.0.ranks").read_bytes())
    old = tmp_path / "old"
    old.mkdir()
    (old / "trainer.0.ranks").write_text(json.dumps([address, port, "another"]))
    found = met([1], meeting_of(old, by_s=0.1))
    assert "of 3 ranks only 1 (b) came in time" in str(found[1])
    assert stores[0].check(["here/1"])  # type: ignore[attr-defined]
    stores[0].set_timeout(timedelta(seconds=1))  # type: ignore[attr-defined]


def test_connections_use_the_interface_of_the_hosts_address_unless_the_user_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    loopback = find_interface(HERE)
    assert loopback
    assert [find_interface(address) for address in ("localhost", "192.0.2.77", "no such name")] == [loopback, "", ""]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "mine")
    with connecting(meeting_of(tmp_path)):
        assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == (loopback, "mine")
    with connecting(meeting_of(tmp_path, address="192.0.2.77")):
        assert "GLOO_SOCKET_IFNAME" not in os.environ, "nobody knows it"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "mine"
