"""Report section: a table of the conversations in the first and last evaluation of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyrhythm.plugins.language.conversations import Entry, outcome, outline, read_conversations
from polyrhythm.plugins.report.parts import Part, ReportSection, table
from polyrhythm.plugins.report.read import Run
from polyrhythm.plugins.report.tables import RESULTS
from polyrhythm.readable import counted, readable

#: Characters of a text, and turns of an episode, that are shown.
_CHARS, _TURNS = 600, 8
_CAPTION = (
    "Each prompt with what the policy answered in the first and the last evaluation; replies of the environment follow "
    "an arrow. Long texts are cut; conversations.jsonl has all of them."
)


def draw(runs: Sequence[Run]) -> list[Part]:
    """The section for one run with conversations."""
    return conversations(read_conversations(runs[0].folder)) if len(runs) == 1 else []


def conversations(entries: Sequence[Entry]) -> list[Part]:
    """A table of messages by prompt and acting mode; none without entries. entries: in the order of writing."""
    chosen = sorted(_first_and_last(entries), key=lambda entry: (entry["index"], entry["prompt"]))
    rows = [
        [readable(entry["prompt"], _CHARS), _label(entry), "\n".join(_turns(entry["turns"])), outcome(entry)]
        for entry in chosen
    ]
    return [table(["prompt", "evaluation", "messages", "outcome"], rows, _CAPTION)] if rows else []


def _first_and_last(entries: Sequence[Entry]) -> list[Entry]:
    """Those of the first and the last evaluation of each acting mode: sampled, swapped, or greedy."""
    modes: dict[str, list[tuple[str, int]]] = {}
    for entry in entries:
        name = entry["evaluation"]
        mode = name if name == "swapped" else name.partition("_")[2]
        modes.setdefault(mode, []).append((name, entry["version"]))
    chosen = dict.fromkeys([*(own[0] for own in modes.values()), *(own[-1] for own in modes.values())])
    return [entry for one in chosen for entry in entries if (entry["evaluation"], entry["version"]) == one]


def _label(entry: Entry) -> str:
    """`before, greedy` or `during, sampled, version 20`."""
    name = entry["evaluation"]
    words = "during, greedy" if name == "during" else name.replace("_", ", ")
    return RESULTS[name] if RESULTS.get(name) else f"{words}, version {entry['version']}"


def _turns(turns: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for turn in outline(turns, _TURNS):
        if isinstance(turn, int):
            yield f"[… {counted(turn, 'turn')} …]"
        else:
            yield readable(turn["message"], _CHARS)
            if turn["reply"]:
                yield f"→ {readable(turn['reply'], _CHARS)}"


SECTION = ReportSection("conversations", "Prompts and answers", draw, after="results")
