"""What a sweep varies."""

from __future__ import annotations

import random

import pytest

from polyrhythm.config.load import parse_override
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.sweep.space import drawn, grid, key, label, parse


def test_values_ranges_and_fixed_settings_are_told_apart() -> None:
    words = ["a.lr=1e-4,3e-4", "b=1", "c={x: 1, y: [2,3]}", "d='0,1'", "e=1e-5..1e-3:log", "f=2..8", "g=[1,2],[3]"]
    fixed, varied = parse(words)
    assert fixed == ["b=1", "c={x: 1, y: [2,3]}", "d='0,1'"]
    assert [one.path for one in varied] == ["a.lr", "e", "f", "g"]
    assert varied[0].values == ("1e-4", "3e-4")
    assert varied[3].values == ("[1,2]", "[3]")
    assert [(one.log, one.whole) for one in varied] == [(False, False), (True, False), (False, True), (False, False)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a=1,,2"], "a value is empty or given twice"),
        (["a=1,2,"], "a value is empty or given twice"),
        (["a=1,1"], "a value is empty or given twice"),
        (["a=1,2", "a=3,4"], "a varies already"),
        (["a=1,2", "a=3"], "this setting varies"),
        (["a=3..2"], "from a number to a larger one"),
        (["a=2..2"], "from a number to a larger one"),
        (["a=0..1:log"], "needs numbers above 0"),
        (["a=-1..1e3:log"], "needs numbers above 0"),
    ],
)
def test_what_is_no_set_of_values_is_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(words)


def test_a_grid_has_every_combination_and_each_a_name_of_its_own() -> None:
    fixed, varied = parse(["x.lr=1,2", "y.lr=3,4,5"])
    combinations = list(grid(varied))
    assert len(combinations) == 6
    assert label(combinations[0]) == "x.lr=1, y.lr=3"
    assert len({key(one, fixed) for one in combinations}) == 6
    assert key(combinations[0], fixed) != key(combinations[0], ["z=1"])
    assert all("/" not in key({"a": text}, []) for text in ("module:x/y", "../..", "{a: b}"))


def test_random_draws_are_within_bounds_different_and_continued_by_more() -> None:
    _, varied = parse(["lr=1e-5..1e-3:log", "epochs=1..4", "clip=0.1..0.3", "kind=a,b"])
    found = drawn(varied, 60, 3)
    assert drawn(varied, 20, 3) == found[:20]
    assert drawn(varied, 20, 4) != found[:20]
    assert all(1e-5 <= float(one["lr"]) <= 1e-3 for one in found)
    below = sum(float(one["lr"]) < 1e-4 for one in found)
    assert 18 <= below <= 42, "as many below the geometric middle as above"
    assert {one["epochs"] for one in found} == {"1", "2", "3", "4"}
    _, small = parse(["a=1,2", "b=1,2"])
    assert len(drawn(small, 50, 0)) == 4


@pytest.mark.parametrize("text", ["a=0.1234567..0.1234569", "a=1e-12..2e-12:log", "a=-2..-1.5", "a=1..1e6:log"])
def test_a_value_from_a_range_stays_within_it(text: str) -> None:
    _, (setting,) = parse([text])
    for seed in range(50):
        found = setting.draw(random.Random(seed))
        assert setting.low <= float(found) <= setting.high
        (value,) = parse_override(f"a={found}").values()
        assert isinstance(value, float)


@pytest.mark.parametrize(
    ("text", "value", "has"),
    [
        ("a=1,2", "2", True),
        ("a=1,2", "1.0", False),
        ("a=1..8", "8", True),
        ("a=1..8", "9", False),
        ("a=1..8", "3.5", False),
        ("a=1e-5..1e-3:log", "1e-05", True),
        ("a=1e-5..1e-3:log", "0.002", False),
        ("a=0.1..0.3", "adam", False),
    ],
)
def test_whether_a_setting_may_take_a_value(text: str, value: str, has: bool) -> None:
    _, (setting,) = parse([text])
    assert setting.has(value) is has
