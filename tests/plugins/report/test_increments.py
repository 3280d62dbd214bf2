"""Increments between two states of a page's data."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from polyrhythm.plugins.report.increments import apply, changes


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ({"y": [1, 2]}, {"y": [1, 2, 3]}, [{"at": ["y"], "keep": 2, "append": [3]}]),
        ({"y": [1, 2]}, {"y": [1, 5]}, [{"at": ["y"], "keep": 1, "append": [5]}]),
        ({"y": [1, 2]}, {"y": [1]}, [{"at": ["y"], "keep": 1, "append": []}]),
        ({"y": [1]}, {"y": [True]}, [{"at": ["y"], "keep": 0, "append": [True]}]),
        ({"y": [1]}, {"y": []}, [{"at": ["y"], "set": []}]),
        ({"y": []}, {"y": [1]}, [{"at": ["y"], "set": [1]}]),
        ({"a": 1, "b": 2}, {"b": 2, "c": 3}, [{"at": ["a"], "drop": True}, {"at": ["c"], "set": 3}]),
        ({"id": "a", "x": 1}, {"id": "b", "x": 1}, [{"at": [], "set": {"id": "b", "x": 1}}]),
        (
            [{"y": [1]}],
            [{"y": [1, 2]}, {}],
            [{"at": [0, "y"], "keep": 1, "append": [2]}, {"at": [], "keep": 1, "append": [{}]}],
        ),
        ({"a": None}, {"a": False}, [{"at": ["a"], "set": False}]),
        ({"a": {"b": 1}}, {"a": {"b": 1}}, []),
    ],
)
def test_an_increment_says_what_changed(old: Any, new: Any, expected: Any) -> None:
    assert changes(old, new) == expected
    assert json.dumps(apply(copy.deepcopy(old), changes(old, new))) == json.dumps(new)


def test_increments_restore_any_state() -> None:
    rng = random.Random(0)

    def value(depth: int) -> Any:
        kind = rng.randrange(6 if depth else 3)
        if kind < 3:
            return (rng.randrange(4), rng.choice("ab"), None)[kind]
        if kind == 3:
            return {rng.choice(("id", "x", "y")): value(depth - 1) for _ in range(rng.randrange(4))}
        return [value(depth - 1) for _ in range(rng.randrange(4))]

    for _ in range(3000):
        old, new = value(3), value(3)
        assert apply(copy.deepcopy(old), changes(old, new)) == new
