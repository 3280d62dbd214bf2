"""A run over tcp among processes that want to end it: it trains on, nobody is stopped, what they say is counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import numpy as np
import pytest
from tests.process.runs import children, config, orphaned_folders
from tests.runtime.mutations import mutations
from tests.runtime.strangers import WAYS, Stranger
from tests.runtime.test_wire import MESSAGES

from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.runtime.hosting import dropped_messages
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.messages import Reply, Report
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.authentication import RunKeys
from polyrhythm.runtime.transport.sockets import Sockets
from polyrhythm.scheduler import records as r

TCP = {"launcher": "local", "data_plane": {"transport": "tcp"}, "training": {"versions": 12}}
SINGLE = {"rollout": {"simulators": 1, "generators": 1}}
#: What would do harm if it were obeyed.
ORDERS = [
    b"",
    b"\xff" * 40,
    wire.encode(wire.Stop()),
    wire.encode(Report("trainer", 0, "update", 0, {"nobody/x": 1.0})),
]
#: Of stations that are not there: no part of it can be true.
FICTION = [
    wire.encode(message)
    for message in MESSAGES
    if not isinstance(message, wire.Stop | wire.Connect | wire.HostAt | wire.Dismissed | wire.Ping)
]


def inboxes(launcher: Launcher) -> dict[str, str]:
    """Every inbox of the run, by address."""
    stations = {name: process.endpoint for name, process in launcher.hosting._supervisor.processes.items()}
    return {"main": launcher.hosting._inbox.endpoint} | stations


def lies(layout: ArenaLayout) -> Iterator[bytes]:
    """To everybody, by somebody who has the keys: signed by stations that are present, and impossible."""
    slot = next(iter(layout.slots))
    ticket = r.Ticket(0, 0, 0, 0, 0, 0, 0)
    request = r.Request(slot, "simulator-0", 0, 999, 0, "simulator-0.0.0", 0.0)
    zeros = np.zeros(500, layout.answer_dtype)
    figures = {"staleness/lag_mean": 0.0, "nobody/x": 1.0}
    for message in (
        *(r.RequestArrived("simulator-0", 0, slot, sequence, 1, 0, "x") for sequence in (-1, 10**9)),
        *(
            r.RequestArrived("simulator-0", 0, "nowhere", 0, 1, 0, ""),
            r.RequestArrived("trainer", 0, slot, 0, 1, 0, ""),
        ),
        *(r.SampleFailed("simulator-0", 0, 10**9, 1, r.DropReason.REFUSED), r.BatchDone("generator-0", 0, 10**9, 0)),
        r.SampleFinished("simulator-0", 0, 10**9, 1, "5", r.SampleEnd.TERMINATED, 1, 1, 0, 0, True, float("nan")),
        *(r.UpdateDone("trainer", 0, 10**6), r.Published("trainer", 0, 10**6), r.Checkpointed("trainer", 0, 10**6)),
        *(r.WeightsApplied("generator-0", 0, 10**6), r.StationLost("trainer", 0, ""), r.TrainerJoined("trainer", 9, 0)),
        *(wire.Heartbeat("trainer", 0, "update", lasted, 1, (), {}) for lasted in (-1.0, 1e9, float("nan"))),
        wire.Heartbeat("trainer", 0, "", 0.0, 1, (), {"busy_s": float("nan")}),
        *(wire.Heartbeat("trainer", 0, "", 0.0, 1, (), {}, rank) for rank in (-1, 1)),
        *(wire.Failed("trainer", 0, "", True, 1), wire.Refused("trainer", 0, ORDERS[0], "", -1)),
        *(wire.Hello("trainer", 0, "tcp://127.0.0.1:9", ("t",), b""), wire.Failed("trainer", 7, "", True)),
        wire.Hello("trainer", 0, "?", ("t",), wire.encode(r.TrainerJoined("trainer", 0, 0))),
        *(Report("trainer", 0, "update", step, figures) for step in range(12)),
        *(Report("trainer", 0, "update", step, {}) for step in range(12)),
        *(r.StartRows("simulator-0", slot, (r.Grant(row, ticket, block=0),)) for row in (-1, 999)),
        r.StartRows("simulator-0", slot, (r.Grant(0, ticket, block=10**6),)),
        *(r.CancelRow("simulator-0", "nowhere", 0, 1), r.RefuseRequest("simulator-0", "nowhere", 0, "")),
        r.Serve("generator-0", r.Batch(10**9, "generator-0", (request,))),
        *(r.ApplyWeights("generator-0", 10**6), r.ApplyWeights("generator-0", 0, pinned=True)),
        *(r.StartUpdate("trainer", 10**6, 0, (0,), ("0",)), r.PublishWeights("trainer", -1)),
        *(wire.Connect("x", "no address"), wire.Connect("x", "tcp://example.org:80")),
    ):
        yield wire.encode(message)
    yield wire.encode_reply(Reply("simulator-0.0.0", slot, 0, zeros))
    yield wire.encode_reply(Reply("simulator-0.0.0", "nowhere", 0, zeros[:1]))
    yield bytes(wire.LARGEST + zeros.nbytes + 1)
    yield from ORDERS[:2]


def attack_without_keys(launcher: Launcher, keys: RunKeys, stack: ExitStack) -> None:
    for endpoint in inboxes(launcher).values():
        for way in WAYS:
            stack.enter_context(closing(Stranger(way, endpoint, keys))).say(ORDERS)


def attack_with_keys(launcher: Launcher, keys: RunKeys, stack: ExitStack) -> None:
    sockets = stack.enter_context(closing(Sockets("tcp", str(launcher.folder), keys, lambda: None, wire.LARGEST)))
    contents = [content for content in mutations(FICTION, 600, 6, {}) if not _is_order(content)]
    for endpoint in inboxes(launcher).values():
        outbox = stack.enter_context(closing(sockets.outbox(endpoint)))
        for content in (*lies(launcher.payloads.layout), *contents):
            outbox.send(content)


def _is_order(content: bytes) -> bool:
    """Whether mutation has made something that everybody with the keys may say."""
    try:
        return isinstance(wire.decode(content), wire.Stop | wire.Connect | wire.HostAt | wire.Dismissed | wire.Ping)
    except ValueError:
        return False


class Attack(Observer):
    """Begins at the first update; the strangers stay until the end."""

    hears = (r.UpdateDone,)

    def __init__(self, pipeline: Pipeline, act) -> None:
        self.stack, self._act, self._launcher = ExitStack(), act, pipeline.launcher

    def on_decision(self, now, event, commands):
        if self._act is not None and isinstance(event, r.UpdateDone):
            self._act(self._launcher, self._launcher.hosting._sockets.keys, self.stack)
            self._act = None


@pytest.mark.parametrize("act", [attack_without_keys, attack_with_keys])
def test_a_run_over_tcp_trains_on_among_hostile_processes(act, tmp_path):
    pipeline = build_pipeline(RunContext(config(**TCP, **SINGLE), folder=tmp_path), record=True)
    attack, reports = Attack(pipeline, act), []
    attack.on_report = lambda now, report: reports.append(report)
    pipeline.loop.add_observers(attack)
    with attack.stack:
        try:
            pipeline.loop.train_until(12)
            keys, addresses = pipeline.launcher.hosting._sockets.keys, inboxes(pipeline.launcher)
            shown = "".join(part for child in children() for part in (*child.cmdline(), *child.environ().values()))
            pipeline.launcher.hosting.statistics(fresh=True)  # the stations' counters, fresh
            told, dropped = pipeline.launcher.hosting.statistics(), dropped_messages(pipeline.launcher.hosting)
        finally:
            pipeline.close()
    assert not [d.event for d in pipeline.loop.trace if isinstance(d.event, r.StationLost)]
    ledger = pipeline.loop.conductor.ledger
    assert (ledger.imbalance, ledger.dropped, ledger.trained) == (0, {}, 96)
    assert [report.step for report in reports] == list(range(12))
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert "polyrhythm.runtime.processes.child" in shown
    assert b"dropped a message" in written
    for key in (keys.inbox.public, keys.inbox.secret, keys.outbox.public, keys.outbox.secret):
        assert key not in written + shown.encode()
    if act is attack_without_keys:
        assert set(dropped) == {"stranger"}
        assert dropped["stranger"] >= len(addresses) * len(WAYS)
    else:
        kinds = {"undecodable", "misdirected", "impossible", "too_large", "unknown_station"}
        assert set(dropped) >= kinds
        for counts in told.values():
            assert counts["dropped/undecodable"] > 0 < counts["dropped/misdirected"]
    assert not children()
    assert not orphaned_folders()
    assert not [thread for thread in threading.enumerate() if thread.name == "authenticator"]
