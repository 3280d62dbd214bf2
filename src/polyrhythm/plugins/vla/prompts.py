"""Prompts of the released policies, as tables of token ids that are made once, before anything starts.

    π0           BOS, instruction, "\\n" (encoded separately); padded on the right
    π0.5         BOS, "Task: INSTRUCTION, State: B1 B2 ...;\\nAction: ", Bi a state bin; padded on the right
    OpenVLA-OFT  BOS, padding, "In: What action should the robot take to INSTRUCTION?\\nOut:", an empty token
    GR00T N1.5   Qwen's chat with the placeholders of all images, then the instruction; padded on the left

lerobot's π0 folders use the instruction unchanged, with its line end, and some π0.5 folders a longer state (see
`folder_inputs`). Instructions are known from the environment's tasks; only π0.5's state bins are computed at every
step, on the device.

A tokenizer is a local folder's, loaded once per process by transformers, or a hash of each word. Nothing is downloaded.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.errors import ConfigError, MissingError, install_command
from polyrhythm.sources import local_folder
from polyrhythm.specs import Task
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
        words, among = self._pattern.findall(text), self._last - _FIRST
        return [self._specials.get(word, _FIRST + mix(*word.lower().encode()) % among) for word in words]


class FolderPromptTokenizer:
    """The tokenizer of a local folder. MissingError, ConfigError: it does not exist or cannot be loaded."""

    def __init__(self, folder: str) -> None:
        path = local_folder(folder, what="policy.tokenizer")
        if not path.is_dir():
            raise MissingError(
                f"policy.tokenizer = {folder}: there is no such folder; name the folder with tokenizer.json or "
                "tokenizer.model (nothing is downloaded here)"
            )
        try:
            with torch.device("cpu"):
                from transformers import AutoTokenizer

                found = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
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
        self.origin, self._tokenizer = f"the tokenizer of {folder}", found
        self.bos = -1 if found.bos_token_id is None else int(found.bos_token_id)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


folder_tokenizer = lru_cache(maxsize=8)(FolderPromptTokenizer)


#: Bins of π0.5's state: 0..255 within −1..1, −1 below.
BINS = range(-1, 256)
#: Places of a prompt come in multiples of this, which suits kernels.
_PLACES = 16
#: Prompts on which the composition of state prompts is tried.
_TRIALS = 256
IMAGE_CONTEXT = "<IMG_CONTEXT>"

Ids = list[int]


@dataclass(frozen=True, slots=True, eq=False)
class PromptTable:
    """Token ids of each task's prompt: ids int64 [tasks,L], present bool [tasks,L]."""

    ids: NDArray[np.int64]
    present: NDArray[np.bool_]


def pi0_ids(tokenizer: PromptTokenizer, instruction: str, *, cleans: bool = True) -> Ids:
    """π0's prompt. cleans: clean the instruction and encode the line end separately, as openpi does; else encode the
    unchanged instruction with its line end, as lerobot does."""
    if not cleans:
        return [tokenizer.bos, *tokenizer.encode(instruction.removesuffix("\n") + "\n")]
    return [tokenizer.bos, *tokenizer.encode(cleaned(instruction)), *tokenizer.encode("\n")]


def cleaned(instruction: str) -> str:
    """An instruction in openpi's form: stripped, with _ and line ends replaced by spaces."""
    return instruction.strip().replace("_", " ").replace("\n", " ")


def state_text(instruction: str, bins: Sequence[int]) -> str:
    """π0.5's prompt with the bins of the state."""
    return f"Task: {cleaned(instruction)}, State: {' '.join(map(str, bins))};\nAction: "


def oft_ids(tokenizer: PromptTokenizer, instruction: str, empty: int) -> Ids:
    """OpenVLA-OFT's prompt, ended by the token `empty` as in the release."""
    text = f"In: What action should the robot take to {instruction.lower()}?\nOut:"
    ids = tokenizer.encode(text)
    return [tokenizer.bos, *ids] if ids[-1:] == [empty] else [tokenizer.bos, *ids, empty]


def groot_text(instruction: str, images: int, tokens: int) -> str:
    places = "".join(f"<image {k}><img>{IMAGE_CONTEXT * tokens}</img>" for k in range(1, images + 1))
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    return f"{system}<|im_start|>user\n{places}{instruction}<|im_end|>\n<|im_start|>assistant\n"


def groot_ids(tokenizer: PromptTokenizer, instruction: str, images: int, tokens: int, image_token: int) -> Ids:
    """GR00T's prompt. ConfigError: the tokenizer's id of the image placeholder is not `image_token`."""
    ids = tokenizer.encode(groot_text(instruction, images, tokens))
    if ids.count(image_token) != images * tokens:
        raise ConfigError(
            f"{tokenizer.origin}: the prompt has {ids.count(image_token)} tokens {image_token} for {images * tokens} "
            f"places of images; use the tokenizer of GR00T's Eagle, which has {IMAGE_CONTEXT}"
        )
    return ids


