"""Computes every array of a golden folder of GR00T N1.5 with our network (`tests/plugins/vla/parity.py`).

GR00T's time and velocity run the other way: its time is 1 − t and its velocity −v.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tests.plugins.vla.parity_pi0 import recorded, rl_arrays
from torch import Tensor

from polyrhythm.plugins.vla.flow_policy import Prefix
from polyrhythm.plugins.vla.groot_n1d5.network import GrootNetwork, size_from_config
from polyrhythm.policies import flow_matching

EMBEDDING = "language_model.lm_head.weight"
#: Under which name the gradients of the golden data have it.
GOLDEN_EMBEDDING = "language_model.model.embed_tokens.weight"
#: grad_group_names -> what its parameters' names contain; the first that fits.
GROUPS = {
    "vision_model": ("vision_model",),
    "mlp1": ("mlp1",),
    "embed_tokens": ("embed_tokens",),
    "language_model": ("language_model",),
    "vl": ("action_head.vl",),
    "tokens": ("future_tokens", "position_embedding"),
    "projectors": ("state_encoder", "action_encoder", "action_decoder"),
    "dit": ("action_head.model",),
}


def load(folder: Path) -> GrootNetwork:
    """The folder's network in evaluation mode."""
    network = GrootNetwork(size_from_config(json.loads((folder / "config.json").read_text())))
    network.load_state_dict(load_file(folder / "weights.safetensors"))
    return network.eval()


def inputs_of(folder: Path) -> dict[str, Tensor]:
    """The network's inputs and the training's. The release's head reads the padding of a batch."""
    with np.load(folder / "inputs.npz") as arrays:
        given = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    images, rows = given["eagle_pixel_values"], len(given["eagle_input_ids"])
    return {
        "images": images.view(rows, -1, *images.shape[1:]),
        "input_ids": given["eagle_input_ids"],
        "attention_mask": given["eagle_attention_mask"].bool(),
        "visible": torch.ones_like(given["eagle_attention_mask"], dtype=torch.bool),
        "state": given["state"].squeeze(1),
        "embodiment_id": given["embodiment_id"],
        **{name: given[name] for name in ("action", "action_mask", "noise", "timestep")},
    }


def compute(folder: Path) -> dict[str, np.ndarray]:
    """All arrays by their names in outputs.npz."""
    network, inputs = load(folder), inputs_of(folder)
    with torch.no_grad():
        prefix = network.prefix(inputs)
        found = backbone_arrays(network, inputs) | step_arrays(network, prefix, inputs)
        found |= sampled(network, prefix, inputs)
        with np.load(folder / "outputs.npz") as golden:
            eps = torch.from_numpy(golden["rl_eps"])  # an input, stored among the outputs
        found |= rl_arrays(network, prefix, inputs, found["ode4_x"], eps)
    arrays = {name: tensor.numpy() for name, tensor in found.items()}
    return arrays | training_arrays(network, inputs)


def backbone_arrays(network: GrootNetwork, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    eagle, head = network.backbone.eagle_model, network.action_head
    images = inputs["images"].flatten(0, 1)
    embedded = eagle.embed(inputs["images"], inputs["input_ids"], torch.float32)
    with recorded(eagle.language_model.model.layers) as layers:
        hidden = eagle(embedded, inputs["attention_mask"])
    states = [embedded, *layers[:-1], hidden]
    return {
        "vision_tower_last_hidden": eagle.vision_model.vision_model(images, torch.float32),
        "vision_features": eagle.image_features(images, torch.float32),
        "lm_inputs_embeds": embedded,
        **{f"lm_hidden_{index}": state for index, state in enumerate(states)},
        "backbone_features_vlln": head.vlln(hidden),
        "backbone_features_after_vl_self_attention": network.features(inputs),
    }


def step_arrays(network: GrootNetwork, prefix: Prefix, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    head, embodiment, state = network.action_head, inputs["embodiment_id"], inputs["state"]
    bucket, x, target = noisy(network, inputs)
    blocks: list[Tensor] = []
    hooks = [b.register_forward_hook(lambda _m, _i, out: blocks.append(out)) for b in head.model.transformer_blocks]
    tokens = torch.cat((head.leading_tokens(state, embodiment), head.action_tokens(x, bucket, embodiment)), dim=1)
    output = head.model(tokens, bucket, prefix.keys_values)
    for hook in hooks:
        hook.remove()
    velocity = -network.velocity(prefix, inputs, x, 1.0 - inputs["timestep"])[0]
    features = head.state_encoder(state.unsqueeze(1), embodiment)
    return {
        "state_features": features,
        "x_t": x,
        "timestep_bucket": bucket,
        "action_encoder_output_without_position": head.action_encoder(x, bucket, embodiment),
        "timestep_embedding": head.model.embed_time(bucket),
        **{f"dit_block_{index}": block for index, block in enumerate(blocks)},
        "dit_output": output,
        "velocity": velocity,
        "loss": loss_of(velocity, target, inputs),
        "rl_value_feature_mean_all_positions_then_state": torch.cat((prefix.features, features.squeeze(1)), dim=1),
    }


def noisy(network: GrootNetwork, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Buckets of the golden times, the states there, and the target velocity in GR00T's direction."""
    t = inputs["timestep"]
    x, target = flow_matching.between(inputs["action"], inputs["noise"], (1.0 - t).view(-1, 1, 1))
    return (t * network.size.buckets).long(), x, -target


def loss_of(velocity: Tensor, target: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    mask = inputs["action_mask"]
    return ((velocity - target).square() * mask).sum() / mask.sum()


def sampled(network: GrootNetwork, prefix: Prefix, inputs: Mapping[str, Tensor], steps: int = 4) -> dict[str, Tensor]:
    x, states, velocities, buckets = inputs["noise"], [inputs["noise"]], [], []
    for k in range(steps):
        t = torch.full((len(x),), 1.0 - k / steps)
        velocity = -network.velocity(prefix, inputs, x, t)[0]
        x = x + velocity / steps
        states.append(x)
        velocities.append(velocity)
        buckets.append(int(k / steps * network.size.buckets))
    arrays = {"timesteps": torch.tensor(buckets), "x": torch.stack(states), "v": torch.stack(velocities), "actions": x}
    return {f"ode{steps}_{name}": tensor for name, tensor in arrays.items()}


def training_arrays(network: GrootNetwork, inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Gradients of the loss."""
    network.zero_grad()
    _, x, target = noisy(network, inputs)
    prefix = network.prefix(inputs, features=False)
    velocity = -network.velocity(prefix, inputs, x, 1.0 - inputs["timestep"])[0]
    loss_of(velocity, target, inputs).backward()
    norms = {
        name.replace(EMBEDDING, GOLDEN_EMBEDDING): p.grad.norm().item()
        for name, p in network.named_parameters()
        if p.grad is not None
    }
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        group = next(group for group, parts in GROUPS.items() if any(part in name for part in parts))
        squares[group] = squares.get(group, 0.0) + norm**2
    return {
        "grad_param_names": np.array(list(norms)),
        "grad_param_norms": np.array(list(norms.values())),
        "grad_none_names": np.array([name for name, p in network.named_parameters() if p.grad is None]),
        "grad_group_names": np.array(sorted(squares)),
        "grad_group_norms": np.array([squares[group] ** 0.5 for group in sorted(squares)]),
        "grad_total_norm": np.array(sum(squares.values()) ** 0.5),
    }
