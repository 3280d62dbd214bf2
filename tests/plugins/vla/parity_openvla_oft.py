"""Computes what tests/plugins/vla/golden/openvla_oft/outputs.npz holds, from a folder's weights and inputs.

`rl_*` is RLinf's layout: one image, a padded batch, no stop token. `official_*` is the release's: two images, a
proprioception token, the stop token, and actions both as tokens and from the L1 head.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tests.plugins.vla.parity_preprocess import rows_of_ids
from torch import Tensor, nn

from polyrhythm.plugins.vla.decoder import positions_of
from polyrhythm.plugins.vla.openvla_oft.network import OpenVlaOft, l1_head_from_config, size_from_config
from polyrhythm.plugins.vla.openvla_oft.policy import ValueHead, centres

#: Names of arrays that agree to 1e-5 as they are. Not the scores of tokens: they reach 8, and the golden ones are up to
#: 1.6e-5 away from the same computation in float64 (ours 1.0e-5).
STRICT = ("actions", "values", "logprobs", "entropy", "loss")
#: Prefix of parameter names → group of the golden file.
GROUPS = {
    "vision_backbone.featurizer.": "dino",
    "vision_backbone.fused_featurizer.": "siglip",
    "projector.": "projector",
    "language_model.model.embed_tokens.": "embed_tokens",
    "language_model.model.": "language_model",
    "language_model.lm_head.": "lm_head",
    "value_head.": "value_head",
    "action_head.": "action_head",
    "proprio_projector.": "proprio_projector",
}


def compute(folder: Path) -> dict[str, np.ndarray]:
    """Every array of the folder's outputs.npz by name."""
    inputs = {name: torch.from_numpy(array) for name, array in np.load(folder / "inputs.npz").items()}
    config = json.loads((folder / "config.json").read_text())
    statistics = json.loads((folder / "dataset_statistics.json").read_text())[config["unnorm_key"]]
    found = {
        **_reinforcement(folder, config, inputs, statistics),
        **_official_discrete(folder, config, inputs, statistics),
        **_official_l1(folder, config, inputs, statistics),
        **_vision(folder, config, inputs),
        "normalized_raw_proprio": _normalised_proprio(inputs["raw_proprio"], statistics["proprio"]),
    }
    return {name: np.asarray(array.detach() if isinstance(array, Tensor) else array) for name, array in found.items()}


def _reinforcement(
    folder: Path, config: Mapping[str, Any], inputs: Mapping[str, Tensor], statistics: Mapping[str, Any]
) -> dict[str, Any]:
    network = load(folder, config, stop_token=False)
    width, vocabulary = network.size.llama.width, network.size.vocabulary
    critic = ValueHead(width, 1)
    stored = load_file(folder / "value_head.safetensors")
    critic.load_state_dict({k.removeprefix("value_head."): v for k, v in stored.items()}, strict=False)
    embeds, present, states, hidden = _pass(network, inputs["pixel_values_1img"], inputs)
    logits = network.token_logits(hidden).flatten(1, 2)
    log_p = (logits.float() / inputs["temperature"]).log_softmax(-1)
    tokens = rows_of_ids(inputs["action_tokens"], vocabulary.first_action, vocabulary.bins).flatten(1)
    log_probs = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    values = critic(hidden[:, 0], torch.zeros(len(hidden), 1)).unsqueeze(1)
    loss = values.mean() - log_probs.mean()
    loss.backward()
    greedy = logits.argmax(-1)
    shape = (len(hidden), network.size.horizon, network.size.action_dim)
    return {
        "rl_attention_mask": present,
        "rl_position_ids": present.long().cumsum(1) - 1,
        "rl_embeds": embeds,
        **{f"rl_hidden_{index}": state for index, state in enumerate(states)},
        "rl_action_logits": logits,
        "rl_greedy_token_ids": (greedy + vocabulary.first_action).view(shape),
        "rl_greedy_actions": _unnormalised(centres(vocabulary.bins)[greedy].view(shape), statistics["action"]),
        "rl_greedy_logprobs_no_temperature": logits.log_softmax(-1).gather(-1, greedy.unsqueeze(-1)).squeeze(-1),
        "rl_values": values,
        "rl_train_values": values,
        "rl_logprobs": log_probs,
        "rl_entropy": -(log_p.exp() * log_p).sum(-1),
        "rl_loss": loss,
        **_gradients("rl", network, {"value_head": critic}),
    }


def _official_discrete(
    folder: Path, config: Mapping[str, Any], inputs: Mapping[str, Tensor], statistics: Mapping[str, Any]
) -> dict[str, Any]:
    network = load(folder, config, stop_token=True)
    vocabulary = network.size.vocabulary
    with torch.no_grad():
        embeds, _, states, hidden = _pass(network, inputs["pixel_values_2img"], _official_prompt(inputs))
        logits = network.language_model.lm_head(hidden)
    ids = logits.argmax(-1)
    rows = rows_of_ids(ids, vocabulary.first_action, vocabulary.bins)
    actions = centres(vocabulary.bins)[rows].view(network.size.horizon, network.size.action_dim)
    return {
        "official_discrete_embeds": embeds,
        "official_discrete_action_hidden": hidden,
        **{f"official_discrete_hidden_{index}": state for index, state in enumerate(states)},
        "official_discrete_logits": logits,
        "official_discrete_token_ids": ids,
        "official_discrete_actions": _unnormalised(actions, statistics["action"]),
    }


