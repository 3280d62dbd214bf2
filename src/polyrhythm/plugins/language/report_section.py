"""Report section: a table of the conversations in the first and last evaluation of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from polyrhythm.plugins.language.conversations import Entry, fits_line, outcome, outline, read_conversations
from polyrhythm.plugins.report.page import ReportSection, section
from polyrhythm.plugins.report.read import Run
from polyrhythm.plugins.report.tables import RESULTS
from polyrhythm.readable import counted, readable

#: Characters of a text, and turns of an episode, that are shown.
_CHARS, _TURNS = 600, 8
_CAPTION = (
    "Each prompt with what the policy answered in the first and the last evaluation; replies of the environment are "
    "grey. Long texts are cut; conversations.jsonl has all of them."
)


def draw(runs: Sequence[Run]) -> str:
    """The section for one run with conversations; "" otherwise."""
    return section("Prompts and answers", conversations(read_conversations(runs[0].folder)) if len(runs) == 1 else "")


def conversations(entries: Sequence[Entry]) -> str:
    """A table of messages by prompt and acting mode; "" without entries. entries: in the order of writing."""
    by_prompt: dict[tuple[int, str], list[Entry]] = {}
    for entry in _first_and_last(entries):
        by_prompt.setdefault((entry["index"], entry["prompt"]), []).append(entry)
    if not by_prompt:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("evaluation", "messages", "outcome"))
    body = "".join(_rows(prompt, entries) for (_, prompt), entries in sorted(by_prompt.items(), key=lambda one: one[0]))
    words = escape(_CAPTION, quote=True)
    table = f'<table class="said" aria-label="{words}"><thead><tr>{head}</tr></thead>{body}</table>'
    return f'<p class="soft">{words}</p><div class="scroll">{table}</div>'


def _first_and_last(entries: Sequence[Entry]) -> list[Entry]:
    """Those of the first and the last evaluation of each acting mode: sampled, swapped, or greedy."""
    modes: dict[str, list[tuple[str, int]]] = {}
    for entry in entries:
        name = entry["evaluation"]
        mode = name if name == "swapped" else name.partition("_")[2]
        modes.setdefault(mode, []).append((name, entry["version"]))
    chosen = dict.fromkeys([*(own[0] for own in modes.values()), *(own[-1] for own in modes.values())])
    return [entry for one in chosen for entry in entries if (entry["evaluation"], entry["version"]) == one]


def _rows(prompt: str, entries: Sequence[Entry]) -> str:
    rows = [f'<th scope="rowgroup" colspan="3">{_text(prompt)}</th>']
    for entry in entries:
        name = entry["evaluation"]  # shown as `before, greedy` or `during, sampled, version 20`
        words = "during, greedy" if name == "during" else name.replace("_", ", ")
        label = RESULTS[name] if RESULTS.get(name) else f"{words}, version {entry['version']}"
        cells = escape(label), "".join(_turns(entry["turns"])), escape(outcome(entry))
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    return f"<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody>"


def _turns(turns: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Short turns on one line, longer ones in a paragraph each."""
    for turn in outline(turns, _TURNS):
        if isinstance(turn, int):
            yield f'<span class="soft">[… {counted(turn, "turn")} …]</span> '
            continue
        said = [f"<span>{_text(turn['message'])}</span>", f'<span class="soft">{_text(turn["reply"])}</span>']
        short = fits_line(turn)
        yield "".join(f"{text} " if short else f"<p>{text}</p>" for text in said[: 1 + bool(turn["reply"])])


def _text(text: str) -> str:
    return escape(readable(text, _CHARS))


SECTION = ReportSection("Results", draw)
