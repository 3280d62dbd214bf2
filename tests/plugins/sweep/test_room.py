"""How many runs fit at the same time."""

from __future__ import annotations

from typing import Any

import pytest
from tests.pipeline.runs import config

from polyrhythm.plugins.sweep.room import slots

FOUR = ["0", "1", "2", "3"]


def _local(**placement: Any) -> dict[str, Any]:
    return {"launcher": "local", "placement": placement}


@pytest.mark.parametrize(
    ("changes", "cores", "visible", "at_once", "found"),
    [
        ({}, 2, [], None, [None, None]),
        (_local(), 2, [], None, [None]),
        (_local(), 6, [], None, [None, None]),
        (_local(trainer={"threads": 4}), 12, [], None, [None, None]),
        (_local(), 2, [], 3, [None, None, None]),
        (_local(), 6, FOUR, None, [None, None]),
        (_local(generators={"devices": 0}, trainer={"devices": 0}), 16, FOUR, None, FOUR),
        (_local(generators={"devices": 0}, trainer={"devices": 1}), 16, FOUR, None, ["0,1", "2,3"]),
        (_local(generators={"devices": 0}, trainer={"devices": 1}), 16, ["4", "6", "7"], None, ["4,6"]),
        (_local(generators={"devices": 0}, trainer={"devices": 0}), 2, FOUR, None, ["0", "1"]),
        (_local(generators={"devices": 0}, trainer={"devices": 0}), 16, ["5"], 3, ["5", "5", "5"]),
        (_local(generators={"devices": 0}, simulated_devices=2), 6, [], None, [None, None]),
    ],
)
def test_a_run_gets_what_it_needs(
    changes: dict[str, Any], cores: int, visible: list[str], at_once: int | None, found: list[str | None]
) -> None:
    assert slots([config(**changes)], cores, visible, at_once) == found


def test_the_largest_need_counts() -> None:
    two, one = config(**_local(trainer={"devices": "0-1"})), config(**_local(trainer={"devices": 0}))
    assert slots([one, two], 16, FOUR, None) == ["0,1", "2,3"]
