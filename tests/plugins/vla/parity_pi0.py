"""Computes every array of a golden folder of π0 or π0.5 with our network (`tests/plugins/vla/parity.py`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from polyrhythm.plugins.vla.decoder import padding_mask, positions_of
from polyrhythm.plugins.vla.flow_policy import FlowNetwork, Prefix
from polyrhythm.plugins.vla.pi0.network import Pi0Network, mean_of, size_from_config
from polyrhythm.policies import distributions, flow_matching

#: Strength of the noise in the rl_* arrays.
LEVEL = 0.5
EMBEDDING = "paligemma_with_expert.paligemma.lm_head.weight"
#: Under which name the gradients of the golden data have it.
GOLDEN_EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
#: grad_group_names -> what its parameters' names contain; the first that fits.
GROUPS = {
    "vision_tower": "vision_tower",
    "projector": "multi_modal_projector",
    "embed_tokens": "embed_tokens",
    "language_model": "language_model",
    "gemma_expert": "gemma_expert",
    "state_proj": "state_proj",
    "time_mlp": "\0time_mlp",
    "action_heads": "\0action_",
}


def load(folder: Path) -> Pi0Network:
    """The folder's network in evaluation mode."""
    config = json.loads((folder / "config.json").read_text())
    network = Pi0Network(size_from_config(config, adaptive=config["type"] == "pi05"))
    network.load_state_dict(load_file(folder / "weights.safetensors"))
    return network.eval()


def inputs_of(folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """The network's inputs and the training's (actions, noise, timestep); names of the cameras."""
    cameras = json.loads((folder / "config.json").read_text())["image_keys"]
    with np.load(folder / "inputs.npz") as arrays:
        given = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    inputs = {
        "images": torch.stack([given[f"image.{camera}"] for camera in cameras], dim=1),
        "image_present": torch.stack([given[f"image_mask.{camera}"] for camera in cameras], dim=1),
        "tokens": given["tokens"],
        "token_present": given["token_mask"],
        **{name: given[name] for name in ("state", "actions", "noise", "timestep")},
    }
    if "rl_eps" in given:
        inputs["rl_eps"] = given["rl_eps"]
    return inputs, cameras


def masks(folder: Path) -> dict[str, np.ndarray]:
    """In the reference's joint pass padded queries also see the suffix; nothing reads them."""
    inputs, _ = inputs_of(folder)
    tokens = load(folder).size.vision.tokens
    present = torch.cat((inputs["image_present"].repeat_interleave(tokens, 1), inputs["token_present"]), 1)
    return {"joint_prefix_hidden": present.numpy()}


def compute(folder: Path) -> dict[str, np.ndarray]:
    """All arrays by their names in outputs.npz."""
    network = load(folder)
    inputs, cameras = inputs_of(folder)
    with torch.no_grad():
        found, prefix = prefix_arrays(network, inputs, cameras)
        found |= suffix_arrays(network, prefix, inputs)
        found |= sampled(network, prefix, inputs, 10) | sampled(network, prefix, inputs, 4)
        found |= first_step_layers(network, prefix, inputs)
        with np.load(folder / "outputs.npz") as golden:
            eps = torch.from_numpy(golden["rl_eps"])  # an input, stored among the outputs
        found |= rl_arrays(network, prefix, inputs, found["ode4_x"], eps)
    arrays = {name: tensor.numpy() for name, tensor in found.items()}
    return arrays | training_arrays(network, inputs)


@contextmanager
def recorded(layers: nn.ModuleList) -> Iterator[list[Tensor]]:
    """The hidden states that leave each layer, in the order of the calls."""
    outputs: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda _m, _i, out: outputs.append(out[0])) for layer in layers]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def prefix_arrays(
    network: Pi0Network, inputs: Mapping[str, Tensor], cameras: list[str]
) -> tuple[dict[str, Tensor], Prefix]:
    paligemma = network.paligemma_with_expert.paligemma
    found = {}
    for index, camera in enumerate(cameras):
        images = inputs["images"][:, index]
        found[f"vision_tower_last_hidden.{camera}"] = paligemma.model.vision_tower.vision_model(images, torch.float32)
        found[f"vision_features.{camera}"] = paligemma.image_features(images, torch.float32)
    embedded, present = network.embed_prefix(inputs)
    language = paligemma.model.language_model
    with recorded(language.layers) as layers:
        prefix = network.prefix(inputs)
    hidden = language.norm(layers[-1])
    assert torch.equal(prefix.features, mean_of(hidden, present))
    spared = network.prefix(inputs, features=False)
    for index, (keys, values) in enumerate(spared.keys_values):
        found |= {f"prefix_key_cache_{index}": keys, f"prefix_value_cache_{index}": values}
        found[f"prefix_layer_{index}_output"] = layers[index]
    used = 2 * network.size.vision.tokens  # RLinf: two cameras and all places of the language
    counted = torch.cat((hidden[:, :used], hidden[:, len(cameras) * network.size.vision.tokens :]), dim=1)
    found |= {
        "prefix_embs": embedded,
        "prefix_pad_mask": present,
        "prefix_position_ids": positions_of(present),
        "prefix_attention_2d": padding_mask(present).squeeze(1),
        "prefix_hidden": hidden,
        "joint_prefix_hidden": hidden,
        "rl_value_feature_prefix_mean_2img": counted.mean(1),
    }
    return found, prefix


