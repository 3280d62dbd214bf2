"""What was said in the first episodes of each evaluation: `conversations.jsonl`, one episode a line.

    {"evaluation": "after", "version": 60, "index": 0, "task": "chains", "seed": 1234, "prompt": "4+1-3=",
     "turns": [{"message": "+1=5,-3=2#2", "reply": ""}], "success": true, "return": 1.0, "metrics": {"cut": 0.0}}

`evaluation` is the result's name in summary.json, or during, during_sampled. docs/language.md describes the entries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from polyrhythm.files import atomic_write
from polyrhythm.observe.intervals import counted
from polyrhythm.observe.log_file import LogFile, warn_of_loss
from polyrhythm.pipeline.hooks import RunHooks
from polyrhythm.readable import readable

CONVERSATIONS_FILE = "conversations.jsonl"

#: Most characters of a message and its reply that share a line.
_SHORT = 60

Entry = Mapping[str, Any]
#: Characters of a text, and turns of an episode, that are shown.
_CHARS, _TURNS = 300, 6


def write_conversations(folder: Path, entries: Iterable[Entry]) -> None:
    """Append these to those of the run in `folder`."""
    append_conversations(folder / CONVERSATIONS_FILE, entries)


def conversations_of(result: Mapping[str, Any]) -> list[Entry]:
    """Those of an evaluation's result and of its variants, each with `evaluation`: `evaluation`, or the variant."""
    parts = {"evaluation": result, **result.get("variants", {})}
    return [
        {"evaluation": name, "version": result["version"], **entry}
        for name, part in parts.items()
        for entry in part.get("conversations", ())
    ]


def append_conversations(path: Path, entries: Iterable[Entry]) -> None:
    """Append these to the file; where they cannot be written they are lost, with a warning."""
    lines = "".join(_line(entry) for entry in entries)
    if not lines:
        return
    try:
        with closing(LogFile(path)) as file:
            file.write(lines)
    except OSError as error:
        warn_of_loss(path, error)


def read_conversations(folder: Path) -> list[Entry]:
    """Those of the run in `folder`, each once, as it was written last; damaged lines are left out."""
    path, found = folder / CONVERSATIONS_FILE, dict[tuple[Any, ...], Entry]()
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else ():
        try:
            entry = _checked(json.loads(line))
        except (AttributeError, LookupError, TypeError, ValueError):
            continue
        key = (entry["evaluation"], entry["version"], entry["index"])
        found.pop(key, None)
        found[key] = entry
    return list(found.values())


def _checked(entry: Entry) -> Entry:
    """The entry, if whoever shows it finds what it needs; else one of several errors."""
    words = entry["evaluation"] + entry["task"] + entry["prompt"]
    turns = "".join(turn["message"] + turn["reply"] for turn in entry["turns"])
    numbers = entry["version"], entry["index"]
    if not all(type(number) is int for number in numbers):
        raise TypeError(f"version, index = {numbers}")
    _ = words + turns + outcome(entry)
    return entry


def forget_conversations(folder: Path, version: int) -> None:
    """Remove those of later versions, whose weights are trained again, and lines that a crash has left unfinished."""
    found = read_conversations(folder)
    if (folder / CONVERSATIONS_FILE).is_file():
        with atomic_write(folder / CONVERSATIONS_FILE) as unfinished:
            kept = (_line(entry) for entry in found if entry["version"] <= version)
            unfinished.write_text("".join(kept), encoding="utf-8")


def _line(entry: Entry) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"


def outline(turns: Sequence[Mapping[str, str]], most: int) -> list[Mapping[str, str] | int]:
    """The turns; of more than `most` the first and last ones, with how many were left out in between."""
    if len(turns) <= most:
        return list(turns)
    head = (most + 1) // 2
    return [*turns[:head], len(turns) - most, *turns[len(turns) - most + head :]]


def fits_line(turn: Mapping[str, str]) -> bool:
    """Whether the message and the reply to it are shown in one line."""
    said = turn["message"] + turn["reply"]
    return len(said) <= _SHORT and "\n" not in said


def outcome(entry: Entry) -> str:
    """`success, return 1`; with `cut` where a message was cut at `env.max_new_tokens`."""
    success = [] if entry["success"] is None else ["success" if entry["success"] else "no success"]
    cut = ["cut"] if entry["metrics"].get("cut") else []
    return ", ".join([*success, f"return {entry['return']:.4g}", *cut])


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


class ConversationHooks(RunHooks):
    """Writes the conversations of a run's evaluations to its folder."""

    files = (CONVERSATIONS_FILE,)

    def on_evaluation(self, folder: Path, name: str, result: Mapping[str, Any]) -> None:
        named = {"evaluation": name, "version": result["version"]}
        write_conversations(folder, ({**named, **one} for one in result["conversations"]))

    def rewind(self, folder: Path, version: int) -> None:
        forget_conversations(folder, version)

    def append(self, file: Path, result: Mapping[str, Any]) -> bool:
        """Append those of an evaluation's result to the file; whether there are any."""
        found = conversations_of(result)
        append_conversations(file, found)
        return bool(found)

    def lines(self, entries: Sequence[Entry]) -> str:
        """The entries of a result's `conversations`, for the terminal."""
        return lines(entries)


HOOKS = ConversationHooks()
