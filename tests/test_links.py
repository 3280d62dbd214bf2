"""Pages name what exists: targets of relative links, headings behind `#`, and files in their text.

The links of docs/ are those of the site: test_site.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_PACKAGE = ROOT / "src" / "polyrhythm"
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").rglob("*.md")})
_LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
#: A path in backquotes or a command; below one of the checkout's own folders it can be nothing else.
_PATH = re.compile(r"(?<![\w/.-])((?:bench|docs|examples|recipes|src|tests|tools)/[\w./*-]*[\w*])")


def _id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, made as GitHub makes them."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _broken(page: Path) -> Iterator[str]:
    for target in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        found = (page.parent / path).resolve() if path else page
        if not found.exists() or (anchor and anchor not in _anchors(found)):
            yield target


@pytest.mark.parametrize("page", [page for page in PAGES if not page.is_relative_to(ROOT / "docs")], ids=_id)
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert list(_broken(page)) == []


#: It names files of other systems' repositories.
_OTHERS = ROOT / "docs" / "settings-elsewhere.md"


@pytest.mark.parametrize("page", [page for page in PAGES if page != _OTHERS], ids=_id)
def test_files_of_the_checkout_that_a_page_names_exist(page: Path) -> None:
    named = set(_PATH.findall(page.read_text(encoding="utf-8")))
    bases = (ROOT, page.parent)
    assert [path for path in sorted(named) if not any(any(base.glob(path)) for base in bases)] == []


def test_the_journey_names_files_of_the_package() -> None:
    text = (ROOT / "docs" / "journey.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+(?:\.py|/))[`:]", text))
    assert len(named) > 10, "the page names its files in backquotes, below src/polyrhythm/ or the checkout"
    assert [path for path in sorted(named) if not any((base / path).exists() for base in (_PACKAGE, ROOT))] == []