def suffix_arrays(network: Pi0Network, prefix: Prefix, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    t = inputs["timestep"]
    x, target = flow_matching.between(inputs["actions"], inputs["noise"], t.view(-1, 1, 1))
    suffix, condition = network.embed_suffix(inputs, x, t)
    length = suffix.shape[1]
    seen, positions = network.suffix_mask(prefix.present, length)
    nothing = torch.zeros(len(t), prefix.present.shape[1], length, dtype=torch.bool)
    of_prefix = torch.cat((padding_mask(prefix.present).squeeze(1), nothing), dim=2)
    velocity, _ = network.velocity(prefix, inputs, x, t)
    elementwise = (target - velocity).square()
    found = {
        "x_t": x,
        "u_t": target,
        "time_embedding": network.time_code(t),
        "suffix_embs": suffix,
        "full_attention_2d": torch.cat((of_prefix, seen.squeeze(1)), dim=1),
        "full_position_ids": torch.cat((positions_of(prefix.present), positions), dim=1),
        "joint_suffix_hidden": network.expert_hidden(prefix, suffix, condition),
        "velocity": velocity,
        "loss_elementwise": elementwise,
        "loss": elementwise.mean(),
    }
    return found if condition is None else found | {"adarms_cond": condition}


def sampled(network: Pi0Network, prefix: Prefix, inputs: Mapping[str, Tensor], steps: int) -> dict[str, Tensor]:
    """The reference's sampler: Euler steps, the time accumulated in float32."""
    x, t, step = inputs["noise"], torch.tensor(1.0), torch.tensor(-1.0 / steps)
    times, states, velocities = [], [x], []
    for _ in range(steps):
        velocity, _ = network.velocity(prefix, inputs, x, t.expand(len(x)))
        x = x + step * velocity
        times.append(t)
        states.append(x)
        velocities.append(velocity)
        t = t + step
    arrays = {"times": torch.stack(times), "x": torch.stack(states), "v": torch.stack(velocities), "actions": x}
    return {f"ode{steps}_{name}": tensor for name, tensor in arrays.items()}


def first_step_layers(network: Pi0Network, prefix: Prefix, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with recorded(network.paligemma_with_expert.gemma_expert.model.layers) as layers:
        network.velocity(prefix, inputs, inputs["noise"], torch.ones(len(inputs["noise"])))
    return {f"expert_layer_{index}_output_first_step": x for index, x in enumerate(layers)}


def rl_arrays(
    network: FlowNetwork, prefix: Prefix, inputs: Mapping[str, Tensor], states: Tensor, eps: Tensor
) -> dict[str, Tensor]:
    """RLinf's steps from each state of the ode with four steps."""
    steps, shape = len(states) - 1, inputs["noise"].shape
    found: dict[str, list[Tensor]] = {"value_feature_suffix_mean": []}
    for k in range(steps):
        t = (steps - k) / steps
        v, features = network.velocity(prefix, inputs, states[k], torch.full((shape[0],), t))
        found["value_feature_suffix_mean"].append(features.mean(1))
        rows = {
            "ode": torch.tensor(flow_matching.step_coefficients(steps, 0.0)[k]),
            "sde": torch.tensor(flow_matching.step_coefficients(steps, LEVEL)[k]),
            "cps": torch.tensor(flow_matching.step_coefficients(steps, LEVEL, "cps")[k]),
        }
        for name, coefficients in rows.items():
            mean, std = flow_matching.step(states[k], v, coefficients.expand(shape[0], -1))
            std = std.expand(shape)
            found.setdefault(f"flow_{name}_mean", []).append(mean)
            found.setdefault(f"flow_{name}_std", []).append(std)
            if name != "ode":
                logprob = distributions.normal_logprob(mean + std * eps[k], mean, std.log())
                logprob = torch.where(std > 0, logprob, 0.0)  # RLinf's convention for a step without noise
                found.setdefault(f"flow_{name}_logprob_of_mean_plus_std_times_eps", []).append(logprob)
    arrays = {f"rl_{name}": torch.stack(tensors) for name, tensors in found.items()}
    return arrays | {"rl_eps": eps, "rl_timesteps": torch.linspace(1.0, 0.0, steps + 1)}


def training_arrays(network: Pi0Network, inputs: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Gradients of the loss through the two passes."""
    network.zero_grad()
    t = inputs["timestep"]
    x, target = flow_matching.between(inputs["actions"], inputs["noise"], t.view(-1, 1, 1))
    prefix = network.prefix(inputs, features=False)
    (target - network.velocity(prefix, inputs, x, t)[0]).square().mean().backward()
    last = f"language_model.layers.{network.size.vlm.layers - 1}.self_attn.q_proj"
    norms, without = {}, []
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            norms[name] = parameter.grad.norm().item()
        elif last in name:
            norms[name] = 0.0  # the reference computes it, to no effect: its gradient is exactly zero there
        else:
            without.append(name)
    norms = {GOLDEN_EMBEDDING if name == EMBEDDING else name: norm for name, norm in norms.items()}
    squares: dict[str, float] = {}
    for name in norms:
        group = next(group for group, part in GROUPS.items() if part in f"\0{name}")
        squares[group] = squares.get(group, 0.0) + norms[name] ** 2
    return {
        "grad_param_names": np.array(list(norms)),
        "grad_param_norms": np.array(list(norms.values())),
        "grad_none_names": np.array(without),
        "grad_group_names": np.array(sorted(squares)),
        "grad_group_norms": np.array([squares[group] ** 0.5 for group in sorted(squares)]),
        "grad_total_norm": np.array(sum(squares.values()) ** 0.5),
    }
