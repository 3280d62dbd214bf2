"""The spans of a part: bounded, and what is not kept is counted."""

from __future__ import annotations

from polyrhythm.runtime.spans import Span, SpanLog

SPANS = [Span("e/0", "stepping", float(n), n + 0.5) for n in range(5)]


def test_spans_are_taken_once_and_those_without_room_are_counted() -> None:
    log = SpanLog(most=3)
    log.add(SPANS)
    assert log.take() == (SPANS[:3], 2)
    assert log.take() == ([], 0)
    log.add(SPANS[4:])
    assert log.take() == (SPANS[4:], 0), "there is room again"
