"""The commands `bench` and `chaos`: which words they take, and what they print."""

from __future__ import annotations

import re

import pytest

from polyrhythm.cli.main import main


@pytest.mark.parametrize(
    "words",
    [
        ["condor"],
        ["conductor", "--slots", "0"],
        ["ceiling", "--seconds", "0"],
        ["ceiling", "--seconds", "nan"],
        ["ceiling", "--env-batches", "16,few"],
    ],
    ids=" ".join,
)
def test_arguments_are_checked_by_argparse(words):
    with pytest.raises(SystemExit) as end:
        main(["bench", *words])
    assert end.value.code == 2


def test_a_misspelt_benchmark_is_answered_with_the_nearest(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "polices"])
    assert "no such benchmark: polices; did you mean policies?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["update", "--seeds", "2"], "--seeds: bench update has no such option, only --repeats, --json; leave it out"),
        (["papers", "--repeats", "2"], "--repeats: bench papers has no such option, only --json; leave it out"),
        (["learning", "rows=4"], "rows=4: bench learning has no scene to change; leave it out"),
        (
            ["conductor", "--env-batches", "16"],
            "--env-batches: bench conductor has no such option, only --slots, --generators, --json; leave it out",
        ),
        (
            ["ceiling", "--env-batches", "16,20", "--processes", "8"],
            "--env-batches 20: not a multiple of 8 processes; make it one",
        ),
    ],
)
def test_a_benchmark_takes_its_own_options_alone(words, told, capsys):
    assert main(["bench", *words]) == 2
    assert re.fullmatch(rf"polyrhythm: error: PR1\d\d: {re.escape(told)}\n", capsys.readouterr().err)
