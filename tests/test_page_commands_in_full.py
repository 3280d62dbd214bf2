"""The longer commands of README and docs/, and every training that the machine has the packages for, run.

Numbers are lowered by what is appended (`LONG` and `few_of` of page_commands.py), so that each ends in a minute or two.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.long import long
from tests.page_commands import (
    ALL,
    LONG,
    ROOT,
    Runs,
    blocks,
    few_of,
    mark_of,
    one_of,
    quick,
    ready,
    runs_here,
    status_of,
)

pytestmark = long(20, "a command of the pages")
_LONGER = [words for _, words in ALL if runs_here(words) and not quick(words)]
#: The usual suite checks their start. A run that waits for simulators to join is in tests/plugins/join.
_TRAININGS = [
    words
    for _, words in ALL
    if quick(words) and words[:1] == ("train",) != words and not {"--check", "join.simulators=2"} & set(words)
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("words", one_of(_LONGER), ids=" ".join)
def test_longer_commands_of_the_pages_run(
    words: tuple[str, ...], runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ready(words, runs.names(words, tmp_path / "new"))
    if words[0] == "watch":
        _watch(given, runs.folder)
        return
    if "--check" not in words:
        given += LONG[mark_of(words, LONG) or ""]
        given += [f"out_dir={tmp_path / 'runs'}", *few_of(words[1])] if words[0] == "train" else []
    if "training.versions=400" in words:
        given += ["training.versions=3"]
    if words[0] == "eval" and words[1] != "compare":
        given += ["--episodes", "4"]
    status, told = status_of(given, runs.folder), capsys.readouterr()
    # 1: the difference is not proved, or the plan does not fit; 3: this machine lacks GPUs and weights.
    other = 1 if {"compare", "quickstart_pi0"} & set(words) else 3 if "--check" in words else 0
    assert status in (0, other), told.err
    assert told.out
    if "quickstart_pi0" in words:
        assert _shown_output("docs/memory.md", "polyrhythm plan quickstart_pi0") <= set(told.out.splitlines())
    if words[0] == "resume":
        assert (Path(given[1]) / "summary.json").is_file()


def _shown_output(page: str, command: str) -> set[str]:
    """Lines that a page shows after a command of two lines; [a remark] is none."""
    (shown,) = (block for block in blocks(ROOT / page, "") if block.startswith(command))
    return {line for line in shown.splitlines()[2:] if not line.startswith("[")}


def _watch(words: Sequence[str], folder: Path) -> None:
    """Serve a run, ask for its page, and end it as Ctrl-C does."""
    command = [sys.executable, "-m", "polyrhythm", *words]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0]
            assert "--port" not in words or f":{words[-1]}/" in url
            with urllib.request.urlopen(url, timeout=60) as page:
                assert b"<html" in page.read()
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)


@pytest.mark.parametrize("words", one_of(_TRAININGS), ids=" ".join)
def test_trainings_of_the_pages_run(
    words: tuple[str, ...], runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ready(words, runs.names(words, tmp_path / "new"))
    if status_of([*given, "--check"], runs.folder):
        pytest.skip(capsys.readouterr().out.strip().rpartition("\n")[2])
    own = [word for word in given[2:] if "=" in word]
    assert status_of([*given, "--out", str(tmp_path / "run"), *few_of(given[1], own)], runs.folder) == 0
    assert (tmp_path / "run" / "summary.json").is_file()
