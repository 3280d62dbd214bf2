"""Prompts have the texts of the releases, fit their places, and π0.5's are composed as they would be encoded whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.plugins.pretrained.small_tokenizer import IMAGE_ID, VOCABULARY, write_tokenizer

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.vla import prompts
from polyrhythm.plugins.vla.prompts import (
    FolderPromptTokenizer,
    PromptTokenizer,
    StatePrompt,
    WordTokenizer,
    folder_tokenizer,
    state_bins,
)
from polyrhythm.specs import Task

TASKS = (Task("push", "push the red block"), Task("close", "close the_door\n"), Task("wipe", "wipe the table, slowly"))


class Recorder:
    """A tokenizer that keeps what it was asked; an id per character."""

    bos, origin = 2, "a recorder"

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return [ord(letter) for letter in text]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def local(folder: Path) -> Iterator[FolderPromptTokenizer]:
    yield folder_tokenizer(str(folder))
    folder_tokenizer.cache_clear()


def test_the_texts_are_those_of_the_releases() -> None:
    recorder = Recorder()
    ids = prompts.pi0_ids(recorder, " close the_door\n")
    assert ids == [2, *map(ord, "close the door"), ord("\n")]
    assert recorder.texts == ["close the door", "\n"]
    assert prompts.state_text("close the_door\n", [3, -1, 255]) == "Task: close the door, State: 3 -1 255;\nAction: "
    ids = prompts.oft_ids(recorder, "Close the Door", 7)
    assert ids == [2, *map(ord, "In: What action should the robot take to close the door?\nOut:"), 7]
    assert prompts.groot_text("Close", 2, 3) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<image 1><img><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT></img>"
        "<image 2><img><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT></img>"
        "Close<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_empty_token_is_not_repeated() -> None:
    assert prompts.oft_ids(Recorder(), "x", ord(":"))[-2:] == [ord("t"), ord(":")]


def test_a_local_folder_is_encoded_as_by_its_library(folder: Path, local: FolderPromptTokenizer) -> None:
    from tokenizers import Tokenizer as Library

    library = Library.from_file(str(folder / "tokenizer.json"))
    text = "push the red block 12"
    assert local.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert local.bos == library.token_to_id("<bos>")


def test_groots_places_of_images_are_single_tokens(local: FolderPromptTokenizer) -> None:
    ids = prompts.groot_ids(local, "push the red block", 2, 9, IMAGE_ID)
    assert ids.count(IMAGE_ID) == 18
    with pytest.raises(ConfigError, match="0 tokens 399 for 18 places of images; use the tokenizer of GR00T"):
        prompts.groot_ids(local, "push the red block", 2, 9, 399)
    hashed = WordTokenizer(90, specials={prompts.IMAGE_CONTEXT: 90})
    assert prompts.groot_ids(hashed, "push", 2, 9, 90).count(90) == 18


def table(rows: list[list[int]], length: int = 0, side: str = "right", vocabulary: int = 100) -> prompts.PromptTable:
    tasks = TASKS[: len(rows)]
    return prompts.table(rows, tasks, length=length, pad=9, side=side, vocabulary=vocabulary, origin="a test")


@pytest.mark.parametrize(
    ("side", "expected"), [("right", [2, 3, 9, 9]), ("left", [9, 9, 2, 3]), ("inside", [2, 9, 9, 3])]
)
def test_short_prompts_are_filled_up(side: str, expected: list[int]) -> None:
    found = table([[2, 3], [2, 4, 5, 6]], side=side)
    assert found.ids.tolist() == [expected, [2, 4, 5, 6]]
    assert found.present.tolist() == [[x != 9 for x in expected], [True] * 4]
    assert table([[2, 3]], length=6).ids.shape[1] == 6


@pytest.mark.parametrize(
    ("used", "length", "places"), [(3, 48, 16), (16, 48, 16), (17, 48, 32), (17, 20, 20), (3, 0, 3)]
)
def test_places_behind_the_longest_prompt_are_left_out(used: int, length: int, places: int) -> None:
    rows = [[2, 3], list(range(2, 2 + used))]
    assert table(rows, length=length).ids.shape[1] == places
    assert table(rows, length=length, side="left").ids.shape[1] == (length or used)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: table([[2], [2, 3, 4]], length=2), "task 'close' has 3 tokens with a test, the network takes 2"),
        (lambda: table([[2, 100]]), "a test gives token ids up to 100, the network has 100; use the tokenizer"),
        (lambda: table([[2, 3], [2, 3]]), "'close the_door.*' and 'push the red block' become the same tokens"),
        (lambda: WordTokenizer(5), "a vocabulary of 5 words is too small"),
        (lambda: folder_tokenizer("/no/such"), "policy.tokenizer = /no/such: there is no such folder; name the folder"),
    ],
)
def test_what_does_not_fit_is_one_sentence(make: Callable[[], object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_broken_tokenizer_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(
        ConfigError, match=r"transformers cannot load a tokenizer from it .*; copy tokenizer.json"
    ) as caught:
        folder_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_hashed_words_tell_numbers_and_ignore_case() -> None:
    tokenizer = WordTokenizer(4096)
    assert tokenizer.encode("Push the Block") == tokenizer.encode("push, the block!")
    assert len({*tokenizer.encode("-1 1 \n")}) == 3
    assert 4 <= min(tokenizer.encode("a b c d e f g")) <= max(tokenizer.encode("a b c d e f g")) < 4096


def test_bins_are_numpys() -> None:
    state = np.concatenate([np.linspace(-1.2, 1.2, 97), np.linspace(-1, 1, 257), [-1.0, 1.0, np.nextafter(-1.0, -2.0)]])
    expected = np.digitize(state, np.linspace(-1, 1, 257)[:-1]) - 1
    assert np.array_equal(state_bins(torch.from_numpy(state)).numpy(), expected)


class Joining:
    """A tokenizer that joins equal neighbours: a state's numbers can be encoded apart, but not composed."""

    bos, origin = 2, "a joining one"

    def encode(self, text: str) -> list[int]:
        ids = WordTokenizer(4096).encode(text)
        return [x for x, before in zip(ids, [None, *ids], strict=False) if x != before]