def table(
    rows: Sequence[Ids], tasks: Sequence[Task], *, length: int, pad: int, side: str, vocabulary: int, origin: str
) -> PromptTable:
    """The prompts padded to `length` (0: the longest). side: of the padding: "right", "left", or "inside", after the
    first token. On the right, where padding is masked, no more than the longest prompt in a multiple of `_PLACES`, as
    passes compute padding, too. ConfigError: a prompt is too long or has ids outside the vocabulary, or two
    instructions give the same ids."""
    lengths = [len(row) for row in rows]
    longest = lengths.index(max(lengths))
    check_length(lengths[longest], length, tasks[longest], origin)
    _check_distinct(rows, tasks, origin)
    if side == "right" and length:
        length = min(length, -(-lengths[longest] // _PLACES) * _PLACES)
    return _filled(rows, length, pad, side, vocabulary, origin)


def _filled(rows: Sequence[Ids], length: int, pad: int, side: str, vocabulary: int, origin: str) -> PromptTable:
    highest = max(max(row) for row in rows)
    if highest >= vocabulary or min(min(row) for row in rows) < 0:
        raise ConfigError(
            f"{origin} gives token ids up to {highest}, the network has {vocabulary}; use the tokenizer of this release"
        )
    length = length or max(map(len, rows))
    ids = np.full((len(rows), length), pad, np.int64)
    present = np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        places = _places(side, len(row), length)
        ids[i, places], present[i, places] = row, True
    return PromptTable(ids, present)


def _places(side: str, used: int, length: int) -> NDArray[np.int64]:
    if side == "left":
        return np.arange(length - used, length)
    if side == "inside":
        return np.concatenate(([0], np.arange(length - used + 1, length)))
    return np.arange(used)


def check_length(needed: int, length: int, task: Task, origin: str) -> None:
    """ConfigError: a prompt needs more tokens than the network has places (0: no limit)."""
    if length and needed > length:
        raise ConfigError(
            f"the prompt of task {task.name!r} has {needed} tokens with {origin}, the network takes {length} "
            f"({task.instruction!r}): shorten the instruction, or set policy.prompt_length to at least {needed}"
        )


def _check_distinct(rows: Sequence[Ids], tasks: Sequence[Task], origin: str) -> None:
    seen: dict[tuple[int, ...], str] = {}
    for row, task in zip(rows, tasks, strict=True):
        other = seen.setdefault(tuple(row), task.instruction)
        if " ".join(other.lower().split()) != " ".join(task.instruction.lower().split()):
            raise ConfigError(
                f"{task.instruction!r} and {other!r} become the same tokens with {origin}: use a larger vocabulary or "
                "other words"
            )


@dataclass(frozen=True, slots=True, eq=False)
class StatePrompts:
    """π0.5's prompts in parts that a device assembles.

    heads: prompt of each task up to "State:"; numbers: [257 bins], ids of " B"; tail: ids of ";\\nAction: "; entries:
    of the state, zero-padded; whole: encodes a prompt in one piece, for tokenizers whose parts cannot be joined, else
    None.
    """

    heads: PromptTable
    numbers: PromptTable
    tail: tuple[int, ...]
    length: int
    entries: int
    whole: Callable[[int, Sequence[int]], Ids] | None


def state_prompts(
    tokenizer: PromptTokenizer, tasks: Sequence[Task], entries: int, length: int, vocabulary: int
) -> StatePrompts:
    """Prompts for a state with this many entries. A tokenizer may merge characters across a seam. So assembled prompts
    are compared with whole ones that contain every bin; if one differs, prompts are encoded whole, on the CPU, at every
    step. ConfigError: the longest prompt does not fit."""

    def whole(task: int, bins: Sequence[int]) -> Ids:
        return [tokenizer.bos, *tokenizer.encode(state_text(tasks[task].instruction, bins))]

    def head(task: int) -> Ids:
        text = state_text(tasks[task].instruction, ()).removesuffix(" ;\nAction: ")
        return [tokenizer.bos, *tokenizer.encode(text)]

    heads = [head(i) for i in range(len(tasks))]
    texts = [state_text(tasks[0].instruction, [b]).removesuffix(";\nAction: ") for b in BINS]
    numbers = [_after(heads[0], [tokenizer.bos, *tokenizer.encode(text)]) for text in texts]
    tail = _after(heads[0] + (numbers[0] or []), whole(0, [BINS[0]]))
    parts = [row or [0] for row in numbers]
    composed = tail is not None and all(numbers)
    composed = composed and all(
        whole(task, bins) == [*heads[task], *(x for b in bins for x in parts[b + 1]), *(tail or ())]
        for task, bins in _trials(len(tasks), entries)
    )
    longest = max(range(len(tasks)), key=lambda i: len(heads[i]))
    needed = len(heads[longest]) + entries * max(map(len, parts)) + len(tail or ())
    if not composed:
        needed = max(len(whole(longest, [b] * entries)) for b in BINS)
    check_length(needed, length, tasks[longest], tokenizer.origin)
    _check_distinct(heads, tasks, tokenizer.origin)
    return StatePrompts(
        heads=_filled(heads, 0, 0, "right", vocabulary, tokenizer.origin),
        numbers=_filled(parts, 0, 0, "right", vocabulary, tokenizer.origin),
        tail=tuple(tail or ()),
        length=length or needed,
        entries=entries,
        whole=None if composed else whole,
    )


def _after(front: Ids, row: Ids) -> Ids | None:
    """The ids after the prefix `front`; None if the row does not start with it."""
    return row[len(front) :] if row[: len(front)] == front else None


def _trials(tasks: int, entries: int) -> list[tuple[int, list[int]]]:
    """Tasks and bins that test assembled prompts: every bin, runs of equal bins, every task."""
    draw = random.Random(0)
    trials = []
    for i in range(max(_TRIALS, tasks)):
        bins = [draw.choice(BINS)] * entries if i % 4 == 0 else [draw.choice(BINS) for _ in range(entries)]
        bins[i % entries] = BINS[i % len(BINS)]
        trials.append((i % tasks, bins))
    return trials


def state_bins(state: Tensor) -> Tensor:
    """The bin of each entry of a normalised state, float64 [...]: 0..255 within −1..1, −1 below, 255 above. The 256
    edges are −1, −1 + 1/128, ...; an entry on an edge is in the bin above."""
    edges = torch.arange(256, dtype=torch.float64, device=state.device) / 128.0 - 1.0
    return torch.bucketize(state.double().contiguous(), edges, right=True) - 1


class StatePrompt(nn.Module):
    """Prompts by task and state. A prompt longer than L is cut, as in the release."""

    heads: Tensor
    head_present: Tensor
    numbers: Tensor
    number_present: Tensor
    tail: Tensor

    def __init__(self, prompts: StatePrompts) -> None:
        super().__init__()
        self.length, self.entries, self.whole = prompts.length, prompts.entries, prompts.whole
        self.known: dict[tuple[int, ...], list[int]] = {}
        for name, table in (("head", prompts.heads), ("number", prompts.numbers)):
            ids, present = (torch.tensor(array.tolist()) for array in (table.ids, table.present))
            self.register_buffer(f"{name}s", ids, persistent=False)
            self.register_buffer(f"{name}_present", present, persistent=False)
        self.register_buffer("tail", torch.tensor(prompts.tail, dtype=torch.int64), persistent=False)

    def forward(self, tasks: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """tasks int64 [B], state normalised float64 [B,D] -> ids int64 [B,L], present bool [B,L]."""
        bins = state_bins(functional.pad(state, (0, self.entries - state.shape[1])))
        if self.whole is not None:
            return self._encoded(tasks, bins)
        rows = len(tasks)
        ids = torch.cat((self.heads[tasks], self.numbers[bins + 1].flatten(1), self.tail.expand(rows, -1)), dim=1)
        there = self.tail.new_ones((rows, len(self.tail)), dtype=torch.bool)
        there = torch.cat((self.head_present[tasks], self.number_present[bins + 1].flatten(1), there), dim=1)
        place = (there.cumsum(1) - 1).clamp(max=self.length)
        place = torch.where(there, place, self.length)  # absent ids and those that do not fit go past the end
        packed = ids.new_zeros(rows, self.length + 1).scatter_(1, place, ids)
        used = there.sum(1, keepdim=True)
        present = torch.arange(self.length, device=ids.device).unsqueeze(0) < used
        return packed[:, : self.length] * present, present

    def _encoded(self, tasks: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
        """Whole prompts, encoded on the CPU and cached."""
        assert self.whole is not None
        ids = torch.zeros(len(tasks), self.length, dtype=torch.int64)
        used = torch.zeros(len(tasks), 1, dtype=torch.int64)
        for row, key in enumerate(torch.cat((tasks.unsqueeze(1), bins), dim=1).tolist()):
            found = self.known.get(tuple(key))
            if found is None:
                if len(self.known) >= _MOST_KNOWN:
                    self.known.clear()
                found = self.known[tuple(key)] = self.whole(key[0], key[1:])[: self.length]
            ids[row, : len(found)] = torch.tensor(found)
            used[row] = len(found)
        ids, used = ids.to(tasks.device), used.to(tasks.device)
        return ids, torch.arange(self.length, device=tasks.device).unsqueeze(0) < used


#: Prompts that are kept, for tokenizers whose prompts are not composed.
_MOST_KNOWN = 65536
