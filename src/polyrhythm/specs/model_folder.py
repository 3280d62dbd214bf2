"""Reads the files of a language model's folder in the Hugging Face layout, for policies and environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyrhythm.files import parse_json


def end_ids(folder: Path) -> list[int]:
    """Distinct end-of-text ids of the model; those of the generation config come first."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        named = read_object(folder / name).get("eos_token_id")
        found += named if isinstance(named, list) else [named]
    return list(dict.fromkeys(i for i in found if isinstance(i, int)))


def read_object(file: Path) -> dict[str, Any]:
    """The file's JSON object; {} if there is none."""
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