def _official_l1(
    folder: Path, config: Mapping[str, Any], inputs: Mapping[str, Tensor], statistics: Mapping[str, Any]
) -> dict[str, Any]:
    network = load(folder, config, stop_token=True, continuous=True)
    given = {**_official_prompt(inputs), "proprio": inputs["proprio"].unsqueeze(0)}
    embeds, _, states, hidden = _pass(network, inputs["pixel_values_2img"], given)
    actions = network.l1_actions(hidden)
    loss = (actions - inputs["target_actions_l1"]).abs().mean()
    loss.backward()
    return {
        "proprio_feature": network.proprio_projector(given["proprio"]),
        "official_l1_embeds": embeds,
        "official_l1_action_hidden": hidden,
        **{f"official_l1_hidden_{index}": state for index, state in enumerate(states)},
        "official_l1_normalized_actions": actions,
        "official_l1_actions": _unnormalised(actions[0].detach(), statistics["action"]),
        "official_l1_loss": loss,
        **_gradients("official_l1", network, {"value_head": ValueHead(network.size.llama.width, 1)}),
    }


def _vision(folder: Path, config: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    network, images = load(folder, config), inputs["pixel_values_2img"]
    backbone = network.vision_backbone
    with torch.no_grad():
        return {
            "dino_features_img0": backbone.featurizer(images[:, :3], torch.float32),
            "siglip_features_img0": backbone.fused_featurizer(images[:, 3:6], torch.float32),
            "vision_features_2img": backbone(images, torch.float32),
            "projector_features_2img": network.patches(network.features(images)),
        }


def load(folder: Path, config: Mapping[str, Any], *, stop_token: bool = True, continuous: bool = False) -> OpenVlaOft:
    """The folder's network, with L1 head and proprioception if `continuous`."""
    weights, size = load_file(folder / "weights.safetensors"), replace(size_from_config(config), stop_token=stop_token)
    if continuous:
        for part in ("action_head", "proprio_projector"):
            weights |= {f"{part}.{name}": x for name, x in load_file(folder / f"{part}.safetensors").items()}
        entries = weights["proprio_projector.fc1.weight"].shape[1]
        size = replace(size, proprio=entries, l1_head=l1_head_from_config(config))
    network = OpenVlaOft(size)
    network.load_state_dict(weights)
    return network


def _pass(
    network: OpenVlaOft, images: Tensor, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """Embeddings, which exist, the hidden states of all depths (the last one normalised), those of the slots."""
    patches = network.patches(network.features(images))
    embeds, present = network.sequence(patches, inputs)
    states: list[Tensor] = [embeds]
    model = network.language_model.model
    hooks = [layer.register_forward_hook(lambda _m, _a, out: states.append(out[0])) for layer in model.layers]
    hooks.append(model.norm.register_forward_hook(lambda _m, _a, out: states.append(out)))
    with torch.no_grad():
        model(embeds, positions_of(present), present[:, None, None, :])
    for hook in hooks:
        hook.remove()
    return embeds, present, [*states[:-2], states[-1]], network.hidden(patches, inputs)


def _official_prompt(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    ids = inputs["official_input_ids"]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}


def _gradients(prefix: str, network: OpenVlaOft, others: Mapping[str, nn.Module]) -> dict[str, Any]:
    named = sorted(network.named_parameters(), key=lambda item: _released_order(item[0]))
    for name, module in others.items():
        named += [(f"{name}.{key}", p) for key, p in module.named_parameters() if not key.startswith("seen.")]
    norms = {name: p.grad.norm().item() for name, p in named if p.grad is not None}
    groups: dict[str, float] = {}
    for name, norm in norms.items():
        group = next(group for start, group in GROUPS.items() if name.startswith(start))
        groups[group] = groups.get(group, 0.0) + norm**2
    return {
        f"{prefix}_grad_param_names": np.array(list(norms)),
        f"{prefix}_grad_param_norms": np.array(list(norms.values()), dtype=np.float32),
        f"{prefix}_grad_none_names": np.array([name for name, p in named if p.grad is None]),
        f"{prefix}_grad_group_names": np.array(sorted(groups)),
        f"{prefix}_grad_group_norms": np.array([groups[name] ** 0.5 for name in sorted(groups)], dtype=np.float32),
        f"{prefix}_grad_total_norm": np.float32(sum(groups.values()) ** 0.5),
    }


def _released_order(name: str) -> int:
    """The order of the release's modules: embeddings before layers, the L1 head before the proprioception."""
    starts = ("vision_backbone.", "projector.", "language_model.model.embed_tokens.", "language_model.model.")
    starts += ("language_model.lm_head.", "action_head.", "proprio_projector.")
    return next(index for index, start in enumerate(starts) if name.startswith(start))


def _unnormalised(actions: Tensor, statistics: Mapping[str, Any]) -> np.ndarray:
    low, high, mask = (np.asarray(statistics[key]) for key in ("q01", "q99", "mask"))
    x = actions.numpy()
    return np.where(mask, 0.5 * (x + 1) * (high - low + 1e-8) + low, x).astype(np.float32)


def _normalised_proprio(state: Tensor, statistics: Mapping[str, Any]) -> np.ndarray:
    low, high = (np.asarray(statistics[key]) for key in ("q01", "q99"))
    return np.clip(2 * (state.numpy() - low) / (high - low + 1e-8) - 1, -1, 1).astype(np.float32)
