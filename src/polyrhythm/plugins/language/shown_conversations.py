"""Formats what was said in an evaluation's first episodes for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyrhythm.observe.intervals import counted
from polyrhythm.plugins.language.conversations import fits_line, outcome, outline
from polyrhythm.readable import readable

#: Characters of a text, and turns of an episode, that are shown.
_CHARS, _TURNS = 300, 6


def lines(entries: Sequence[Mapping[str, Any]]) -> str:
    """The entries of a result's `conversations`, each with its outcome, prompt, messages and replies."""
    return "\n".join(line for entry in entries for line in _of_episode(entry))


def _of_episode(entry: Mapping[str, Any]) -> Iterator[str]:
    yield f"episode {entry['index']}, {entry['task']}: {outcome(entry)}"
    yield _said("prompt", entry["prompt"])
    turns = entry["turns"]
    for turn in outline(turns, _TURNS):
        if isinstance(turn, int):
            yield f"  [… {counted(turn, 'turn')} …]"
            continue
        who, message, reply = "answer" if turn is turns[-1] else "message", turn["message"], turn["reply"]
        if reply and fits_line(turn):
            yield _said(who, f"{message}  →  {reply}")
            continue
        yield _said(who, message)
        if reply:
            yield _said("reply", reply)


def _said(who: str, text: str) -> str:
    """The text in a column of its own."""
    first, *more = readable(text, _CHARS).split("\n")
    return "\n".join([f"  {who:<8} {first}".rstrip(), *(f"{'':<10} {line}".rstrip() for line in more)])
