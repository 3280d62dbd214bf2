"""LIBERO's suites: names, instructions, also in other words, and the published step limit of each task.

Needs no simulator.

A task's name is that of its files in LIBERO: its scene, if the suite has several, and the words of its instruction.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

#: Fixed initial states of every task.
INITIAL_STATES = 50
#: Suite -> env steps of an episode in the papers' evaluations, without those in which objects come to rest.
STEP_LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
#: Suite -> scene -> instructions, the scene "" if the suite has one only; and `words`.
_TABLE = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text("utf-8"))
#: LIBERO's words → others with the same meaning, the longest first where one begins with another.
_WORDS: Mapping[str, str] = _TABLE.pop("words")


class LiberoTask(NamedTuple):
    suite: str
    instruction: str


#: Name -> task; names are different in all suites.
TASKS = {
    "_".join([*filter(None, [scene]), *instruction.split()]): LiberoTask(suite, instruction)
    for suite, scenes in _TABLE.items()
    for scene, instructions in scenes.items()
    for instruction in instructions
}
#: Suite -> names of its tasks.
SUITES = {suite: tuple(name for name, task in TASKS.items() if task.suite == suite) for suite in STEP_LIMITS}
INSTRUCTIONS = {name: task.instruction for name, task in TASKS.items()}
_PATTERN = re.compile(rf"\b({'|'.join(sorted(_WORDS, key=len, reverse=True))})\b")


def in_other_words(instruction: str) -> str:
    """A paraphrase with other verbs and nouns: "open the top drawer of the cabinet" becomes "pull open the top
    drawer of the cupboard"."""
    return _PATTERN.sub(lambda found: _WORDS[found[0]], instruction)
