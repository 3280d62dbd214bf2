"""Report section: the conversations of a run's evaluations, with filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyrhythm.plugins.language.conversations import CONVERSATIONS_FILE, Entry, outline, read_conversations
from polyrhythm.plugins.report.gallery import finite, finite_metrics
from polyrhythm.plugins.report.parts import Part, text
from polyrhythm.plugins.report.read import ReportSection, Run
from polyrhythm.readable import counted, readable

#: Characters of a text, turns of an episode, and episodes that the page holds: of the first ones and of the last ones.
_CHARS, _TURNS, _FIRST, _LAST = 4000, 24, 100, 400


def draw(runs: Sequence[Run]) -> list[Part]:
    """The conversations of one run; none without any."""
    return conversations(read_conversations(runs[0].folder)) if len(runs) == 1 else []


def conversations(entries: Sequence[Entry]) -> list[Part]:
    """Their parts; entries: in the order of writing."""
    if not entries:
        return []
    held = entries if len(entries) <= _FIRST + _LAST else [*entries[:_FIRST], *entries[-_LAST:]]
    left_out = len(entries) - len(held)
    held = sorted(held, key=lambda one: one["index"])  # what was answered to a prompt stands together
    caption = "What the policy was asked and what it answered in evaluations, prompt by prompt. "
    if left_out:
        caption += f"{counted(left_out, 'episode')} between the first and the last ones are left out. "
    caption += f"Long texts are cut; {CONVERSATIONS_FILE} has all of them."
    part = {"kind": "episodes", "id": "conversations", "entries": [_entry(one) for one in held]}
    return [text(caption, "soft"), part]


def _entry(entry: Entry) -> dict[str, Any]:
    name, _, mode = entry["evaluation"].partition("_")
    return {
        "evaluation": "after" if name == "swapped" else name,
        "version": entry["version"],
        "mode": name if name == "swapped" else mode or "greedy",
        "task": entry["task"],
        "instruction": "",
        "seed": str(entry.get("seed", "")),
        "sample": 0,
        "success": None if entry["success"] is None else bool(entry["success"]),
        "return": finite(entry["return"]),
        "length": 0,
        "failure": "",
        "metrics": {own: value for own, value in finite_metrics(entry["metrics"]).items() if value},
        "video": None,
        "prompt": readable(entry["prompt"], _CHARS),
        "turns": [_turn(turn) for turn in outline(entry["turns"], _TURNS)],
    }


def _turn(turn: Mapping[str, str] | int) -> dict[str, str]:
    if isinstance(turn, int):
        return {"message": f"[… {counted(turn, 'turn')} …]", "reply": ""}
    return {"message": readable(turn["message"], _CHARS), "reply": readable(turn["reply"], _CHARS)}


SECTION = ReportSection("conversations", "Prompts and answers", draw, after="results")
