"""Suggests the nearest valid word: did you mean …?"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def nearest(word: object, valid: Iterable[str], elsewhere: Sequence[str] = ()) -> str:
    """`did you mean X? ` with the paths `elsewhere` that have the word, else the closest valid word; "" if none."""
    known, text = list(valid), str(word)
    holding = [name for name in known if len(text) > 2 and text in name]
    match = list(elsewhere[:3]) or holding[:1] or difflib.get_close_matches(text, known, n=1, cutoff=0.5)
    return f"did you mean {' or '.join(match)}? " if match else ""
