"""The network of GR00T N1.5: sizes and names of the release, padding, times, and what one prefix pass leaves."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.plugins.pretrained.released import without_numbers
from tests.plugins.vla import parity_groot_n1d5
from torch import Tensor, nn

from polyrhythm.plugins.pretrained.adapting import trained_names
from polyrhythm.plugins.pretrained.precision import Precision, cast
from polyrhythm.plugins.vla.flow_policy import repeated, restored, stored
from polyrhythm.plugins.vla.groot_n1d5.action_head import GrootSize, StackSize
from polyrhythm.plugins.vla.groot_n1d5.network import GROOT_N1D5, GrootNetwork, config_from_size, size_from_config
from polyrhythm.policies.form import weights_on_meta
from polyrhythm.policies.mlp import seeded
from polyrhythm.specs.weights import weight_specs

FOLDER = Path(__file__).parent / "golden" / "gr00t_n1_5"
EAGLE = "backbone.eagle_model."


def full_size() -> nn.Module:
    with weights_on_meta():
        return GROOT_N1D5.network(GROOT_N1D5.size({}, {}))


@pytest.fixture
def network() -> GrootNetwork:
    return parity_groot_n1d5.load(FOLDER)


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    return parity_groot_n1d5.inputs_of(FOLDER)


def test_full_size_has_the_released_numbers_and_shapes() -> None:
    state = full_size().state_dict()
    assert sum(t.numel() for t in state.values()) == 2_413_522_880
    assert without_numbers(state) == without_numbers(load_file(FOLDER / "weights.safetensors"))
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    vision, language, head = f"{EAGLE}vision_model.vision_model.", f"{EAGLE}language_model.", "action_head."
    expected = {
        f"{vision}embeddings.position_embedding.weight": [256, 1152],
        f"{vision}encoder.layers.26.mlp.fc1.weight": [4304, 1152],
        f"{vision}head.attention.in_proj_weight": [3456, 1152],
        f"{EAGLE}mlp1.0.weight": [2048, 1152],
        f"{language}lm_head.weight": [151680, 2048],
        f"{language}model.layers.11.self_attn.k_proj.weight": [1024, 2048],
        f"{language}model.layers.11.self_attn.q_norm.weight": [128],
        f"{head}state_encoder.layer1.W": [32, 64, 1024],
        f"{head}action_encoder.W2.W": [32, 3072, 1536],
        f"{head}action_decoder.layer2.W": [32, 1024, 32],
        f"{head}model.transformer_blocks.14.attn1.to_k.weight": [1536, 2048],
        f"{head}model.transformer_blocks.15.attn1.to_k.weight": [1536, 1536],
        f"{head}model.proj_out_2.weight": [1024, 1536],
        f"{head}vl_self_attention.transformer_blocks.3.ff.net.0.proj.weight": [8192, 2048],
        f"{head}future_tokens.weight": [32, 1536],
        f"{head}position_embedding.weight": [1024, 1536],
    }
    assert {name: shapes.get(name) for name in expected} == expected
    assert not any("layers.12." in name for name in shapes if name.startswith(language))


def test_names_and_size_are_those_of_the_folder() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    tensors = weight_specs(load_file(FOLDER / "weights.safetensors"))
    size = GROOT_N1D5.size(config, tensors)
    assert size == size_from_config(config)
    ours = weight_specs(GrootNetwork(size).state_dict())
    assert {name: spec.shape for name, spec in ours.items()} == {name: spec.shape for name, spec in tensors.items()}
    sections = ("action_head_cfg", "eagle_config")
    few = {name: {k: v for k, v in config[name].items() if "cfg" in k or "config" in k} for name in sections}
    few["action_head_cfg"]["action_horizon"], few["eagle_config"]["image_token_index"] = size.horizon, size.image_token
    assert GROOT_N1D5.size(few, tensors) == size  # the rest from the tensors' shapes


def test_config_of_a_size_gives_the_size() -> None:
    for size in (GrootSize(), size_from_config(json.loads((FOLDER / "config.json").read_text()))):
        assert size_from_config(config_from_size(size)) == size
    with pytest.raises(ValueError, match="vl has heads x head_dim = 20"):
        GrootSize(vl=StackSize(1, 2, 10))
    with pytest.raises(ValueError, match="positions = 4 is below horizon = 16"):
        dataclasses.replace(GrootSize(), positions=4)


def test_what_each_part_trains() -> None:
    names = dict(full_size().named_parameters())
    every = trained_names(names, "all", GROOT_N1D5.parts, GROOT_N1D5.dead)
    assert {name for name in names if name not in every} == {name for name in names if ".vision_model.head." in name}
    expert = trained_names(names, "expert", GROOT_N1D5.parts, GROOT_N1D5.dead)
    assert expert == {name for name in names if name.startswith("action_head.")}
    head = trained_names(names, "head", GROOT_N1D5.parts, GROOT_N1D5.dead)
    assert {name.split(".")[1] for name in head} == {"action_decoder", "model"}


def test_parameters_of_the_prefix_are_those_that_it_depends_on(
    network: GrootNetwork, inputs: dict[str, Tensor]
) -> None:
    prefix = network.prefix(inputs)
    sum(k.square().sum() + v.square().sum() for k, v in prefix.keys_values).backward()
    names = {id(p): name for name, p in network.named_parameters()}
    declared = {names[id(p)] for p in network.prefix_parameters()} - {n for n in names.values() if ".head." in n}
    assert declared == {name for name, p in network.named_parameters() if p.grad is not None}


def test_padding_attends_to_nothing_in_both_dtypes(inputs: dict[str, Tensor]) -> None:
    """On the left, on the right, or a whole image's worth: never NaN, also in the gradient."""
    present = inputs["attention_mask"].clone()
    assert not present.all()
    present[0, -5:] = False
    for dtype in (torch.float32, torch.bfloat16):
        network = parity_groot_n1d5.load(FOLDER)
        precision = Precision(dtype, float32=GROOT_N1D5.float32)
        cast(network, precision, "act")
        with precision.computing("cpu"):
            prefix = network.prefix(inputs | {"attention_mask": present})
            velocity, _ = network.velocity(prefix, inputs, inputs["noise"], 1.0 - inputs["timestep"])
        assert velocity.dtype == torch.float32
        velocity.square().sum().backward()
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        assert all(x.isfinite().all() for x in (velocity, prefix.features, *gradients))


