"""LIBERO's instructions in other words, for an evaluation out of distribution."""

from __future__ import annotations

import re

#: LIBERO's words → others with the same meaning, the longest first where one begins with another.
_WORDS = {
    "pick up": "grab",
    "turn on": "switch on",
    "turn off": "switch off",
    "on top of": "onto the top of",
    "to the front of": "to the near side of",
    "place": "set",
    "put": "move",
    "open": "pull open",
    "close": "shut",
    "push": "slide",
    "stack": "pile",
    "basket": "hamper",
    "tray": "platter",
    "bowl": "dish",
    "mug": "cup",
    "stove": "cooker",
    "cabinet": "cupboard",
    "frying pan": "skillet",
    "caddy": "organizer",
}
_PATTERN = re.compile(rf"\b({'|'.join(sorted(_WORDS, key=len, reverse=True))})\b")


def in_other_words(instruction: str) -> str:
    """The same with other verbs and nouns: "open the top drawer of the cabinet" gives "pull open the top drawer of the
    cupboard"."""
    return _PATTERN.sub(lambda found: _WORDS[found[0]], instruction)
