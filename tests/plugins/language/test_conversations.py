"""Conversations of evaluations: the file, texts as they are shown, and their table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.plugins.language.conversations import (
    CONVERSATIONS_FILE,
    HOOKS,
    append_conversations,
    outcome,
    outline,
    read_conversations,
)
from polyrhythm.plugins.language.report_section import conversations
from polyrhythm.readable import readable


def entry(evaluation: Any = "after", version: Any = 2, index: int = 0, **changes: Any) -> dict[str, Any]:
    turn = {"message": "four", "reply": ""}
    said = {"prompt": "2+2=", "turns": [turn], "success": True, "return": 1.0, "metrics": {"turns": 1.0}}
    place = {"evaluation": evaluation, "version": version, "index": index, "task": "sums", "seed": 7}
    return {**place, **said, **changes}


def shown(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of the report's section."""
    return [one for part in conversations(entries) if part["kind"] == "episodes" for one in part["entries"]]


def test_what_is_written_is_read_again_each_once_and_as_it_was_last(tmp_path: Path) -> None:
    assert read_conversations(tmp_path) == []
    odd = entry("before", 0, prompt="a\u2028b\x85c\né <b>")
    append_conversations(tmp_path / CONVERSATIONS_FILE, [odd, entry("during", 1)])
    append_conversations(tmp_path / CONVERSATIONS_FILE, [entry("during", 1, success=False), entry()])
    path = tmp_path / CONVERSATIONS_FILE
    assert "é <b>" in path.read_text(), "as a reader of the file sees it"
    with path.open("a") as file:
        for odd_one in (entry(version="3"), entry(evaluation=3), entry(turns=[{"message": 1}]), {"return": "x"}, [], 5):
            file.write(json.dumps(odd_one) + "\n")
        file.write('{"cut')
    expected = [odd, entry("during", 1, success=False), entry()]
    assert read_conversations(tmp_path) == expected
    HOOKS.rewind(tmp_path, 1)
    assert read_conversations(tmp_path) == expected[:2]
    with (tmp_path / CONVERSATIONS_FILE).open("a") as file:
        file.write('{"evaluation": "dur')
    HOOKS.rewind(tmp_path, 2)
    append_conversations(tmp_path / CONVERSATIONS_FILE, [entry(index=5)])
    assert [one["index"] for one in read_conversations(tmp_path)][-1] == 5, "after a crash in the middle of a line"


def test_what_cannot_be_written_is_lost_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / CONVERSATIONS_FILE).mkdir()
    append_conversations(tmp_path / CONVERSATIONS_FILE, [entry()])
    assert CONVERSATIONS_FILE in caplog.text
    append_conversations(tmp_path / "none" / CONVERSATIONS_FILE, [])


def test_a_text_is_shown_without_control_characters_and_a_long_one_is_cut_with_a_note() -> None:
    assert readable("a\x1b[2J\n\tb\x00\u202e", 100) == "a\\x1b[2J\n\tb\\x00\\u202e"
    assert readable("abcdefghi", 9) == "abcdefghi"
    assert readable("abcdefghi" + "x" * 1200 + "yz", 6) == "abcd [… 1,205 characters …] yz"


def test_of_many_turns_the_first_and_last_are_shown() -> None:
    turns = [{"message": str(number), "reply": ""} for number in range(9)]
    assert outline(turns, 9) == turns
    assert outline(turns, 5) == [*turns[:3], 4, *turns[7:]]


def test_an_outcome_says_what_there_is() -> None:
    assert outcome(entry()) == "success, return 1"
    assert outcome(entry(success=False, metrics={"cut": 1.0}, **{"return": -0.5})) == "no success, return -0.5, cut"
    assert outcome(entry(success=None)) == "return 1"


def test_the_report_shows_evaluations_prompt_by_prompt() -> None:
    names = [("before", 0), ("before_sampled", 0), ("during_sampled", 4), ("after", 9), ("swapped", 9)]
    found = shown([entry(*name, index=index, prompt=f"p{index}") for name in names for index in (10, 2)])
    assert [one["prompt"] for one in found] == ["p2"] * 5 + ["p10"] * 5, "in the order of the episodes"
    assert [(one["evaluation"], one["mode"], one["version"]) for one in found[:5]] == [
        ("before", "greedy", 0),
        ("before", "sampled", 0),
        ("during", "sampled", 4),
        ("after", "greedy", 9),
        ("after", "swapped", 9),
    ]
    assert shown([]) == []


def test_the_report_cuts_what_was_said() -> None:
    turns = [{"message": "<b>\n", "reply": "&amp;\x1b"}] * 40
    first, second = shown([entry(prompt="<b>", turns=turns), entry(prompt="x" * 50_000)])
    assert first["prompt"] == "<b>"
    assert [turn["reply"] for turn in first["turns"]].count("&amp;\\x1b") == 24
    assert {"message": "[… 16 turns …]", "reply": ""} in first["turns"]
    assert "[… 46,000 characters …]" in second["prompt"]
    many = [entry("during", version) for version in range(900)]
    assert [one["version"] for one in shown(many)] == [*range(100), *range(500, 900)]
    assert "400 episodes" in conversations(many)[0]["text"]


@pytest.mark.parametrize("earned", [float("nan"), float("inf")])
def test_the_report_has_no_numbers_that_are_none(earned: float) -> None:
    (found,) = shown([entry(**{"return": earned, "metrics": {"a": earned, "b": "x", "c": 2}})])
    assert (found["return"], found["metrics"]) == (None, {"c": 2.0})
