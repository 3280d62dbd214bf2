"""Conversations of the first episodes of each evaluation: `conversations.jsonl`, one episode per line.

    {"evaluation": "after", "version": 60, "index": 0, "task": "chains", "seed": 1234, "prompt": "4+1-3=",
     "turns": [{"message": "+1=5,-3=2#2", "reply": ""}], "success": true, "return": 1.0, "metrics": {"cut": 0.0}}

`evaluation` is the name of the result in summary.json, or `during` or `during_sampled`. docs/language.md describes the
entries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from polyrhythm.files import atomic_write
from polyrhythm.observe.log_file import LogFile, warn_of_loss
from polyrhythm.pipeline.hooks import RunHooks
from polyrhythm.readable import counted, readable

CONVERSATIONS_FILE = "conversations.jsonl"
#: Characters of a text and turns of an episode that are shown; most characters of a message and its reply in one line.
_CHARS, _TURNS, _SHORT = 300, 6, 60

Entry = Mapping[str, Any]


def conversations_of(result: Mapping[str, Any]) -> list[Entry]:
    """Entries of an evaluation's result and of its variants, each labelled with `evaluation` or the variant's name."""
    parts = {"evaluation": result, **result.get("variants", {})}
    return [
        {"evaluation": name, "version": result["version"], **entry}
        for name, part in parts.items()
        for entry in part.get("conversations", ())
    ]


def append_conversations(path: Path, entries: Iterable[Entry]) -> None:
    """Append entries to the file. If it cannot be written they are dropped with a warning."""
    if not (lines := "".join(map(_line, entries))):
        return
    try:
        with closing(LogFile(path)) as file:
            file.write(lines)
    except OSError as error:
        warn_of_loss(path, error)


def read_conversations(folder: Path) -> list[Entry]:
    """Entries of the run in `folder`; the last written copy of each; damaged lines are skipped."""
    path, found = folder / CONVERSATIONS_FILE, dict[tuple[Any, ...], Entry]()
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else ():
        try:
            entry = json.loads(line)
            key = (entry["evaluation"], entry["version"], entry["index"])
            words = entry["evaluation"] + entry["task"] + entry["prompt"]
            _ = words + "".join(turn["message"] + turn["reply"] for turn in entry["turns"]) + outcome(entry)
        except (AttributeError, LookupError, TypeError, ValueError):  # a field that readers use is missing, or another
            continue
        if type(entry["version"]) is type(entry["index"]) is int:
            found.pop(key, None)
            found[key] = entry
    return list(found.values())


def _line(entry: Entry) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"


def outline(turns: Sequence[Mapping[str, str]], most: int) -> list[Mapping[str, str] | int]:
    """The turns; if there are more than `most`, the first and last ones around the number of turns left out."""
    if len(turns) <= most:
        return list(turns)
    head = (most + 1) // 2
    return [*turns[:head], len(turns) - most, *turns[len(turns) - most + head :]]


def fits_line(turn: Mapping[str, str]) -> bool:
    """Whether message and reply are short enough for one line."""
    said = turn["message"] + turn["reply"]
    return len(said) <= _SHORT and "\n" not in said


def outcome(entry: Entry) -> str:
    """Outcome such as `success, return 1`; `cut` is added if a message was cut at `env.max_new_tokens`."""
    success = [] if entry["success"] is None else ["success" if entry["success"] else "no success"]
    cut = ["cut"] if entry["metrics"].get("cut") else []
    return ", ".join([*success, f"return {entry['return']:.4g}", *cut])


def _texts(entry: Entry) -> Iterator[tuple[str, str]]:
    """The texts of an episode as they are shown, each with who says it."""
    yield "prompt", entry["prompt"]
    turns = entry["turns"]
    for turn in outline(turns, _TURNS):
        if isinstance(turn, int):
            yield "", f"[… {counted(turn, 'turn')} …]"
            continue
        who, message, reply = "answer" if turn is turns[-1] else "message", turn["message"], turn["reply"]
        if reply and fits_line(turn):
            yield who, f"{message}  →  {reply}"
        else:
            yield who, message
            yield from [("reply", reply)] if reply else []


class ConversationHooks(RunHooks):
    files = (CONVERSATIONS_FILE,)

    def on_evaluation(self, folder: Path, name: str, result: Mapping[str, Any]) -> None:
        named = {"evaluation": name, "version": result["version"]}
        append_conversations(folder / CONVERSATIONS_FILE, ({**named, **one} for one in result["conversations"]))

    def rewind(self, folder: Path, version: int) -> None:
        """Remove entries of later versions, which will be trained again, and unfinished lines after a crash."""
        found = read_conversations(folder)
        if (folder / CONVERSATIONS_FILE).is_file():
            with atomic_write(folder / CONVERSATIONS_FILE) as unfinished:
                kept = (_line(entry) for entry in found if entry["version"] <= version)
                unfinished.write_text("".join(kept), encoding="utf-8")

    def append(self, file: Path, result: Mapping[str, Any]) -> bool:
        """Append the conversations of an evaluation's result to the file; return whether it had any."""
        found = conversations_of(result)
        append_conversations(file, found)
        return bool(found)

    def lines(self, entries: Sequence[Entry]) -> str:
        """Text lines of the entries, for the terminal: outcome, prompt, messages and replies."""
        lines = []
        for entry in entries:
            lines.append(f"episode {entry['index']}, {entry['task']}: {outcome(entry)}")
            for who, text in _texts(entry):
                first, *more = readable(text, _CHARS).split("\n")
                lines += [f"  {who:<8} {first}".rstrip() if who else f"  {first}"]
                lines += [f"{'':<10} {line}".rstrip() for line in more]
        return "\n".join(lines)


HOOKS = ConversationHooks()
