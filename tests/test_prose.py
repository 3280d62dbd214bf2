"""Prose in Markdown has lines of at most 120 characters; tables, code blocks and images may be longer."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST = 120
_FENCE = re.compile(r"^\s*(`{3,}|~{3,})")
_TABLE_OR_IMAGE = re.compile(r"^\s*(\||!\[)")


def _pages() -> list[Path]:
    """All Markdown pages of the checkout; those of README and docs where git does not know it (a source archive)."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    names = listed.split() or [str(path) for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))]
    return [page for name in sorted(names) if (page := ROOT / name).exists()]


def _too_long(text: str) -> Iterator[int]:
    """Numbers of the prose lines that are too long."""
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if marker := _FENCE.match(line):
            if not fence:
                fence = marker[1]
            elif marker[1].startswith(fence):
                fence = ""
        elif not fence and not _TABLE_OR_IMAGE.match(line) and len(line) > LONGEST:
            yield number


@pytest.mark.parametrize("page", _pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_lines_fit(page: Path) -> None:
    assert list(_too_long(page.read_text(encoding="utf-8"))) == []


def test_only_prose_is_measured() -> None:
    long = "x" * (LONGEST + 1)
    exempt = ["x" * LONGEST, f"| {long} |", f"![{long}](a.png)", "```", long, "```", "~~~~", "```", long, "~~~~"]
    assert list(_too_long("\n".join(exempt))) == []
    assert list(_too_long("\n".join(["```", "```", long, f"- {long}", "```", long]))) == [3, 4]
