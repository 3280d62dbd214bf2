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
from typing import Any, Protocol

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


class Tokenizer(Protocol):
    """Text to ids and back. size: ids lie in 0..size-1; ends: end-of-text ids, the preferred one first; start: ids
    at the start of every conversation, such as begin-of-text; marks: ids of special and other added tokens; origin:
    its name in messages."""

    size: int
    ends: tuple[int, ...]
    start: tuple[int, ...]
    marks: frozenset[int]
    origin: str

    def lacking(self, text: str) -> list[Span]:
        """Parts of the text that cannot be encoded, in order."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without special tokens around it. ValueError: parts of it cannot be encoded."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, without end-of-text tokens."""
        ...


class CharacterTokenizer:
    """One id per character: 0 is the end of text, the characters follow in the given order."""

    ends: tuple[int, ...] = (0,)
    start: tuple[int, ...] = ()
    marks: frozenset[int] = frozenset(ends)

    def __init__(self, alphabet: str) -> None:
        if len(set(alphabet)) != len(alphabet) or not alphabet:
            raise ConfigError(f"env.alphabet = {alphabet!r}: it has no characters, or one twice; name each once")
        self.origin = f"the characters {alphabet!r}"
        self.size = len(alphabet) + 1
        self._alphabet, self._ids = alphabet, {character: i + 1 for i, character in enumerate(alphabet)}

    def lacking(self, text: str) -> list[Span]:
        return [(i, i + 1) for i, character in enumerate(text) if character not in self._ids]

    def encode(self, text: str) -> list[int]:
        if spans := self.lacking(text):
            raise ValueError(f"{_named(text, spans)} not among {self.origin}; add it to the environment's alphabet")
        return [self._ids[character] for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._alphabet[i - 1] for i in ids if i)


class FolderTokenizer:
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
        self.origin = f"the tokenizer of {folder}"
        self.size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)  # ids may not be contiguous
        self.ends = tuple(i for i in _end_ids(folder, self._tokenizer) if 0 <= i < self.size)
        if not self.ends:
            raise ConfigError(f"{what}: it names no end-of-text token, so no message would end; set {_ENDS}")
        self.start = _start_ids(folder, self._tokenizer)
        self._unknown = _unknown_token(folder, self._tokenizer)
        self._drops = self._unknown is None and type(self._tokenizer.model).__name__ == "BPE"
        self.marks = frozenset(self._tokenizer.get_added_tokens_decoder())
        self._covered: dict[str, bool] = {}  # by character: whether all of it becomes tokens

    def lacking(self, text: str) -> list[Span]:
        return self._read(text)[1]

    def encode(self, text: str) -> list[int]:
        ids, spans = self._read(text)
        if spans:
            raise ValueError(
                f"{_named(text, spans)} without an id in {self.origin}; leave it out, or use another model"
            )
        return ids

    def _read(self, text: str) -> tuple[list[int], list[Span]]:
        """Ids of the text, and the parts that cannot be encoded. A model without an unknown token raises at such a
        part or, with byte pairs, omits it."""
        try:
            found = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception:  # noqa: BLE001 - of the package, which has no class of its own
            return [], self._not_covered(text) or [(0, len(text))]
        ids = list(found.ids)
        if self._drops:
            spans = self._not_covered(text)
            added = zip(ids, found.offsets, strict=True) if spans else ()
            whole = {place for i, span in added if i in self.marks for place in range(*span)}
            return ids, [span for span in spans if span[0] not in whole]
        if self._unknown is None or self._unknown[1] not in ids:
            return ids, []
        token, number = self._unknown
        spans = [span for i, span in zip(ids, found.offsets, strict=True) if i == number]
        return ids, [(first, end) for first, end in spans if text[first:end] != token]

    def _not_covered(self, text: str) -> list[Span]:
        for character in set(text) - self._covered.keys():
            self._covered[character] = _is_covered(self._tokenizer, character)
        odd = {character for character in set(text) if not self._covered[character]}
        return [(i, i + 1) for i, character in enumerate(text) if character in odd] if odd else []

    def decode(self, ids: Sequence[int]) -> str:
        kept = [i for i in ids if i not in self.ends]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))


