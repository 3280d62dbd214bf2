"""Folders of LeRobot's save_pretrained with random weights, made in a Python that has LeRobot and needs nothing else.

    python made_folders.py FOLDER KIND

KIND: act, smolvla, or drift, whose package must be importable. SmolVLA's language model, its processor and its
tokenizer are tiny and made here too, so nothing is downloaded.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

_WORDS = ("<pad>", "<unk>", "<end>", "<fake>", "<global>", "<image>", "push", "the", "block")
_IMAGE, _STATE, _ACTION = "observation.image", "observation.state", "action"
#: Settings of a kind beside its inputs and outputs.
_SETTINGS: dict[str, dict[str, Any]] = {
    "act": {
        "pretrained_backbone_weights": None,
        "dim_model": 32,
        "n_heads": 2,
        "dim_feedforward": 32,
        "n_encoder_layers": 1,
        "n_vae_encoder_layers": 1,
        "latent_dim": 4,
        "chunk_size": 4,
        "n_action_steps": 3,
    },
    "smolvla": {
        "num_vlm_layers": 2,
        "resize_imgs_with_padding": (32, 32),
        "chunk_size": 4,
        "n_action_steps": 3,
        "max_state_dim": 4,
        "max_action_dim": 4,
    },
    "drift": {},
}


def make_folder(folder: Path, kind: str, size: int = 96, **further: Any) -> Path:
    """A policy of this kind for images [size,size,3] (not drift), a state of two numbers and two actions, which are
    normalised from 0..512."""
    import lerobot.policies  # noqa: F401
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.factory import get_policy_class, make_policy_config, make_pre_post_processors

    settings = {**_SETTINGS[kind], **further}
    if kind == "smolvla":
        settings["vlm_model_name"] = str(_language_model(folder / "vlm"))
    inputs = {_STATE: PolicyFeature(FeatureType.STATE, (2,))}
    if kind != "drift":
        inputs[_IMAGE] = PolicyFeature(FeatureType.VISUAL, (3, size, size))
    outputs = {_ACTION: PolicyFeature(FeatureType.ACTION, (2,))}
    config = make_policy_config(kind, device="cpu", input_features=inputs, output_features=outputs, **settings)
    numbers = {"mean": torch.full((2,), 256.0), "std": torch.full((2,), 150.0)}
    pixels = {"mean": torch.zeros(3, 1, 1), "std": torch.ones(3, 1, 1)}
    processors = make_pre_post_processors(config, dataset_stats={_STATE: numbers, _ACTION: numbers, _IMAGE: pixels})
    torch.manual_seed(0)
    for part in (get_policy_class(kind)(config), *processors):
        part.save_pretrained(str(folder))
    return folder


def _language_model(folder: Path) -> Path:
    """SmolVLM's configuration, processor and tokenizer of a few words; its weights are the policy's."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, SmolVLMConfig

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = ("end_of_utterance_token", "fake_image_token", "global_image_token", "image_token")
    special = dict(zip(names, _WORDS[2:6], strict=True))
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", eos_token="<end>", extra_special_tokens=special
    ).save_pretrained(folder)
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    text = {**layers, "model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16}
    SmolVLMConfig(
        text_config={**text, "vocab_size": len(_WORDS), "pad_token_id": 0},
        vision_config={**layers, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8},
        scale_factor=2,
        image_token_id=5,
        pad_token_id=0,
    ).save_pretrained(folder)
    processor = {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    images = {"processor_class": "SmolVLMProcessor", "image_processor_type": "SmolVLMImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    return folder


if __name__ == "__main__":
    make_folder(Path(sys.argv[1]), sys.argv[2])
