"""Tokenizers of text environments: one token per character, or that of a local folder.

They live beside the environments, because a message is text for the environment and ids for everything else: stations,
policies and engines never see text. A folder's tokenizer is loaded by the package `tokenizers` from its tokenizer.json,
without transformers. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from polyrhythm.errors import ConfigError, MissingError, pip_install
from polyrhythm.specs.model_folder import end_ids, read_object

#: `env.tokenizer` of one token per character.
CHARACTERS = "characters"
#: Where a folder names its end-of-text token.
_ENDS = "eos_token_id in generation_config.json or config.json, or eos_token in tokenizer_config.json"


class Tokenizer(Protocol):
    """Text to ids and back. size: ids are in 0..size-1; ends: end-of-text ids, the first one preferred; origin: its
    name in messages."""

    size: int
    ends: tuple[int, ...]
    origin: str

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without special tokens around it. ValueError: it has something that has no id."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; end-of-text tokens are left out."""
        ...


class CharacterTokenizer:
    """One id per character: 0 is the end of text, the characters follow in the order given."""

    ends: tuple[int, ...] = (0,)

    def __init__(self, alphabet: str) -> None:
        if len(set(alphabet)) != len(alphabet) or not alphabet:
            raise ConfigError(f"env.alphabet = {alphabet!r}: it has no characters, or one twice; name each once")
        self.origin = f"the characters {alphabet!r}"
        self.size = len(alphabet) + 1
        self._alphabet, self._ids = alphabet, {character: i + 1 for i, character in enumerate(alphabet)}

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[character] for character in text]
        except KeyError as missing:
            raise ValueError(f"{missing} is not among {self.origin}; add it to the environment's alphabet") from missing

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._alphabet[i - 1] for i in ids if i)


class FolderTokenizer:
    """The tokenizer of a folder in the layout of Hugging Face."""

    def __init__(self, folder: Path) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            install = pip_install("tokenizers")
            raise MissingError(f"env.tokenizer = {folder}: tokenizers is not installed; run: {install}") from error
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"env.tokenizer = {folder}: it has no tokenizer.json; name the folder of a model that has one, or use "
                f"{CHARACTERS}"
            )
        try:
            self._tokenizer: Any = Loaded.from_file(str(file))
        except Exception as error:  # of the package, without a class of its own
            raise ConfigError(
                f"env.tokenizer = {folder}: tokenizer.json cannot be read ({error}); fetch it again"
            ) from (error)
        self.origin = f"the tokenizer of {folder}"
        self.size = int(self._tokenizer.get_vocab_size(with_added_tokens=True))
        self.ends = tuple(_end_ids(folder, self._tokenizer))
        if not self.ends:
            raise ConfigError(
                f"env.tokenizer = {folder}: it names no end-of-text token, so no message would end; set {_ENDS}"
            )

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        kept = [i for i in ids if i not in self.ends]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))


@lru_cache(maxsize=8)
def character_tokenizer(alphabet: str) -> CharacterTokenizer:
    return CharacterTokenizer(alphabet)


def folder_tokenizer(folder: str) -> FolderTokenizer:
    """The tokenizer of a local folder, loaded once per process. MissingError: there is no such folder."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise MissingError(
            f"env.tokenizer = {folder}: there is no such folder; name the one with tokenizer.json (nothing is "
            f"downloaded here), or use {CHARACTERS}"
        )
    return _loaded(path)


@lru_cache(maxsize=8)
def _loaded(path: Path) -> FolderTokenizer:
    return FolderTokenizer(path)


def _end_ids(folder: Path, tokenizer: Any) -> list[int]:
    """End-of-text ids that the folder's files name, each once; those of generation come first."""
    found = end_ids(folder)
    text = read_object(folder / "tokenizer_config.json").get("eos_token")
    text = text.get("content") if isinstance(text, dict) else text
    if isinstance(text, str) and (known := tokenizer.token_to_id(text)) is not None:
        found.append(int(known))
    return list(dict.fromkeys(found))
