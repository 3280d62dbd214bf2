"""A tokenizer of a few hundred pieces in the layout of released folders, made in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<IMG_CONTEXT>", "<img>", "</img>", "<|im_start|>", "<|im_end|>"]
IMAGE_ID = SPECIALS.index("<IMG_CONTEXT>")
#: Rows of an embedding that has all ids.
VOCABULARY = 400
_TEXTS = [
    "Task: push the red block, State: 12 34 56 78;\nAction: ",
    "In: What action should the robot take to close the door?\nOut:",
    "<image 1> <image 2> system user assistant You are a helpful assistant.",
    *(f"State: {a} {b};\nAction: " for a in range(0, 256, 7) for b in range(-1, 256, 13)),
]


def write_tokenizer(folder: Path, *, seams: bool = False) -> Path:
    """Byte-pair pieces with ▁ for spaces and single digits, as Gemma's. seams: pieces may cover several words, so
    that a prompt's parts cannot be encoded apart."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    if not seams:
        split = pre_tokenizers.Split("▁", "merged_with_next")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.Digits(individual_digits=True)])
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"pad_token": "<pad>", "unk_token": "<unk>"}))
    return folder
