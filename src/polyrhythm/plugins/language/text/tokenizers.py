"""Tokenizers of text environments: one token per character, or a local folder's.

They belong to the environments because only the environment uses text: stations, policies and engines see ids. A
folder's tokenizer.json is loaded with the package `tokenizers`, without transformers. Nothing is downloaded.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from polyrhythm.errors import ConfigError, MissingError, pip_install
from polyrhythm.specs.model_folder import end_ids, read_object

log = logging.getLogger(__name__)

#: `env.tokenizer` of one token per character.
CHARACTERS = "characters"
#: Where a folder names its end-of-text token.
_ENDS = "eos_token_id in generation_config.json or config.json, or eos_token in tokenizer_config.json"
_CONFIG = "tokenizer_config.json"
#: Parts without an id that an error names.
_NAMED = 5
#: What stands for a part without an id that has no simpler form, if it has an id itself.
_MARKS = ("\ufffd", "?")

#: First and last position of a part of a text, the last one excluded.
Span = tuple[int, int]


class Tokenizer:
    """Text to ids and back. size: ids lie in 0..size-1; ends: end-of-text ids, the preferred one first; start: ids
    at the start of every conversation, such as begin-of-text; marks: ids of special and other added tokens; origin:
    its name in messages; lacks: what a part without an id is, and what to do."""

    size: int
    ends: tuple[int, ...]
    start: tuple[int, ...] = ()
    marks: frozenset[int]
    origin: str
    lacks: str

    def lacking(self, text: str) -> list[Span]:
        """Parts of the text that cannot be encoded, in order."""
        return self._read(text)[1]

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without special tokens around it. ValueError: parts of it cannot be encoded."""
        ids, spans = self._read(text)
        if spans:
            parts = list(dict.fromkeys(text[first:end] for first, end in spans))
            named, more = ", ".join(map(repr, parts[:_NAMED])), len(parts) - _NAMED
            named += f" and {more} more" if more > 0 else ""
            raise ValueError(f"{named} {'is' if len(parts) == 1 else 'are'} {self.lacks}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, without end-of-text tokens."""
        raise NotImplementedError

    def _read(self, text: str) -> tuple[list[int], list[Span]]:
        """Ids of the text, and the parts that cannot be encoded."""
        raise NotImplementedError


class CharacterTokenizer(Tokenizer):
    """One id per character: 0 is the end of text, the characters follow in the given order."""

    ends = (0,)
    marks = frozenset(ends)

    def __init__(self, alphabet: str) -> None:
        if len(set(alphabet)) != len(alphabet) or not alphabet:
            raise ConfigError(f"env.alphabet = {alphabet!r}: it has no characters, or one twice; name each once")
        self.origin = f"the characters {alphabet!r}"
        self.lacks = f"not among {self.origin}; add it to the environment's alphabet"
        self.size = len(alphabet) + 1
        self._alphabet, self._ids = alphabet, {character: i + 1 for i, character in enumerate(alphabet)}

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._alphabet[i - 1] for i in ids if i)

    def _read(self, text: str) -> tuple[list[int], list[Span]]:
        ids = [self._ids.get(character, 0) for character in text]
        return ids, [(i, i + 1) for i, number in enumerate(ids) if not number]


