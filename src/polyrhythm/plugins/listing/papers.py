"""Sentences and formulas of papers, with the settings that realise them: papers.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml


class Sentence(NamedTuple):
    """An entry of papers.yaml, which has the meaning of each field."""

    paper: str
    at: str
    says: str = ""
    formula: str = ""
    settings: Sequence[str] = ()
    also: str = ""

    @property
    def text(self) -> str:
        """The quotation in its marks, or the formula."""
        return f"“{self.says}”" if self.says else self.formula


def sentences() -> list[Sentence]:
    """All entries, in the file's order."""
    text = Path(__file__).with_name("papers.yaml").read_text(encoding="utf-8")
    found, paper = [], ""
    for entry in yaml.safe_load(text):
        paper = entry.pop("paper", paper)
        found.append(Sentence(paper, **entry))
    return found


def realised_by(setting: str) -> list[tuple[str, Sentence]]:
    """What the setting at this dotted path realises: the value that does, "" for any, and the sentence."""
    pairs = [(name.partition("="), one) for one in sentences() for name in one.settings]
    return [(value, one) for (path, _, value), one in pairs if path == setting]
