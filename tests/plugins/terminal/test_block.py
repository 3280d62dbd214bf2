"""The live block as text, and a terminal whose screen is played back."""

from __future__ import annotations

import io
import re

import pytest

from polyrhythm.observe.intervals import episodes_in_words as episodes
from polyrhythm.plugins.terminal.block import Status, Terminal, bar, block, duration

NAN = float("nan")
TRAINING = Status(
    "reinforcement learning",
    192.4,
    done=57,
    of=200,
    unit="update",
    left_s=460.2,
    recent=[(i < 55, float(i < 55)) for i in range(128)],
    transitions_per_s=1812.3,
    lag=(0.94, 1),
    buffer=14,
    faults=1,
    utilisation={"simulator-0": 0.81, "generator-0": 0.305, "trainer": 1.0},
)


def test_a_training_run_in_few_lines() -> None:
    assert block(TRAINING, 119) == [
        "── reinforcement learning · update 57 of 200 · 3:12 so far · about 7:40 left ".ljust(119, "─"),
        "success in 55 of the last 128 (43% [35, 52]), return 0.4297 · 1,812 transitions/s · lag 0.9 (largest 1)",
        "buffer 14 samples · 1 fault",
        "simulator-0 ████████░░  81%   generator-0 ███░░░░░░░  30%   trainer ██████████ 100%",
    ]


def test_what_is_not_known_is_not_said() -> None:
    assert block(Status("demonstrations", 3.0), 40) == ["── demonstrations · 0:03 so far ".ljust(40, "─")]
    evaluation = Status("evaluation", 9.0, done=1, of=32, unit="episode", left_s=4.0, left_of="this phase")
    assert block(evaluation, 20)[0] == "── evaluation · epi…"
    assert "about 0:04 left of this phase" in block(evaluation, 119)[0]


@pytest.mark.parametrize("width", [20, 40, 79, 119])
def test_no_line_is_longer_than_the_terminal(width: int) -> None:
    lines = block(TRAINING, width)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 9


def test_many_stations_are_shown_by_kind() -> None:
    shares = {f"simulator-{i}": i / 10 for i in range(6)} | {"trainer": 0.5}
    assert block(Status("x", 0.0, utilisation=shares), 119)[1] == (
        "simulator ×6 ██░░░░░░░░  25%   trainer █████░░░░░  50%"
    )


def test_hosts_are_shown_with_their_faults() -> None:
    hosts = {"main": (0.5, 0), "host-1": (0.25, 2), "host-2": (None, 1)}
    assert block(Status("x", 0.0, hosts=hosts), 119)[1] == (
        "main █████░░░░░  50%, no faults   host-1 ██░░░░░░░░  25%, 2 faults   host-2 has no station, 1 fault"
    )


def test_of_many_hosts_those_with_faults_are_named() -> None:
    hosts = {"main": (0.5, 1)} | {f"host-{i}": (0.1, int(i == 7)) for i in range(1, 100)}
    assert block(Status("x", 0.0, hosts=hosts), 119)[1] == (
        "main █████░░░░░  50%, 1 fault   host ×99 █░░░░░░░░░  10%, 1 fault (host-7)"
    )


def test_an_ascii_terminal_gets_ascii() -> None:
    assert all(line.isascii() for line in block(TRAINING, 60, plain=True))


def test_where_only_rewards_come_the_return_leads() -> None:
    assert block(Status("x", 0.0, recent=[(None, 20.0), (None, 31.0)]), 79)[1] == (
        "return 25.5 over the last 2 episodes · no faults"
    )
    assert (
        "success in 0 of the last 2 (0% [0, 66]), return 9" in block(Status("x", 0.0, recent=[(False, 9.0)] * 2), 79)[1]
    )


@pytest.mark.parametrize(
    ("recent", "words"),
    [
        ([(None, 3.0)], "return 3 in the last episode"),
        ([(None, NAN)] * 3, "return not finite over the last 3 episodes"),
        ([(None, 1.0), (None, NAN), (None, 2.0)], "return 1.5 (not finite in 1 of 3) over the last 3 episodes"),
        (
            [(True, 1.0), (True, float("inf"))],
            "success in 2 of the last 2 (100% [34, 100]), return 1 (not finite in 1 of 2)",
        ),
    ],
)
def test_what_is_no_number_is_counted(recent: list[tuple[bool | None, float]], words: str) -> None:
    assert episodes(recent) == words


def test_numbers_in_words() -> None:
    assert [duration(seconds) for seconds in (7.4, 59.6, 750, 3723)] == ["0:07", "1:00", "12:30", "1:02:03"]
    assert (bar(-1.0, 4), bar(0.5, 4), bar(7.0, 4)) == ("░░░░", "██░░", "████")


def screen(written: str) -> list[str]:
    """What a terminal shows after this: lines, `up n lines`, and `erase what is below`, nothing else."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[\d+F|\x1b\[J|\n)", written):
        if part == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif part == "\x1b[J":
            lines = [*lines[:row], ""]
        elif part.startswith("\x1b["):
            row -= int(part[2:-1])
        else:
            assert not part or lines[row] == "", "text is never written over text"
            lines[row] += part
    return lines


def test_text_passes_above_the_block() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream, columns=lambda: 80)
    print("before", file=terminal)
    terminal.show(["a", "b"])
    print("one\ntwo", file=terminal)
    terminal.write("three, ")
    assert screen(stream.getvalue()) == ["before", "one", "two", "a", "b", ""]
    terminal.show(["c"])
    terminal.write("and its end\n")
    assert screen(stream.getvalue()) == ["before", "one", "two", "three, and its end", "c", ""]
    terminal.write("unfinished")
    terminal.end()
    assert screen(stream.getvalue()) == ["before", "one", "two", "three, and its end", "unfinished"]
    assert terminal.width == 79
