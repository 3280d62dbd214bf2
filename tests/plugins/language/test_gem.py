"""GEM's environments as conversations; skipped where gem-llm is not installed (it needs a Python of its own)."""

from __future__ import annotations

import random
import re

import pytest

from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.plugins.language.text.gyms import GemSettings, shown_text
from polyrhythm.plugins.trial.env_contract import check_contract

EASY = "game:GuessTheNumber-v0-easy"


def test_without_the_package_the_extra_is_named() -> None:
    try:
        import gem  # noqa: F401
    except ImportError:
        with pytest.raises(MissingError, match=r"env\.type = gem: No module named 'gem'; run .*polyrhythm\[gem\]"):
            GemSettings(id=EASY).conversation()


def test_an_observation_ends_with_a_line() -> None:
    assert shown_text("a\n", {"suffix": "b"}) == "a\nb\n"
    assert shown_text("a", {}) == "a\n"


def test_a_game_keeps_the_contract() -> None:
    pytest.importorskip("gem")
    findings = list(check_contract(GemSettings(id=EASY), 3, lambda _: None))
    assert [finding for finding in findings if finding.state not in ("ok", "note")] == []


def test_a_number_is_guessed_and_depends_on_its_own_seed_alone() -> None:
    pytest.importorskip("gem")
    one, two = (GemSettings(id=EASY, options={"max_turns": 9}).conversation() for _ in range(2))
    numbers = []
    for seed in range(6):
        assert one.begin(0, seed).startswith("You are playing Guess The Number.")
        random.seed(seed)  # of others
        two.begin(0, seed + 100)
        low, high = 1, 10
        while True:
            guess = (low + high) // 2
            reply = one.reply(f"\\boxed{{{guess}}}")
            if reply.done:
                break
            assert (reply.reward, reply.success) == (0.0, False)
            assert re.search("higher|lower", reply.text)
            low, high = (guess + 1, high) if "higher" in reply.text else (low, guess - 1)
        assert (reply.reward, reply.success, reply.text) == (1.0, True, "")
        numbers.append(guess)
    assert len(set(numbers)) > 2
    again = GemSettings(id=EASY).conversation()
    again.begin(0, 5)
    assert again.reply(f"\\boxed{{{numbers[-1]}}}").success


def test_an_environment_that_does_not_exist_is_told() -> None:
    pytest.importorskip("gem")
    with pytest.raises(
        ConfigError, match=r"env\.id = game:Guess: GEM has no such environment; use one such as .*game:G"
    ):
        GemSettings(id="game:Guess").conversation()
    with pytest.raises(ConfigError, match=r"making it raised \w+Error \("):
        GemSettings(id="game:Sudoku-v0-easy", options={"clues": "x"}).conversation()
