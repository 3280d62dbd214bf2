"""The networks of π0 and π0.5: sizes and names of the release, and what one pass spares."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.plugins.pretrained.released import without_numbers
from tests.plugins.vla import parity_pi0
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from polyrhythm.plugins.pretrained.adapting import trained_names
from polyrhythm.plugins.vla.flow_policy import repeated, restored, stored
from polyrhythm.plugins.vla.pi0.network import (
    PI0,
    PI05,
    VARIANTS,
    Pi0Network,
    Pi0Size,
    config_from_size,
    dead_tensors,
    size_from_config,
)
from polyrhythm.policies.form import weights_on_meta
from polyrhythm.policies.mlp import seeded
from polyrhythm.specs.weights import weight_specs

GOLDEN = Path(__file__).parent / "golden"
KINDS = ("pi0", "pi05")
ARCHITECTURES = {"pi0": PI0, "pi05": PI05}
P = "paligemma_with_expert."


def full_size(kind: str) -> nn.Module:
    architecture = ARCHITECTURES[kind]
    with weights_on_meta():
        return architecture.network(architecture.size({}, {}))


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest) -> Path:
    return GOLDEN / request.param


@pytest.mark.parametrize(("kind", "numbers", "tensors"), [("pi0", 3_501_372_176, 777), ("pi05", 3_616_757_520, 812)])
def test_full_size_has_the_released_numbers_and_shapes(kind: str, numbers: int, tensors: int) -> None:
    state = full_size(kind).state_dict()
    assert (len(state), sum(t.numel() for t in state.values())) == (tensors, numbers)
    assert without_numbers(state) == without_numbers(load_file(GOLDEN / kind / "weights.safetensors"))
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    vision, language = f"{P}paligemma.model.vision_tower.vision_model.", f"{P}paligemma.model.language_model."
    expected = {
        f"{vision}embeddings.patch_embedding.weight": [1152, 3, 14, 14],
        f"{vision}embeddings.position_embedding.weight": [256, 1152],
        f"{vision}encoder.layers.26.mlp.fc1.weight": [4304, 1152],
        f"{P}paligemma.model.multi_modal_projector.linear.weight": [2048, 1152],
        f"{language}layers.17.self_attn.q_proj.weight": [2048, 2048],
        f"{language}layers.17.self_attn.k_proj.weight": [256, 2048],
        f"{language}layers.17.mlp.down_proj.weight": [2048, 16384],
        f"{P}paligemma.lm_head.weight": [257152, 2048],
        f"{P}gemma_expert.lm_head.weight": [257152, 1024],
        f"{P}gemma_expert.model.layers.17.mlp.gate_proj.weight": [4096, 1024],
        "action_in_proj.weight": [1024, 32],
        "action_out_proj.weight": [32, 1024],
    }
    expected |= (
        {f"{P}gemma_expert.model.norm.dense.weight": [3072, 1024], "time_mlp_in.weight": [1024, 1024]}
        if kind == "pi05"
        else {"state_proj.weight": [1024, 32], "action_time_mlp_in.weight": [1024, 2048]}
    )
    assert {name: shapes[name] for name in expected} == expected


@pytest.mark.parametrize("kind", KINDS)
def test_dead_tensors_of_the_release(kind: str) -> None:
    network, architecture = full_size(kind), ARCHITECTURES[kind]
    names = dict(network.named_parameters())
    trained = trained_names(names, "all", architecture.parts, architecture.dead)
    language = f"{P}paligemma.model.language_model."
    ends = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert set(names) - trained == {
        f"{P}gemma_expert.lm_head.weight",
        f"{language}norm.weight",
        f"{language}layers.17.post_attention_layernorm.weight",
        *(f"{language}layers.17.{end}.weight" for end in ends),
    }


def test_what_each_part_trains(folder: Path) -> None:
    network = parity_pi0.load(folder)
    architecture, names = ARCHITECTURES[folder.name], dict(network.named_parameters())
    expert = trained_names(names, "expert", architecture.parts, dead_tensors(network.size))
    assert expert == {name for name in names if not name.startswith(f"{P}paligemma.") and "expert.lm_head" not in name}
    head = trained_names(names, "head", architecture.parts)
    assert head < expert
    assert "action_out_proj.weight" in head


def test_names_and_size_are_those_of_the_folder(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    tensors = weight_specs(load_file(folder / "weights.safetensors"))
    architecture = ARCHITECTURES[folder.name]
    size = architecture.size(config, tensors)
    assert size == size_from_config(config, adaptive=folder.name == "pi05")
    network = architecture.network(size)
    ours = weight_specs(network.state_dict())
    assert {name: spec.shape for name, spec in ours.items()} == {name: spec.shape for name, spec in tensors.items()}
    only_heads = {"vision_config": {"num_attention_heads": 4}, "image_resolution": [42, 42], "chunk_size": 5}
    variants = {key: config[key] for key in ("paligemma_variant", "action_expert_variant")}
    assert architecture.size(only_heads | variants, tensors) == size


@pytest.mark.parametrize("kind", KINDS)
def test_config_of_a_size_gives_the_size(kind: str) -> None:
    released = Pi0Size(adaptive=kind == "pi05")
    assert config_from_size(released, kind, 48)["paligemma_variant"] == "gemma_2b"
    small = size_from_config(json.loads((GOLDEN / kind / "config.json").read_text()), adaptive=kind == "pi05")
    for size in (released, small):
        config = json.loads(json.dumps(config_from_size(size, kind, 48)))
        assert size_from_config(config, adaptive=kind == "pi05") == size


def test_openpi_keys_are_understood() -> None:
    size = size_from_config({"action_dim": 24, "action_horizon": 10, "paligemma_variant": "gemma_2b"}, adaptive=False)
    assert (size.action_dim, size.state_dim, size.horizon, size.vlm) == (24, 24, 10, VARIANTS["gemma_2b"])


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="paligemma_variant = 'gemma_7b' is unknown; known are gemma_2b"):
        size_from_config({"paligemma_variant": "gemma_7b"}, adaptive=False)
    with pytest.raises(ValueError, match="layers is 18 in the language model and 4 in the action expert"):
        Pi0Size(expert=dataclasses.replace(VARIANTS["gemma_300m"], layers=4))


def run(network: Pi0Network, inputs: dict[str, Tensor]) -> Tensor:
    return network.velocity(network.prefix(inputs), inputs, inputs["noise"], inputs["timestep"])[0]


def test_an_absent_camera_may_be_left_out(folder: Path) -> None:
    network, (inputs, _) = parity_pi0.load(folder), parity_pi0.inputs_of(folder)
    inputs["image_present"] = torch.tensor([[True, False, True]] * 3)
    without = inputs | {name: inputs[name][:, [0, 2]] for name in ("images", "image_present")}
    assert torch.allclose(run(network, inputs), run(network, without), atol=1e-5)
    assert not torch.allclose(run(network, inputs), run(network, inputs | {"images": -inputs["images"]}), atol=1e-2)


def test_places_behind_all_prompts_may_be_left_out(folder: Path) -> None:
    network, (inputs, _) = parity_pi0.load(folder), parity_pi0.inputs_of(folder)
    room = {"tokens": torch.zeros(3, 19, dtype=torch.int64), "token_present": torch.zeros(3, 19, dtype=torch.bool)}
    longer = inputs | {name: torch.cat((inputs[name], x), dim=1) for name, x in room.items()}
    assert torch.allclose(run(network, inputs), run(network, longer), atol=1e-5)
    assert torch.allclose(network.prefix(inputs).features, network.prefix(longer).features, atol=1e-5)


def test_a_denoise_step_makes_its_mask_once_for_all_layers(folder: Path) -> None:
    network, (inputs, _) = parity_pi0.load(folder), parity_pi0.inputs_of(folder)
    prefix = network.prefix(inputs)
    with Operations() as done, torch.no_grad():
        network.velocity(prefix, inputs, inputs["noise"], inputs["timestep"])
    assert network.size.expert.layers > 1
    assert sum(done.counts[name] for name in ("masked_fill", "masked_fill_", "where")) == 1


class Operations(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_row_does_not_depend_on_the_others(folder: Path) -> None:
    network, (inputs, _) = parity_pi0.load(folder), parity_pi0.inputs_of(folder)
    whole = run(network, inputs)
    for row in range(3):
        assert torch.allclose(run(network, {n: x[[row]] for n, x in inputs.items()})[0], whole[row], atol=1e-5)


def test_a_prefix_is_stored_restored_and_repeated(folder: Path) -> None:
    network, (inputs, _) = parity_pi0.load(folder), parity_pi0.inputs_of(folder)
    prefix = network.prefix(inputs)
    assert restored(inputs) is None
    again = restored(stored(prefix) | inputs)
    assert again is not None
    x, t = inputs["noise"], inputs["timestep"]
    expected = network.velocity(prefix, inputs, x, t)[0]
    assert torch.equal(network.velocity(again, inputs, x, t)[0], expected)
    twice = {name: tensor.repeat_interleave(2, 0) for name, tensor in inputs.items()}
    found = network.velocity(repeated(prefix, 2), twice, twice["noise"], twice["timestep"])[0]
    assert torch.allclose(found[::2], expected, atol=1e-5)


def test_the_last_prefix_layer_is_spared_where_no_value_is_needed(folder: Path) -> None:
    network, (inputs, _) = parity_pi0.load(folder), parity_pi0.inputs_of(folder)
    last = network.paligemma_with_expert.paligemma.model.language_model.layers[-1]
    calls: list[int] = []
    last.mlp.register_forward_hook(lambda *_: calls.append(1))
    assert network.prefix(inputs, features=False).features.shape == (3, 0)
    assert calls == []
    assert network.prefix(inputs).features.shape == (3, network.feature_width)
    assert calls == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_weights_pass_signals_on(kind: str) -> None:
    """After `initialise` the expert's features have unit size, and depend on the time and on the words."""
    size = size_from_config(json.loads((GOLDEN / kind / "config.json").read_text()), adaptive=kind == "pi05")
    inputs, _ = parity_pi0.inputs_of(GOLDEN / kind)
    network = Pi0Network(size)
    with seeded(1):
        network.initialise()
    with torch.no_grad():
        prefix = network.prefix(inputs)
        velocity, features = network.velocity(prefix, inputs, inputs["noise"], inputs["timestep"])
        _, later = network.velocity(prefix, inputs, inputs["noise"], inputs["timestep"] * 0.5)
        other = network.prefix(inputs | {"tokens": inputs["tokens"].flip(1)})
        _, elsewhere = network.velocity(other, inputs, inputs["noise"], inputs["timestep"])
    assert 0.3 < features.std().item() < 3.0
    assert velocity.abs().mean().item() < 0.3
    assert (features - later).abs().mean().item() > 0.05
    assert (features - elsewhere).abs().mean().item() > 0.01