def test_one_embodiment_and_no_padding_change_nothing_but_the_work(inputs: dict[str, Tensor]) -> None:
    """A policy tells its network of both; without them masks and a matrix for each row give the same."""
    inputs = inputs | {"attention_mask": torch.ones_like(inputs["attention_mask"])}
    each = inputs | {"embodiment_id": torch.full_like(inputs["embodiment_id"], 2)}
    every = {name: x for name, x in inputs.items() if name != "embodiment_id"}
    found = []
    for known, given in ((False, each), (True, every)):
        network = parity_groot_n1d5.load(FOLDER)
        if known:
            network.embodiment, network.padded, network.hides = 2, False, False
        prefix = network.prefix(given)
        constants = network.step_constants(given) if known else given
        velocity, features = network.velocity(prefix, constants, given["noise"], given["timestep"])
        (velocity.square().sum() + features.square().mean() + prefix.features.square().mean()).backward()
        gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
        found.append((velocity, prefix.features, gradients))
    (velocity, features, gradients), (velocity_too, features_too, gradients_too) = found
    assert torch.allclose(velocity, velocity_too, atol=1e-5)
    assert torch.allclose(features, features_too, atol=1e-5)
    assert gradients.keys() == gradients_too.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, gradients_too[name], atol=1e-5 * max(1.0, gradient.abs().max().item())), name


