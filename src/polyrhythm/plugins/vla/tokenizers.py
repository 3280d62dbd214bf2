"""Tokenizers of the policies: a local folder's, loaded by transformers, or a hash of each word.

Nothing is downloaded. A folder's tokenizer is loaded once per process; only then is transformers imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch

from polyrhythm.errors import ConfigError, MissingError, install_command
from polyrhythm.specs.hashing import mix

#: `policy.tokenizer` that asks for the hash of words even with a checkpoint.
WORDS = "words"
#: Beginning of a prompt and the first id of a word, of hashed words.
_BOS, _FIRST = 2, 4


class PromptTokenizer(Protocol):
    """Text to ids, without special tokens around it. bos: the begin token's id. origin: its name in messages."""

    bos: int
    origin: str

    def encode(self, text: str) -> list[int]: ...


class WordTokenizer:
    """Ids by a hash of each word, number or line end; needs no vocabulary file. Ids lie in 4..last−1. specials: texts
    that have an id of their own."""

    def __init__(self, last: int, *, bos: int = _BOS, specials: Mapping[str, int] | None = None) -> None:
        if last <= _FIRST + 1:
            raise ConfigError(f"a vocabulary of {last} words is too small for hashed words; give it at least 16")
        self.bos, self.origin = bos, f"a hash of words into {last} ids"
        self._last, self._specials = last, dict(specials or {})
        known = "".join(f"{re.escape(text)}|" for text in self._specials)
        self._pattern = re.compile(rf"{known}-?\d+|\w+|\n")

    def encode(self, text: str) -> list[int]:
        return [self._id(word) for word in self._pattern.findall(text)]

    def _id(self, word: str) -> int:
        if word in self._specials:
            return self._specials[word]
        return _FIRST + mix(*word.lower().encode()) % (self._last - _FIRST)


class FolderPromptTokenizer:
    def __init__(self, folder: str) -> None:
        self.origin = f"the tokenizer of {folder}"
        self._tokenizer = _loaded(folder)
        self.bos = -1 if self._tokenizer.bos_token_id is None else int(self._tokenizer.bos_token_id)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


@lru_cache(maxsize=8)
def folder_tokenizer(folder: str) -> FolderPromptTokenizer:
    """The tokenizer of a local folder. ConfigError: it does not exist or cannot be loaded."""
    return FolderPromptTokenizer(folder)


def _loaded(folder: str) -> Any:
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise MissingError(
            f"policy.tokenizer = {folder}: there is no such folder; name the folder with tokenizer.json or "
            "tokenizer.model (nothing is downloaded here)"
        )
    try:
        with torch.device("cpu"):
            from transformers import AutoTokenizer

            return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise MissingError(
            f"policy.tokenizer = {folder} needs transformers ({error}); run: {install_command('vla')}"
        ) from error
    except Exception as error:  # transformers and its readers raise many types
        line = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"policy.tokenizer = {folder}: transformers cannot load a tokenizer from it ({line[0][:160]}); copy "
            "tokenizer.json and tokenizer_config.json again from the release"
        ) from error
