"""Messages as bytes: all of them come out as they went in, and nothing else comes out."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.runtime.messages import (
    ACTIONS,
    VERSION,
    FromWorker,
    Reply,
    Report,
    Spans,
    ToWorker,
    WorkerJoined,
)
from polyrhythm.runtime.spans import Span
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler import records as r

TICKET = r.Ticket(7, 3, 1, 2, 2**62, 2**63 - 1, 4, attempt=2, greedy=True, evaluation="before")
REQUEST = r.Request("e/0", "s", 9, 4, 2, "s.0.1", 1.25, generator="g", evaluation=True)
BATCHES = (r.EnvBatchInfo("e", (r.SlotInfo("e/0", 0, 4, "g"), r.SlotInfo("e/1", 4, 2)), False),)
MESSAGES = [
    *(r.SimulatorJoined("s", 1, BATCHES), r.GeneratorJoined("g", 2, 5, "far", 2), r.TrainerJoined("t", 0, 12)),
    *(r.StationLost("s", 1, "ended by SIGKILL"), r.RequestArrived("s", 0, "e/0", 3, 4, 2, "s.0.1", True)),
    *(
        r.BatchDone("g", 0, 8, 3),
        r.SampleFailed("s", 0, 7, 1, r.DropReason.ENVIRONMENT_RAISED, "step: RuntimeError: ä", "seed 3"),
    ),
    *(r.SampleFinished("s", 0, 7, 1, "5", end, 3, 30, 1, 2, True, -0.5) for end in r.SampleEnd),
    r.SampleFinished(
        "s", 0, 7, 1, "5", r.SampleEnd.TRUNCATED, 3, 30, 1, 2, True, -0.5, (("push", 0.25), ("slip", -1e300))
    ),
    *(r.UpdateDone("t", 0, 4), r.Published("t", 0, 2), r.WeightsApplied("g", 0, 2), r.Checkpointed("t", 1, 6)),
    *(r.CancelRow("s", "e/0", 7, 1), r.RefuseRequest("s", "e/0", 9, "cancelled")),
    *(r.Serve("g", r.Batch(8, "g", (REQUEST, REQUEST))), r.ApplyWeights("g", 3)),
    *(r.StartUpdate("t", 4, 2, (7, 8), ("5", "0"), (1, 2)), r.PublishWeights("t", 3)),
    r.StartRows("s", "e/0", (r.Grant(0, TICKET, block=5), r.Grant(3, TICKET, resume=True, block=1))),
    *(r.SaveTrainer("t"), Report("t", 1, "update", 4, {"train/loss": 0.5, "x": float("inf")})),
    *(wire.Hello("s", 1, "ipc:///x/y", ("s.1.0",), b"\x00\xff"), wire.Connect("s.1", ""), wire.Stop()),
    *(wire.Ping(), wire.Ping(pending_work=True)),
    *(Spans("s", 1, (Span("e/0", "stepping", 1.5, 2.25, 7, 2),), 3), wire.MeasureSpans(True)),
    *(wire.Heartbeat("s", 1, "", 0.0, 30, None, {}), wire.Ping(pending_work=True)),
    *(wire.Heartbeat("s", 1, "step", 2.5, 30, ("e/0 waits",), {"busy_s": 1.5}), wire.Failed("s", 1, "why", True)),
    wire.Refused("s", 1, b"\x07\xff", "why"),
    wire.Warned("s", 1, "env.success: the info has none"),
    *(wire.Failed("s", 1, "why", True, 3), wire.Hello("s", 1, "ipc:///x/y", ("s.1.0",), b"", 2)),
    *(r.PrepareEpisodes("s", "e", ((0, 2**63 - 1), (1, 5))), r.PrepareEpisodes("s", "e", ())),
    *(r.TakeDevice("t", -1), r.YieldDevice("g", 3)),
    *(r.StartStream("g", r.Stream(8, "g", REQUEST, pinned=True)), r.AbortStream("g", 8)),
    *(r.StreamDone("g", 0, 8, 3, 21), r.StreamDone("g", 0, 8, -1, aborted=True)),
    *(r.ScorerJoined("c", 2, 8, "far"), r.ScoreSample("c", 2**40, 7, "far/12", 1, 2**62, True)),
    *(r.SampleScored("c", 0, 9, 7, -0.5), r.SampleScored("c", 0, 9, 7, 1.0, success=True)),
    r.ScoringFailed("c", 0, 9, 7, "own:judge: ValueError: no", "task a, seed 3"),
    *(r.DeviceTaken("t", 0, -1, 0.25), r.DeviceYielded("g", 2, 3, 2**40, 1.5)),
    *(WorkerJoined("w-0", 0), ToWorker("w-0", b"\x00\xff"), FromWorker("w-0", 0, 7, b""), wire.WakeUp()),
    *(wire.HostAt("host-3", "tcp://10.0.0.2:9"), wire.Dismissed("s", 1)),
]
DTYPE = np.dtype([(ACTIONS, "float32", (2, 3)), ("forward_inputs.k", "uint8"), (VERSION, "int64")], align=True)


def reply(rows: int) -> Reply:
    answers = np.zeros(rows, DTYPE)
    answers[ACTIONS] = np.arange(rows * 6).reshape(rows, 2, 3)
    answers["forward_inputs.k"], answers[VERSION] = 200, 2**40
    return Reply("s.0.1", "e/0", 9, answers)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_out_as_it_went_in(message: wire.Message) -> None:
    found = wire.decode(wire.encode(message))
    assert found == message
    assert type(found) is type(message)
    assert type(found).__slots__ == type(message).__slots__
    _assert_hashable_as_before(found, message)


def _assert_hashable_as_before(found: object, message: object) -> None:
    """Tuples have stayed tuples: records are kept in sets and as keys."""
    names = [field.name for field in fields(message)] if is_dataclass(message) else []
    if isinstance(message, msgspec.Struct):
        names = list(message.__struct_fields__)
    for name in names:
        one, other = getattr(found, name), getattr(message, name)
        assert type(one) is type(other), name
        _assert_hashable_as_before(one, other)


def test_every_type_that_goes_over_the_wire_is_tried() -> None:
    assert {type(message) for message in MESSAGES} | {wire.ReplyHead} == set(wire.TYPES)


def test_what_stays_in_the_main_process_is_known() -> None:
    """A record that is added to the flow has to say which of the two it is."""
    at_home = {r.PayloadsLost, r.WeightsOffered, r.SaveRequested, r.TrainUntil, r.Evaluate, r.Wake}
    at_home |= {r.StartRows, r.ReleasePayloads, r.SampleEvaluated, r.EvaluationDone, r.TargetReached, r.Halt}
    at_home |= {r.EpisodeSetAside, r.FilterExhausted, r.BatchingChosen, r.MoveChosen, r.ScoreCounted}
    assert {*get_args(r.Event), *get_args(r.Command)} - at_home <= set(wire.TYPES)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_reply_brings_its_records_where_they_can_be_used_as_they_are(rows: int) -> None:
    sent = reply(rows)
    content = wire.encode_reply(sent)
    found = wire.decode(content, DTYPE)
    assert isinstance(found, Reply)
    assert found.answers.flags.aligned
    assert np.shares_memory(found.answers, np.frombuffer(content, np.uint8)), "nothing is copied again"
    assert (found.reply_to, found.slot, found.sequence) == (sent.reply_to, sent.slot, sent.sequence)
    assert found.answers.dtype == DTYPE
    assert np.array_equal(found.answers, sent.answers)


def test_part_of_a_buffer_can_be_sent() -> None:
    whole = reply(5)
    part = Reply("s.0.1", "e/0", 9, whole.answers[1:3])
    found = wire.decode(wire.encode_reply(part), DTYPE)
    assert isinstance(found, Reply)
    assert np.array_equal(found.answers, whole.answers[1:3])


@given(st.binary())
def test_any_bytes_are_a_message_or_a_value_error(content: bytes) -> None:
    found: object
    try:
        found = wire.decode(content, DTYPE)
    except ValueError as error:
        found = error
    assert isinstance(found, (ValueError, Reply, *wire.TYPES))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_that_was_cut_short_is_a_value_error(message: wire.Message) -> None:
    whole = wire.encode(message)
    for length in range(len(whole)):
        with pytest.raises(ValueError, match="cannot be decoded"):
            wire.decode(whole[:length])


def test_a_damaged_reply_is_a_value_error() -> None:
    whole = wire.encode_reply(reply(3))
    for content in (whole[:-1], whole[:9], whole[:3], whole[:1], b"", whole[:1] + b"\xff" + whole[2:]):
        with pytest.raises(ValueError, match="cannot be decoded"):
            wire.decode(content, DTYPE)


def test_a_pickle_is_no_message() -> None:
    with pytest.raises(ValueError, match="cannot be decoded"):
        wire.decode(pickle.dumps(MESSAGES[0]))


FRAMED = [(3, MESSAGES[1]), (0, MESSAGES[4]), (65_000, wire.Ping()), (3, MESSAGES[2])]


def framed() -> bytes:
    return wire.frame([(part, wire.encode(message)) for part, message in FRAMED])


def test_a_frame_keeps_its_messages_their_parts_and_their_order() -> None:
    assert [(part, wire.decode(content)) for part, content in wire.unframe(framed())] == FRAMED


def test_a_message_for_the_first_part_alone_needs_no_frame() -> None:
    content = wire.encode(MESSAGES[0])
    assert wire.frame([(0, content)]) == content
    assert list(wire.unframe(content)) == [(0, content)]
    assert [part for part, _ in wire.unframe(wire.frame([(1, content)]))] == [1]


def test_replies_in_a_frame_are_used_where_they_lie() -> None:
    content = wire.frame([(part, wire.encode_reply(reply(rows))) for part, rows in ((5, 1), (2, 4), (9, 3))])
    for (part, message), (sent, rows) in zip(wire.unframe(content), ((5, 1), (2, 4), (9, 3)), strict=True):
        found = wire.decode(message, DTYPE)
        assert isinstance(found, Reply)
        assert part == sent
        assert found.answers.flags.aligned
        assert np.shares_memory(found.answers, np.frombuffer(content, np.uint8)), "nothing is copied again"
        assert np.array_equal(found.answers, reply(rows).answers)


def test_a_damaged_frame_is_unfit_and_a_frame_in_a_frame_no_message() -> None:
    whole = framed()
    for content in (*(whole[:length] for length in range(1, len(whole))), whole + bytes(16), whole[:5] + b"\xff" * 40):
        with pytest.raises(UnfitMessage, match="a frame of"):
            wire.unframe(content)
    ((_, inner),) = wire.unframe(wire.frame([(1, whole)]))
    with pytest.raises(UnfitMessage, match="cannot be decoded"):
        wire.decode(inner)
    with pytest.raises(UnfitMessage, match="at most 16 are expected") as raised:
        wire.unframe(whole, 16)
    assert raised.value.kind == "too_large"


@given(st.binary())
def test_any_bytes_are_a_frame_or_a_value_error(content: bytes) -> None:
    for given_content in (content, b"\xff" + content):
        try:
            found = list(wire.unframe(given_content))
        except ValueError:
            continue
        assert sum(len(message) for _, message in found) <= len(given_content)
