"""Tokenizers of folders: whole texts, their own beginning, ids with gaps, characters without an id."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from polyrhythm.envs.base import RowsFailed
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.language.text import Reply, TextSettings
from polyrhythm.plugins.language.text.tokenizers import CharacterTokenizer, FolderTokenizer, Span, begin, encodable
from polyrhythm.specs import Trajectory

CHARACTERS = {character: i for i, character in enumerate("abc ?e.")}
BOS, EOS = 300, 301
BYTES = {f"<0x{byte:02X}>": 20 + byte for byte in range(256)}
ALPHABET = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
SPLIT = pre_tokenizers.Split("", "isolated")
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)

#: Every kind of model, with what it does with a character that it lacks: (model, what splits, has all characters).
MODELS: dict[str, tuple[Any, Any, bool]] = {
    "byte pairs that leave out": (models.BPE(CHARACTERS, []), None, False),
    "byte pairs with unknown": (models.BPE({**CHARACTERS, "<u>": 9}, [], unk_token="<u>", fuse_unk=True), None, False),
    "some bytes": (models.BPE(CHARACTERS, []), BYTE_LEVEL, False),
    "all bytes": (models.BPE(ALPHABET, []), BYTE_LEVEL, True),
    "fallback to bytes": (models.BPE({**CHARACTERS, **BYTES}, [], byte_fallback=True), None, True),
    "fallback to ASCII": (
        models.BPE({**CHARACTERS, **dict(list(BYTES.items())[:128])}, [], byte_fallback=True),
        *(None, False),
    ),
    "unigram": (models.Unigram([("<u>", 0.0), *((c, -1.0) for c in CHARACTERS)], unk_id=0), None, False),
    "unigram that raises": (models.Unigram([(c, -1.0) for c in CHARACTERS]), None, False),
    "words that raise": (models.WordLevel(CHARACTERS), SPLIT, False),
    "words with unknown": (models.WordLevel({**CHARACTERS, "<u>": 9}, unk_token="<u>"), SPLIT, False),
    "pieces of words": (
        models.WordPiece({"[UNK]": 0, "abc": 1, "a": 2, "?": 3, "##b": 4}, unk_token="[UNK]"),
        *(pre_tokenizers.Whitespace(), False),
    ),
}


def save(folder: Path, model: Any, split: Any = None, config: dict[str, Any] | None = None, **attributes: Any) -> str:
    """A folder with the model's tokenizer, whose special tokens lie behind a gap."""
    found = Tokenizer(model)
    if split is not None:
        found.pre_tokenizer = split
    for name, value in attributes.items():
        setattr(found, name, value)
    content = json.loads(found.to_str())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] = [{"id": i, "content": text, **plain} for text, i in (("<bos>", BOS), ("<eos>", EOS))]
    if isinstance(content["model"]["vocab"], dict):
        content["model"]["vocab"] |= {"<bos>": BOS, "<eos>": EOS}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<bos>", "eos_token": "<eos>", **(config or {})})
    )
    return str(folder)


@pytest.mark.parametrize(
    "kept",
    [
        {"truncation": {"max_length": 6, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}},
        {"truncation": {"max_length": 6, "stride": 0, "strategy": "LongestFirst", "direction": "Left"}},
        {"truncation": {"max_length": 1, "stride": 0, "strategy": "OnlyFirst", "direction": "Right"}},
        {"padding": {"strategy": {"Fixed": 24}}},
        {"padding": {"strategy": "BatchLongest", "pad_to_multiple_of": 8}},
    ],
    ids=["right", "left", "one", "fixed", "multiple"],
)
def test_a_text_is_neither_cut_nor_padded_as_the_file_says(tmp_path: Path, kept: dict[str, Any]) -> None:
    folder = save(tmp_path, *MODELS["byte pairs that leave out"][:2])
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    if "padding" in kept:
        kept["padding"] |= {
            "direction": "Right",
            "pad_id": 4,
            "pad_type_id": 0,
            "pad_token": "?",
            "pad_to_multiple_of": 8,
        }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | kept))
    assert len(FolderTokenizer(Path(folder)).encode("abc abc abc a")) == 13


def template(single: str) -> Any:
    return processors.TemplateProcessing(single=single, special_tokens=[("<bos>", BOS), ("<eos>", EOS)])


@pytest.mark.parametrize(
    ("processor", "wanted", "start"),
    [
        (None, None, ()),
        (None, False, ()),
        (None, True, (BOS,)),
        (template("<bos> $A"), None, (BOS,)),
        (template("<bos> $A"), True, (BOS,)),
        (template("<bos> $A"), False, ()),
        (template("<bos> $A <eos>"), None, (BOS,)),
        (template("$A <eos>"), None, ()),
        (template("<eos> <bos> $A"), True, (EOS, BOS)),
        (processors.Sequence([processors.ByteLevel(), template("<bos> $A")]), None, (BOS,)),
        (processors.RobertaProcessing(("<eos>", EOS), ("<bos>", BOS)), None, (BOS,)),
    ],
)
def test_a_conversation_begins_as_the_tokenizer_says(
    tmp_path: Path, processor: Any, wanted: bool | None, start: tuple[int, ...]
) -> None:
    attributes = {} if processor is None else {"post_processor": processor}
    config = {} if wanted is None else {"add_bos_token": wanted}
    folder = save(tmp_path, models.BPE(CHARACTERS, []), config=config, **attributes)
    tokenizer = FolderTokenizer(Path(folder))
    assert tokenizer.start == start
    assert begin(tokenizer, "ab") == [*start, 0, 1]
    brought = "".join({BOS: "<bos>", EOS: "<eos>"}[i] for i in start) + "ab"
    assert begin(tokenizer, brought) == [*start, 0, 1], "once, also where the prompt brings it"
    assert tokenizer.encode("ab") == [0, 1], "a reply is not the beginning"


