"""Converts instruction sentences to rows of word ids.

A word's id is a hash of its letters, so unseen sentences have ids too, and the weights need no vocabulary file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from polyrhythm.specs import Task
from polyrhythm.specs.hashing import mix

#: Id of padding after a sentence's last word.
PADDING = 0


def word_ids(sentence: str, vocabulary: int) -> list[int]:
    """Ids in 1..vocabulary-1 of the lower-cased words and numbers of a sentence.

    >>> word_ids("Press the button", 256) == word_ids("press, the button!", 256)
    True
    """
    return [1 + mix(*word.encode()) % (vocabulary - 1) for word in re.findall(r"\w+", sentence.lower())]


def word_table(tasks: Sequence[Task], words: int, vocabulary: int) -> Tensor:
    """Word ids of each task's instruction: int64 [tasks, words] on the CPU, padded with `PADDING`.

    ValueError: a sentence is too long or empty, or two different sentences get the same ids.
    """
    if not tasks:
        raise ValueError(
            "policy: the environment has no tasks, so no instruction to read: give EnvSpec.tasks at least one"
        )
    rows: dict[tuple[int, ...], str] = {}
    table = torch.full((len(tasks), words), PADDING, dtype=torch.int64, device="cpu")
    for index, task in enumerate(tasks):
        ids = word_ids(task.instruction, vocabulary)
        if not 0 < len(ids) <= words:
            raise ValueError(
                f"policy.words = {words}: the instruction of task {task.name!r} has {len(ids)} words "
                f"({task.instruction!r}): give every task a sentence, and set "
                f"policy.words to at least {max(len(ids), 1)}"
            )
        sentence = " ".join(re.findall(r"\w+", task.instruction.lower()))
        if rows.setdefault(tuple(ids), sentence) != sentence:
            raise ValueError(
                f"policy.vocabulary = {vocabulary}: {sentence!r} and {rows[tuple(ids)]!r} get the same word ids: "
                "choose another size"
            )
        table[index, : len(ids)] = torch.tensor(ids, device="cpu")
    return table