@pytest.mark.parametrize("kind", ["words", "local", "seams", "joining"])
def test_state_prompts_equal_whole_ones(kind: str, local: FolderPromptTokenizer, tmp_path: Path) -> None:
    tokenizer: PromptTokenizer = WordTokenizer(4096) if kind == "words" else local
    tokenizer = Joining() if kind == "joining" else tokenizer
    if kind == "seams":
        tokenizer = folder_tokenizer(str(write_tokenizer(tmp_path, seams=True)))
    found = prompts.state_prompts(tokenizer, TASKS, 5, 100, 4096)
    assert (found.whole is None) == (kind in ("words", "local"))
    state = torch.rand(40, 5, generator=torch.Generator().manual_seed(1)) * 2.4 - 1.2
    state[5, 1:] = state[5, 0]
    tasks = torch.arange(40) % len(TASKS)
    ids, present = StatePrompt(found)(tasks, state.double())
    for row, task in enumerate(tasks.tolist()):
        bins = (np.digitize(state[row].double().numpy(), np.linspace(-1, 1, 257)[:-1]) - 1).tolist()
        whole = [tokenizer.bos, *tokenizer.encode(prompts.state_text(TASKS[task].instruction, bins))]
        assert ids[row].tolist() == whole + [0] * (100 - len(whole))
        assert present[row].tolist() == [True] * len(whole) + [False] * (100 - len(whole))


def test_a_state_prompt_that_is_too_long_is_refused_with_both_lengths(local: FolderPromptTokenizer) -> None:
    with pytest.raises(ConfigError, match=r"task 'wipe' has \d+ tokens with the tokenizer of .*, the network takes 30"):
        prompts.state_prompts(local, TASKS, 8, 30, VOCABULARY)


def test_a_prompt_without_a_length_has_room_for_every_state(local: FolderPromptTokenizer) -> None:
    found = prompts.state_prompts(local, TASKS, 3, 0, VOCABULARY)
    assert found.length == max(
        1 + len(local.encode(prompts.state_text(task.instruction, [b] * 3))) for task in TASKS for b in prompts.BINS
    )