def test_a_begin_of_text_token_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, models.BPE(CHARACTERS, []), config={"add_bos_token": True, "bos_token": "<s>"})
    with pytest.raises(ConfigError, match=r"add_bos_token is true in tokenizer_config\.json, which names no bos_token"):
        FolderTokenizer(Path(folder))


class Counts:
    """Answers each message by `c`, thrice."""

    def begin(self, task: int, seed: int) -> str:
        self._left = 3
        return "ab" * (1 + seed)

    def reply(self, message: str) -> Reply:
        self._left -= 1
        return Reply("c", done=not self._left)


class CountSettings(TextSettings):
    type: str = "counts"
    max_new_tokens: int = 2
    max_prompt_tokens: int = 9
    max_turns: int = 3

    def conversation(self) -> Counts:
        return Counts()


def test_the_beginning_is_shown_once_and_counts(tmp_path: Path) -> None:
    settings = CountSettings(tokenizer=save(tmp_path, models.BPE(CHARACTERS, []), config={"add_bos_token": True}))
    batch = settings.build(1)
    with pytest.raises(RowsFailed, match="seed 4, has 11 tokens"):
        batch.reset([0], [0], [4])
    batch.reset([0], [0], [0])
    seen = []
    for _ in range(3):
        out = {name: np.zeros((1, *array.shape), array.dtype) for name, array in batch.spec.observation.items()}
        batch.observe([0], out)
        seen.append({name: array[0] for name, array in out.items()})
        batch.step([0], np.array([[[0], [EOS]]]))
    assert [obs["tokens"][: obs["length"]].tolist() for obs in seen] == [
        [BOS, 0, 1],
        [BOS, 0, 1, 0, EOS, 2],
        [BOS, 0, 1, 0, EOS, 2, 0, EOS, 2],
    ]
    assert batch.transcript(0) == "a b a c a c"
    assert batch.texts(0)[0] == "<bos> a b", "whoever reads it sees what the model was shown"
    sample = Trajectory(
        obs={name: np.stack([obs[name] for obs in seen]) for name in seen[0]},
        actions=np.array([[[0], [EOS]]] * 3),
        valid=np.ones((3, 2), bool),
        forward_inputs={},
        terminated=True,
        truncated=False,
        success=False,
        env_steps=3,
        **{name: np.zeros((3, 2)) for name in ("logprob", "value", "rewards", "version")},
        **dict.fromkeys(("ticket", "group", "task"), 0),
    )
    found = settings.transcribe(sample)
    assert (found.prompt, found.messages, found.text) == ("a b", ("a",) * 3, "a b a c a ca"), "a reward does not"


@pytest.mark.parametrize("name", [*MODELS, "characters"])
def test_what_has_no_id_is_named_and_can_be_replaced(tmp_path: Path, name: str) -> None:
    if name == "characters":
        tokenizer, whole = CharacterTokenizer("".join(CHARACTERS)), False
    else:
        model, split, whole = MODELS[name]
        tokenizer = FolderTokenizer(Path(save(tmp_path, model, split)))
    assert tokenizer.encode("abc")
    assert not tokenizer.lacking("abc")
    if whole:
        assert tokenizer.encode("a\t♥…\0")
    else:
        with pytest.raises(ValueError, match="'♥"):
            tokenizer.encode("abc ♥é")
    random = Random(0)
    for _ in range(300):
        text = "".join(random.choices("abce. \t\r\n\0é…♥漢\ud800\U0001f600?x<bos>", k=random.randrange(40)))
        shown = encodable(tokenizer, text)
        tokenizer.encode(shown)
        assert shown == text or tokenizer.lacking(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\tb", "a b"), ("café", "cae"), ("a…", "a..."), ("a\0b", "a?b"), ("\ud800", "?"), ("a♥♥b", "a??b"), ("ａ", "a")],
)
def test_a_replacement_is_the_plain_form_if_there_is_one(text: str, shown: str) -> None:
    assert encodable(CharacterTokenizer("abc ?e."), text.replace("f", "")) == shown
    without_mark = CharacterTokenizer("abc e.")
    assert encodable(without_mark, text.replace("f", "")) == shown.replace("?", "")


def test_the_work_of_replacing_grows_with_the_length() -> None:
    class Counted(CharacterTokenizer):
        seen = 0

        def lacking(self, text: str) -> list[Span]:
            self.seen += len(text)
            return super().lacking(text)

    for text in ("♥", "ab", "é\t", "".join(map(chr, range(0x4E00, 0x5200)))):
        for count in (1, 10, 500):
            tokenizer = Counted("ab ?e")
            encodable(tokenizer, text * count)
            assert tokenizer.seen <= 6 * len(text) * count + 10


def test_ends_that_the_tokenizer_does_not_have_end_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path, models.BPE(CHARACTERS, []))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [-1, 9999, 2]}))
    found = FolderTokenizer(Path(folder))
    assert (found.ends, found.size) == ((2, EOS), EOS + 1)
    assert found.decode([0, 150, 2, 1, EOS]) == "a b", "ids in a gap are no text"


def test_decoded_bytes_are_what_was_said(tmp_path: Path) -> None:
    tokenizer = FolderTokenizer(Path(save(tmp_path, *MODELS["all bytes"][:2], decoder=decoders.ByteLevel())))
    text = "é…\t♥\0 漢"
    assert tokenizer.decode(tokenizer.encode(text)) == text == encodable(tokenizer, text)
