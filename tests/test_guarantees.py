"""docs/guarantees.md names tests that exist, and every guarantee names one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")


def test_every_guarantee_names_tests_that_exist() -> None:
    items = re.split(r"^(?=\d+\. )", PAGE.partition("## Limits")[0], flags=re.MULTILINE)[1:]
    assert [item.partition(".")[0] for item in items] == [str(number) for number in range(1, 11)]
    for item in items:
        named = re.findall(r"`((?:bench/)?tests/[\w/]+\.py)::(test_\w+)`", item)
        assert named, item
        for file, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), name