def test_bfloat16_is_close_to_float32(network: GrootNetwork, inputs: dict[str, Tensor]) -> None:
    t = 1.0 - inputs["timestep"]
    with torch.no_grad():
        exact, _ = network.velocity(network.prefix(inputs), inputs, inputs["noise"], t)
        precision = Precision(torch.bfloat16, float32=GROOT_N1D5.float32)
        cast(network, precision, "act")
        with precision.computing("cpu"):
            found, _ = network.velocity(network.prefix(inputs), inputs, inputs["noise"], t)
    assert 0.0 < (found - exact).abs().max().item() < 0.05 * exact.abs().max().item()


def test_a_row_does_not_depend_on_the_others(network: GrootNetwork, inputs: dict[str, Tensor]) -> None:
    order = torch.tensor([2, 0])
    some = {name: array[order] for name, array in inputs.items()}
    with torch.no_grad():
        every, few = network.prefix(inputs), network.prefix(some)
        found, _ = network.velocity(few, some, some["noise"], some["timestep"])
        expected, _ = network.velocity(every, inputs, inputs["noise"], inputs["timestep"])
    assert torch.allclose(few.features, every.features[order], atol=1e-5)
    assert torch.allclose(found, expected[order], atol=2e-5)


@pytest.mark.parametrize("steps", [1, 3, 4, 5, 7, 10])
def test_times_of_the_sampler_are_in_their_buckets(
    steps: int, network: GrootNetwork, inputs: dict[str, Tensor]
) -> None:
    """GR00T's time at its step k is k/K, and its bucket int(1000·k/K), whatever float32 makes of 1 − t."""
    buckets: list[int] = []
    network.action_head.model.register_forward_pre_hook(lambda _m, given: buckets.append(given[1][0]))
    prefix = network.prefix(inputs)
    for k in range(steps):
        t = torch.full((3,), (steps - k) / steps)
        network.velocity(prefix, inputs, inputs["noise"], t)
    assert [int(b) for b in buckets] == [int(k / steps * 1000) for k in range(steps)]


def test_a_prefix_is_stored_restored_and_repeated(network: GrootNetwork, inputs: dict[str, Tensor]) -> None:
    x, t = inputs["noise"], inputs["timestep"]
    with torch.no_grad():
        prefix = network.prefix(inputs)
        expected, _ = network.velocity(prefix, inputs, x, t)
        again = restored(stored(prefix))
        assert again is not None
        assert torch.equal(network.velocity(again, inputs, x, t)[0], expected)
        twice = {name: tensor.repeat_interleave(2, 0) for name, tensor in inputs.items()}
        found, _ = network.velocity(repeated(prefix, 2), twice, twice["noise"], twice["timestep"])
    assert torch.allclose(found[::2], expected, atol=1e-5)
    assert network.prefix(inputs, features=False).features.shape == (3, 0)


def test_drawn_weights_pass_signals_on(inputs: dict[str, Tensor]) -> None:
    """After `initialise` features have about unit size, and depend on the time, the words and the state."""
    network = GrootNetwork(size_from_config(json.loads((FOLDER / "config.json").read_text())))
    with seeded(1):
        network.initialise()
    words = inputs["input_ids"].clone()
    words[:, -1] += 1

    def features(given: dict[str, Tensor], t: Tensor) -> Tensor:
        return network.velocity(network.prefix(given), given, given["noise"], t)[1]

    with torch.no_grad():
        t = inputs["timestep"]
        expected = features(inputs, t)
        others = features(inputs, t * 0.5), features(inputs | {"input_ids": words}, t)
        others = (*others, features(inputs | {"state": -inputs["state"]}, t))
        velocity, _ = network.velocity(network.prefix(inputs), inputs, inputs["noise"], t)
    assert 0.2 < expected.std().item() < 4.0
    assert velocity.abs().mean().item() < 0.3
    assert all((expected - other).abs().mean().item() > 0.01 for other in others)
