"""What a live run says of itself, and that nothing changes where nobody watches."""

from __future__ import annotations

import io
import logging
import re
import sys
import time

import pytest
from tests.pipeline.runs import config
from tests.pipeline.test_loop import ASYNCHRONOUS

from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.pipeline.observers.metrics import EpisodeTracker, LagHistogram
from polyrhythm.pipeline.observers.totals import RunTotals
from polyrhythm.plugins.terminal.block import Terminal
from polyrhythm.plugins.terminal.display import LiveDisplay, live_terminal
from polyrhythm.scheduler.records import StationLost


class Screen(io.StringIO):
    """A terminal that keeps all that was written."""

    encoding = "utf-8"

    def isatty(self):
        return True

    def fileno(self):
        raise OSError("no terminal that the system knows")


def shown(live, stream, now):
    """The block that is drawn after the run's state was looked at."""
    live.on_tick(now)
    stream.seek(0)
    stream.truncate()
    live.draw()
    return stream.getvalue()


def test_a_run_is_told_from_its_evaluation_to_its_last_update():
    stream = Screen()
    live = LiveDisplay(Terminal(stream, lambda: 200))
    pipeline = build_pipeline(RunContext(config(**ASYNCHRONOUS)))
    live.watch(pipeline)
    live.phase("evaluation_before", time.monotonic())
    pipeline.loop.evaluate("before", held_out(7, 1, 1, greedy=True))
    found = shown(live, stream, pipeline.loop.clock())
    assert "── evaluation before training · episode 7 of 7 · " in found
    assert "lag" not in found

    live.phase("rl", time.monotonic())
    episodes, account, lags = EpisodeTracker(1), RunTotals(), LagHistogram()
    live.train(6, episodes, account, lags, after_s=3600.0)
    found = shown(live, stream, pipeline.loop.clock())
    assert "── reinforcement learning · update 0 of 6 · " in found
    assert "left" not in found
    pipeline.loop.add_observers(episodes, account, lags)
    pipeline.loop.train_until(2)
    live.on_decision(pipeline.loop.clock(), StationLost("generator-1", 0, "died"), [])
    found = shown(live, stream, pipeline.loop.clock())
    pipeline.close()
    assert "── reinforcement learning · update 4 of 6 · " in found
    assert re.search(r"about 1:0\d:\d\d left ", found), "two more updates, and an hour of evaluation"
    assert re.search(r"over the last \d+ episodes · [\d,]+ transitions/s · lag ", found)
    assert f"(largest {max(lags.counts)})" in found
    assert "1 fault\n" in found


@pytest.mark.parametrize(("stream", "term"), [(io.StringIO(), "xterm"), (Screen(), "dumb")])
def test_where_nobody_watches_nothing_changes(stream, term):
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        with live_terminal(stream, {"TERM": term}) as live:
            assert live is None
            assert handler.stream is stream
    finally:
        logging.getLogger().removeHandler(handler)


def test_logs_and_warnings_pass_above_the_block_and_it_goes_in_the_end():
    stream, before = Screen(), sys.stderr
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        with live_terminal(stream, {"TERM": "xterm"}) as live:
            live.phase("demonstrations", time.monotonic())
            logging.getLogger("polyrhythm").error("a line of the log")
            sys.stderr.write("a warning\n")
        assert handler.stream is stream
    finally:
        logging.getLogger().removeHandler(handler)
    assert sys.stderr is before
    written = stream.getvalue()
    assert "\x1b[1F\x1b[Ja line of the log\n── demonstrations" in written
    assert "\x1b[1F\x1b[Ja warning\n── demonstrations" in written
    assert written.endswith("\x1b[1F\x1b[J")
