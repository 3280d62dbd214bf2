"""Did you mean …?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: object, valid: Iterable[str]) -> str:
    """`did you mean X? ` for the closest valid word, or nothing."""
    match = difflib.get_close_matches(str(word), list(valid), n=1, cutoff=0.5)
    return f"did you mean {match[0]}? " if match else ""