class FolderTokenizer(Tokenizer):
    """The tokenizer of a folder in the Hugging Face layout."""

    def __init__(self, folder: Path) -> None:
        what = f"env.tokenizer = {folder}"
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            install = pip_install("tokenizers")
            raise MissingError(f"{what}: tokenizers is not installed; run: {install}") from error
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"{what}: it has no tokenizer.json; name the folder of a model that has one, or use {CHARACTERS}"
            )
        try:
            self._tokenizer: Any = Loaded.from_file(str(file))
        except Exception as error:  # of the package, without a class of its own
            raise ConfigError(f"{what}: tokenizer.json cannot be read ({error}); fetch it again") from error
        self._tokenizer.no_truncation()  # the file may keep those of some training: they would cut or fill every text
        self._tokenizer.no_padding()
        self._config = read_object(folder / _CONFIG)
        self.origin = f"the tokenizer of {folder}"
        self.lacks = f"without an id in {self.origin}; leave it out, or use another model"
        self.size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)  # ids may not be contiguous
        ends = dict.fromkeys((*end_ids(folder), self._named_id("eos_token")))  # the generation config's come first
        self.ends = tuple(i for i in ends if i is not None and 0 <= i < self.size)
        if not self.ends:
            raise ConfigError(f"{what}: it names no end-of-text token, so no message would end; set {_ENDS}")
        self.start = self._start_ids(what)
        model = self._tokenizer.model
        if type(model).__name__ == "Unigram":
            number = read_object(file).get("model", {}).get("unk_id")
            unknown = self._tokenizer.id_to_token(number) if isinstance(number, int) else None
        else:
            unknown = model.unk_token
        self._unknown = unknown, None if unknown is None else self._tokenizer.token_to_id(unknown)
        self._drops = self._unknown[1] is None and type(model).__name__ == "BPE"
        self.marks = frozenset(self._tokenizer.get_added_tokens_decoder())
        self._covered: dict[str, bool] = {}  # by character: whether all of it becomes tokens

    def _named_id(self, name: str) -> int | None:
        """The id of a special token in tokenizer_config.json; None if it is missing there or in the tokenizer."""
        text = self._config.get(name)
        text = text.get("content") if isinstance(text, dict) else text
        return self._tokenizer.token_to_id(text) if isinstance(text, str) else None

    def _start_ids(self, what: str) -> tuple[int, ...]:
        """Start ids: those that the post-processor adds before a text, found by encoding one token, unless
        `add_bos_token` contradicts: then begin-of-text, or nothing."""
        added: tuple[int, ...] = ()
        for text in self._tokenizer.get_vocab():
            if self._tokenizer.encode(text, add_special_tokens=False).ids:
                whole = self._tokenizer.encode(text)
                special = whole.special_tokens_mask
                added = tuple(whole.ids[: special.index(0)]) if 0 in special else ()
                break
        wanted = self._config.get("add_bos_token")
        if not isinstance(wanted, bool) or wanted == bool(added):
            return added
        start = self._named_id("bos_token")
        if wanted and start is None:
            raise ConfigError(
                f"{what}: add_bos_token is true in {_CONFIG}, which names no bos_token that tokenizer.json has; "
                "correct one of them"
            )
        words = "%s: add_bos_token is %s in %s, tokenizer.json says otherwise; the former is followed"
        log.warning(words, what, str(wanted).lower(), _CONFIG)
        return (start,) if wanted and start is not None else ()

    def decode(self, ids: Sequence[int]) -> str:
        kept = [i for i in ids if i not in self.ends]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def _read(self, text: str) -> tuple[list[int], list[Span]]:
        """A model without an unknown token raises at a part that it lacks or, with byte pairs, omits it."""
        try:
            found = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception:  # noqa: BLE001 - of the package, which has no class of its own
            return [], self._not_covered(text) or [(0, len(text))]
        ids, (unknown, number) = list(found.ids), self._unknown
        if self._drops:
            spans = self._not_covered(text)
            added = zip(ids, found.offsets, strict=True) if spans else ()
            whole = {place for i, span in added if i in self.marks for place in range(*span)}
            return ids, [span for span in spans if span[0] not in whole]
        spans = [span for i, span in zip(ids, found.offsets, strict=True) if i == number] if number in ids else []
        return ids, [(first, end) for first, end in spans if text[first:end] != unknown]

    def _not_covered(self, text: str) -> list[Span]:
        """Characters of the text of which a byte, once normalised, is in no token."""
        for character in set(text) - self._covered.keys():
            self._covered[character] = _is_covered(self._tokenizer, character)
        odd = {character for character in set(text) if not self._covered[character]}
        return [(i, i + 1) for i, character in enumerate(text) if character in odd] if odd else []


def begin(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of the first text of a conversation, with the tokenizer's start ids exactly once, even if the prompt
    contains them. ValueError: parts of it cannot be encoded."""
    start, ids = list(tokenizer.start), tokenizer.encode(prompt)
    return ids if ids[: len(start)] == start else start + ids


def encode_after(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """Ids of a text after another; if a token would span both, of the text alone. ValueError: as of `encode`."""
    ids = tokenizer.encode(text)
    if not before or tokenizer.lacking(before):
        return ids
    first, whole = tokenizer.encode(before), tokenizer.encode(before + text)
    return whole[len(first) :] if whole[: len(first)] == first else ids


def encodable(tokenizer: Tokenizer, text: str) -> str:
    """The text with unencodable characters replaced: by their plain form ('é' by 'e', '…' by '...', a tab by a
    space), else by U+FFFD or '?' if encodable, else removed. Linear in the length of the text."""

    def first_of(*forms: str) -> str:
        return next((form for form in forms if form and not tokenizer.lacking(form)), "")

    @cache
    def plain(character: str) -> str:
        simpler = unicodedata.normalize("NFKD", character)
        has = "".join(c for c in simpler if not tokenizer.lacking(c))
        return has or first_of(" " if character.isspace() else "", *_MARKS)

    ways: tuple[Callable[[str], str], ...] = (
        lambda part: "".join(map(plain, part)),
        lambda _: first_of(*_MARKS),  # a word whose characters all have ids
        lambda _: "",
    )
    for replaced in ways:
        if not (spans := tokenizer.lacking(text)):
            return text
        pieces, last = list[str](), 0
        for first, end in spans:
            pieces += (text[last:first], replaced(text[first:end]))
            last = end
        text = "".join((*pieces, text[last:]))
    return "" if tokenizer.lacking(text) else text


def _is_covered(tokenizer: Any, character: str) -> bool:
    """Whether every byte of the normalised character is covered by a token."""
    try:
        if tokenizer.token_to_id(character) is not None:
            return True
        text = tokenizer.normalizer.normalize_str(character) if tokenizer.normalizer else character
        split = tokenizer.pre_tokenizer
        pieces = [piece for piece, _ in split.pre_tokenize_str(text)] if split else [text]
        tokens = [tokenizer.model.tokenize(piece) for piece in pieces]
    except Exception:  # noqa: BLE001 - of the package: a model that raises, or half of a surrogate pair
        return False
    ends = (found[-1].offsets[1] if found else 0 for found in tokens)
    return all(end == len(piece.encode()) for end, piece in zip(ends, pieces, strict=True))


character_tokenizer = lru_cache(maxsize=8)(CharacterTokenizer)
_loaded = lru_cache(maxsize=8)(FolderTokenizer)


def folder_tokenizer(folder: str) -> FolderTokenizer:
    """The tokenizer of a local folder, loaded once per process. MissingError: there is no such folder."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise MissingError(
            f"env.tokenizer = {folder}: there is no such folder; name the one with tokenizer.json (nothing is "
            f"downloaded here), or use {CHARACTERS}"
        )
    return _loaded(path)
