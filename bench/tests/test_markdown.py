"""Wrapping of generated pages: regenerating a committed page must change its numbers alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyrhythm_bench.harness.markdown import WIDTH, wrap_prose

RESULTS = Path(__file__).parents[1] / "results"
GENERATED = (
    *("algorithms", "batching", "learning", "papers", "quickstart_seeds", "redundancy", "redundancy_live"),
    *("theory", "utilisation_table"),
)


@pytest.mark.parametrize("name", GENERATED)
def test_committed_pages_are_wrapped_as_their_generators_do(name: str) -> None:
    page = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert wrap_prose(page) == page


def test_paragraphs_and_items_are_filled_and_tables_kept() -> None:
    table = f"| {'x' * WIDTH} | y |"
    page = wrap_prose(f"# Head\n\none\ntwo\n{table}\n\n- {'word ' * 30}\n  last\n- next\n")
    first, rest = page.split("- ", 1)
    assert first == f"# Head\n\none two\n{table}\n\n"
    assert max(map(len, rest.splitlines())) <= WIDTH
    assert rest.splitlines()[1].startswith("  word")
    assert rest.endswith("word last\n- next\n")
