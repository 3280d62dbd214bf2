"""Nobody else's text rules a terminal: controls are shown in escaped form wherever text is shown."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from polyrhythm.cli import show
from polyrhythm.cli.show import finding_line as line
from polyrhythm.conformance import Finding
from polyrhythm.plugins.terminal.block import Terminal
from polyrhythm.readable import readable, visible

HOSTILE = "\x1b[2J\x1b]0;owned\x07 \x9b31m \u202e a\rb \udcff"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc é 日本 👩\u200d🔬", "a\tb\nc é 日本 👩\u200d🔬"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x9b31m", "\\x9b31m"),
        ("a\rb\x00\x7f", "a\\rb\\x00\\x7f"),
        ("\u202eabc", "\\u202eabc"),
        ("\udcff", "\\udcff"),
    ],
)
def test_controls_are_escaped_and_nothing_else(text: str, shown: str) -> None:
    assert visible(text) == readable(text, 100) == shown


def test_logs_and_errors_of_a_process_are_visible() -> None:
    program = (
        "import logging, sys\n"
        "from polyrhythm.cli.main import main\n"
        "from polyrhythm.readable import set_up_logging\n"
        "set_up_logging()\n"
        "logging.getLogger('x').warning('%s', sys.argv[1])\n"
        "try:\n    raise ValueError(sys.argv[1])\n"
        "except ValueError:\n    logging.getLogger('x').exception('it failed')\n"
        "sys.exit(main(['train', 'cartpole', 'name=' + sys.argv[1]]))\n"
    )
    command = [sys.executable, "-c", program, HOSTILE.removesuffix(" \udcff")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert visible(done.stderr) == done.stderr
    assert done.stderr.count("\\x1b[2J") >= 3


def test_a_status_block_a_summary_and_a_finding_are_visible() -> None:
    stream = io.StringIO()
    Terminal(stream, lambda: 80).show([HOSTILE])
    shown = [stream.getvalue(), show.aligned([("name", HOSTILE)]), line(Finding("x", "failed", HOSTILE, HOSTILE))]
    assert all(visible(text) == text for text in shown)
