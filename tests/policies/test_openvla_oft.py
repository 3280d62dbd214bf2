"""OpenVLA-OFT: golden data of the reference implementations, released names and sizes, tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.policies.parity_openvla_oft import compute
from torch import nn

from polyrhythm.policies.openvla_oft.network import OpenVlaOft
from polyrhythm.policies.openvla_oft.size import L1HeadSize, OpenVlaOftSize, size_from_config
from polyrhythm.policies.openvla_oft.tokens import centres, rows_of, rows_of_ids

GOLDEN = Path(__file__).parent / "golden"


def test_every_golden_array_is_reproduced() -> None:
    """Float32 rounding of the features (up to 7) reaches 1.6e-5 in the reference's own logits, against float64."""
    wanted, found = np.load(GOLDEN / "openvla_oft" / "outputs.npz"), compute(GOLDEN / "openvla_oft")
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        if array.dtype.kind == "U":
            assert found[name].tolist() == array.tolist(), name
        else:
            scale = max(1.0, float(np.abs(array).max()))
            np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-5 * scale / 2, err_msg=name)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def test_the_released_size_has_the_released_names_and_numbers() -> None:
    network = on_meta(lambda: OpenVlaOft(size_from_config({})))
    shapes = {name: tuple(x.shape) for name, x in network.state_dict().items()}
    assert (len(shapes), sum(p.numel() for p in network.parameters())) == (982, 7_541_237_184)
    assert shapes["vision_backbone.featurizer.pos_embed"] == (1, 256, 1024)
    assert shapes["vision_backbone.fused_featurizer.attn_pool.latent"] == (1, 1, 1152)
    assert shapes["projector.fc1.weight"] == (8704, 2176)
    assert shapes["language_model.model.embed_tokens.weight"] == (32064, 4096)
    assert sum(name.startswith("vision_backbone.featurizer.blocks.") for name in shapes) == 24 * 14
    assert sum(name.startswith("vision_backbone.fused_featurizer.blocks.") for name in shapes) == 27 * 12
    assert sum(name.startswith("language_model.model.layers.") for name in shapes) == 32 * 9


def test_the_released_l1_head_and_proprioception_have_their_sizes() -> None:
    size = replace(OpenVlaOftSize(), proprio=8, l1_head=L1HeadSize())
    network = on_meta(lambda: OpenVlaOft(size))
    assert sum(p.numel() for p in network.get_submodule("action_head").parameters()) == 151_117_831
    assert sum(p.numel() for p in network.get_submodule("proprio_projector").parameters()) == 16_818_176


def test_another_vision_backbone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"timm_model_ids = \['vit_base'\]"):
        size_from_config({"timm_model_ids": ["vit_base"]})


def test_tokens_encode_and_decode_as_published() -> None:
    folder = GOLDEN / "preprocess"
    given, wanted = np.load(folder / "inputs.npz"), np.load(folder / "outputs.npz")
    first = OpenVlaOftSize().vocabulary.first_action
    rows = rows_of(torch.from_numpy(given["oft_actions"]), 256)
    assert (rows + first).tolist() == wanted["oft_action_token_ids"].tolist()
    decoded = centres(256, torch.float64)[rows_of_ids(torch.from_numpy(given["oft_token_ids"]), first, 256)]
    np.testing.assert_allclose(decoded.numpy(), wanted["f64_oft_decoded_actions"], rtol=0, atol=1e-15)


def test_an_action_is_decoded_within_half_an_interval() -> None:
    actions = torch.linspace(-1.0, 1.0, 1001, dtype=torch.float64)
    assert (centres(256, torch.float64)[rows_of(actions, 256)] - actions).abs().max() <= 1.0 / 255 + 1e-12
