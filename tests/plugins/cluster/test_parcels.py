"""Parcels as another host's server gives them; workflows of one's own use them in tests/plugins/workflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.server import DataServer
from polyrhythm.plugins.cluster.parcels import SharedParcels
from polyrhythm.runtime.memory.arena import ArenaLayout, in_memory

LAYOUT = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})
CONTENT = bytes(range(256)) * 40_000  # three parts


class Client:
    """Asks a server in this process."""

    def __init__(self, folder: Path | None) -> None:
        self.server = DataServer(in_memory(LAYOUT), None, folder)
        self.asked: list[q.Question] = []

    def ask(self, question: q.Question) -> list[memoryview]:
        self.asked.append(question)
        refused, *pieces = self.server.answer(q.encode(question))
        if refused:
            raise LookupError(refused.decode())
        return [memoryview(piece) for piece in pieces]


def test_a_parcel_of_another_host_comes_in_parts_and_once(tmp_path: Path) -> None:
    (name,) = SharedParcels(tmp_path, "sender", "there").keep([CONTENT])
    client = Client(tmp_path)
    here = SharedParcels(tmp_path / "here", "receiver", "here", {"there": client})
    taken = here.take("there", name, len(CONTENT))
    assert bytes(taken) == CONTENT
    assert not taken.readonly
    assert len(client.asked) == 4, "three parts, and that it is taken"
    assert not list((tmp_path / "parcels").iterdir())
    with pytest.raises(LookupError, match="is gone"):
        here.take("there", name, len(CONTENT))
    with pytest.raises(LookupError, match="on host 'nowhere', which this process cannot read"):
        here.take("nowhere", name, len(CONTENT))


@pytest.mark.parametrize(
    "question",
    [
        q.ParcelPart("../secret", 0, 1, True),
        q.ParcelPart("", 0, 1, True),
        q.ParcelPart("here~sender~0", 0, 1, True),
        q.ParcelPart("sender-0", -1, 1, True),
        q.ParcelPart("sender-0", 0, 0, True),
        q.ParcelPart("sender-0", 0, q.PART_BYTES + 1, True),
        q.ParcelPart("sender-0", len(CONTENT), 1, True),
        q.ParcelPart("sender-1", 0, 1, True),
    ],
)
def test_what_is_no_part_of_a_parcel_is_refused_and_changes_nothing(question: q.ParcelPart, tmp_path: Path) -> None:
    SharedParcels(tmp_path, "sender").keep([CONTENT])
    (tmp_path / "secret").write_text("x")
    with pytest.raises(LookupError):
        Client(tmp_path).ask(question)
    assert (tmp_path / "secret").exists()
    assert (tmp_path / "parcels" / "sender-0").stat().st_size == len(CONTENT)


def test_what_several_of_one_host_receive_crosses_once(tmp_path: Path) -> None:
    sender = SharedParcels(tmp_path, "sender", "there")
    client = Client(tmp_path)
    (tmp_path / "here").mkdir()
    receivers = [SharedParcels(tmp_path / "here", f"r{i}", "here", {"there": client}) for i in range(3)]
    names = sender.keep([CONTENT], 3)
    found = [each.take("there", name, len(CONTENT)) for each, name in zip(receivers, names, strict=True)]
    assert len(client.asked) == 3 + 3, "three parts, and three times that it is taken"
    found[0][0] = 255
    assert [bytes(view[:1]) for view in found] == [b"\xff", b"\x00", b"\x00"]
    assert bytes(found[1]) == CONTENT
    assert not list((tmp_path / "parcels").iterdir())
    # The next one takes its place; a receiver that is late with the one before fetches it itself.
    first, second = sender.keep([b"abc"], 2), sender.keep([b"de"], 2)
    assert bytes(receivers[0].take("there", first[0], 3)) == b"abc"
    assert bytes(receivers[0].take("there", second[0], 2)) == b"de"
    assert bytes(receivers[1].take("there", first[1], 3)) == b"abc"
    assert bytes(receivers[1].take("there", second[1], 2)) == b"de"
    kept = [path.name for path in (tmp_path / "here" / "parcels").iterdir() if path.stat().st_size]
    assert kept == ["there~sender~2"]
    with pytest.raises(LookupError, match="is gone"):
        receivers[1].take("there", second[1], 2)


def test_a_server_without_parcels_gives_none() -> None:
    with pytest.raises(LookupError, match="ParcelPart is not answered here"):
        Client(None).ask(q.ParcelPart("sender-0", 0, 1, True))


@pytest.mark.parametrize("copies", [1, 3])
def test_each_receiver_has_a_copy_of_its_own(copies: int, tmp_path: Path) -> None:
    sender, receiver = SharedParcels(tmp_path, "a"), SharedParcels(tmp_path, "b")
    taken: list[Any] = [receiver.take("", name, 0) for name in sender.keep([b"xyz"], copies)]
    taken[0][0] = 0
    assert [bytes(view) for view in taken] == [b"\x00yz", *[b"xyz"] * (copies - 1)]