def begin(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of the first text of a conversation, with the tokenizer's start ids exactly once, even if the prompt
    contains them. ValueError: parts of it cannot be encoded."""
    start, ids = list(tokenizer.start), tokenizer.encode(prompt)
    return ids if ids[: len(start)] == start else start + ids


def encode_after(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """Ids of a text that follows another; if a token would span both, those of the text alone. ValueError: parts of
    the text cannot be encoded."""
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
        text = _with_replaced(text, spans, replaced)
    return "" if tokenizer.lacking(text) else text


def _with_replaced(text: str, spans: Sequence[Span], replaced: Callable[[str], str]) -> str:
    pieces, last = list[str](), 0
    for first, end in spans:
        pieces += (text[last:first], replaced(text[first:end]))
        last = end
    return "".join((*pieces, text[last:]))


def _named(text: str, spans: Sequence[Span]) -> str:
    """Words such as `'é', '…' and 3 more are` for the distinct parts."""
    parts = list(dict.fromkeys(text[first:end] for first, end in spans))
    named, more = ", ".join(map(repr, parts[:_NAMED])), len(parts) - _NAMED
    return f"{named} and {more} more are" if more > 0 else f"{named} {'is' if len(parts) == 1 else 'are'}"


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
    """End-of-text ids of the folder's files, without duplicates; those of the generation config come first."""
    found = end_ids(folder)
    if (known := _named_id(folder, tokenizer, "eos_token")) is not None:
        found.append(known)
    return list(dict.fromkeys(found))


def _named_id(folder: Path, tokenizer: Any, name: str) -> int | None:
    """The id of a special token in tokenizer_config.json; None if it is missing there or in the tokenizer."""
    text = read_object(folder / _CONFIG).get(name)
    text = text.get("content") if isinstance(text, dict) else text
    return tokenizer.token_to_id(text) if isinstance(text, str) else None


def _start_ids(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Start ids: those that the post-processor adds, unless `add_bos_token` contradicts: then begin-of-text, or
    nothing."""
    added = _added_before(tokenizer)
    wanted = read_object(folder / _CONFIG).get("add_bos_token")
    if not isinstance(wanted, bool) or wanted == bool(added):
        return added
    start = _named_id(folder, tokenizer, "bos_token")
    if wanted and start is None:
        raise ConfigError(
            f"env.tokenizer = {folder}: add_bos_token is true in {_CONFIG}, which names no bos_token that "
            "tokenizer.json has; correct one of them"
        )
    log.warning(
        "env.tokenizer = %s: add_bos_token is %s in %s, tokenizer.json says otherwise; the former is followed",
        *(folder, str(wanted).lower(), _CONFIG),
    )
    return (start,) if wanted and start is not None else ()


def _added_before(tokenizer: Any) -> tuple[int, ...]:
    """Ids that the post-processor adds before a text, found by encoding one token."""
    for text in tokenizer.get_vocab():
        plain = tokenizer.encode(text, add_special_tokens=False)
        if plain.ids:
            whole = tokenizer.encode(text)
            return tuple(whole.ids[: whole.special_tokens_mask.index(0)]) if 0 in whole.special_tokens_mask else ()
    return ()


def _unknown_token(folder: Path, tokenizer: Any) -> tuple[str, int] | None:
    model = tokenizer.model
    if type(model).__name__ == "Unigram":
        number = read_object(folder / "tokenizer.json").get("model", {}).get("unk_id")
        token = tokenizer.id_to_token(number) if isinstance(number, int) else None
    else:
        token = model.unk_token
    known = None if token is None else tokenizer.token_to_id(token)
    return None if known is None else (str(token), known)
