"""What the files of a language model's folder say, in the layout of Hugging Face: read by policies and environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyrhythm.files import parse_json


def end_ids(folder: Path) -> list[int]:
    """End-of-text ids that the folder's files for the model name, each once; those of generation come first."""
    found: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        named = read_object(folder / name).get("eos_token_id")
        found += named if isinstance(named, list) else [named]
    return list(dict.fromkeys(i for i in found if isinstance(i, int)))


def open_tokenizer(folder: Path) -> Any:
    """The tokenizer of the folder's tokenizer.json, without the truncation and padding that such a file may keep, which
    would cut or fill every text. ImportError: the package tokenizers is not installed; else errors of that package."""
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found.no_truncation()
    found.no_padding()
    return found


def id_count(tokenizer: Any) -> int:
    """The largest id of a tokenizer and 1: ids may have gaps, so that it has fewer tokens."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def read_object(file: Path) -> dict[str, Any]:
    """The file's JSON object; {} if there is none."""
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
