"""The site says what it says in at most 30,000 words (tools/count_prose.py); what is counted is held here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("count_prose", ROOT / "tools" / "count_prose.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PROSE = _load()


def test_the_site_has_at_most_thirty_thousand_words() -> None:
    pages = PROSE.pages()
    total = sum(pages.values())
    longest = sorted(pages.items(), key=lambda page: -page[1])[:5]
    assert len(pages) > 20, "docs/ has its pages"
    assert total <= PROSE.LIMIT, f"{total} words; cut pages or say it in the generated reference; longest: {longest}"


def test_readme_is_short() -> None:
    assert PROSE.count((ROOT / "README.md").read_text(encoding="utf-8")) <= 900


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("# Two words\n\nAnd three more.", 5),
        ("one\n```python\nnot = counted\n```\ntwo", 2),
        ("one\n~~~\nnot\n```\ncounted\n~~~\ntwo", 2),
        ("- see [the page](far/away.md#there) now", 4),
        ("![a picture of a run](figures/run.svg)", 0),
        ("| `lr` | 1e-3 | 87% [80, 92] |", 0),
        ("| `lr` | how far a step goes |", 5),
        ("| two words | a cell of four words |", 5),
        ("`a.b` is a setting — and 3 words", 7),
        ("<!-- a comment\nof two lines -->\nword", 1),
        ("---\ntitle: not counted\n---\nword", 1),
    ],
)
def test_what_is_counted(page: str, words: int) -> None:
    assert PROSE.count(page) == words


def test_the_generated_reference_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "settings.md").write_text("many words that a program wrote")
    (tmp_path / "page.md").write_text("three more words")
    assert PROSE.pages(tmp_path) == {"page.md": 3}


@pytest.mark.parametrize(
    "page",
    [ROOT / "docs" / "quickstart.md", *sorted(page for page in (ROOT / "docs" / "recipes").glob("[a-z]*.md"))],
    ids=lambda page: page.stem,
)
def test_recipe_pages_have_one_anatomy(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    parts = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert parts == ["What you need", "Run it", "Results", "What to watch", "Troubleshooting"]
    assert text.partition("## What you need")[0].count("![") == 1, "a picture comes first"
    assert "polyrhythm train" in text.partition("## Run it")[2].partition("## ")[0]
