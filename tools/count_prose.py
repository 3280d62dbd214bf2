"""Count the words of prose on the documentation's pages: `python tools/count_prose.py [--limit 30000]`.

Counted: headings, paragraphs, lists, and cells of tables that hold a sentence. Not counted: code blocks, images,
targets of links, the generated reference (docs/reference/), and the cells of tables that hold figures, names or
settings (fewer than three words outside code). A word is anything between spaces that has a letter or a digit.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs"
LIMIT = 30_000
_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})[^\n]*\n.*?^\s*\2[`~]*\s*$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_FRONT = re.compile(r"\A---\n.*?^---\n", re.MULTILINE | re.DOTALL)
_IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_TAG = re.compile(r"<[^>\n]+>")
_CODE = re.compile(r"`[^`]*`")
_CELLS = re.compile(r"(?<!\\)\|")
#: Words outside code from which a cell of a table is a sentence.
SENTENCE = 3


def words(text: str) -> int:
    """Number of words in a text."""
    return sum(1 for word in text.split() if any(character.isalnum() for character in word))


def count(page: str) -> int:
    """Words of prose in the Markdown of a page."""
    text = _COMMENT.sub("", _FENCE.sub("", _FRONT.sub("", page)))
    text = _TAG.sub(" ", _LINK.sub(r"\1", _IMAGE.sub("", text)))
    return sum(_line(line) for line in text.splitlines())


def _line(line: str) -> int:
    if not line.lstrip().startswith("|"):
        return words(line)
    cells = _CELLS.split(line.strip().strip("|"))
    return sum(words(cell) for cell in cells if _letters(cell) >= SENTENCE)


def _letters(cell: str) -> int:
    """Words of a cell that are of letters, outside code."""
    return sum(1 for word in _CODE.sub(" ", cell).split() if any(character.isalpha() for character in word))


def pages(folder: Path = PAGES) -> dict[str, int]:
    """Words of each page of the site, by its path below docs/; the generated reference is left out."""
    found = sorted(path for path in folder.rglob("*.md") if path.relative_to(folder).parts[0] != "reference")
    return {str(path.relative_to(folder)): count(path.read_text(encoding="utf-8")) for path in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, default=LIMIT, help="most words in all (default: %(default)s)")
    limit = parser.parse_args().limit
    found = pages()
    for name, number in sorted(found.items(), key=lambda item: item[1]):
        sys.stdout.write(f"{number:6,}  {name}\n")
    total = sum(found.values())
    sys.stdout.write(f"{total:6,}  words of prose; at most {limit:,}\n")
    return int(total > limit)


if __name__ == "__main__":
    sys.exit(main())
