"""Short stable codes of the messages that a user gets; error_codes.toml describes each.

`polyrhythm explain CODE` prints a code's cause and remedy. A code stands for one kind of cause. It is found from the
error's class and from words of its sentence, so raising an error needs no number.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

#: Code of a command line that argparse refuses.
COMMAND_LINE = "PR110"
#: Code of user code that breaks its contract.
CONTRACT = "PR106"
#: First digits of codes, with what was done when the error was found.
GROUPS = {
    "PR1": "The recipe and the command line",
    "PR2": "Something is missing on this machine",
    "PR3": "Run folders, checkpoints, datasets",
    "PR4": "The start",
    "PR5": "The run ended early",
    "PR6": "Other",
}


class Code(NamedTuple):
    """A kind of cause, as error_codes.toml describes it; that file has the meaning of each field."""

    code: str
    errors: Sequence[str]
    message: str
    what: str
    cause: str
    remedy: str
    says: Sequence[str] = ()

    def fits(self, sentence: str) -> bool:
        return not self.says or any(
            sentence.startswith(words[1:]) if words[0] == "^" else words in sentence for words in self.says
        )


@cache
def codes() -> Sequence[Code]:
    """All codes, in the order of the page. Not loaded before an error needs it."""
    text = Path(__file__).with_name("error_codes.toml").read_text(encoding="utf-8")
    return [Code(**entry) for entry in tomllib.loads(text)["codes"]]


def code_of(error: BaseException, sentence: str = "") -> str:
    """Code of an error, or of one of its sentences; "" for errors that are not a user's, such as a KeyError.

    The error's own class counts before its bases, and codes with words before the rest of a class.
    """
    text = sentence or next(iter(getattr(error, "problems", ())), str(error))
    for kind in type(error).__mro__:
        own = sorted((one for one in codes() if kind.__name__ in one.errors), key=lambda one: not one.says)
        if found := next((one.code for one in own if one.fits(text)), ""):
            return found
    return ""
