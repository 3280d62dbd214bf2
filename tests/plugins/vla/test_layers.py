"""The transformer layers give what transformers' own modules give with the same weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.plugins.vla import decoder
from polyrhythm.plugins.vla.decoder import AdaRMSNorm, Decoder, DecoderSize
from polyrhythm.plugins.vla.vision import SiglipVisionModel, VisionSize
from polyrhythm.policies.mlp import seeded

#: Eight tokens of two rows; the second row has only the first five.
PRESENT = torch.tensor([[True] * 8, [True] * 5 + [False] * 3])
DECODERS = {
    "Gemma": DecoderSize(24, 2, 40, heads=4, kv_heads=1, head_dim=8, activation="gelu_tanh", norm_offset=1.0),
    "Llama": DecoderSize(32, 2, 40, heads=4, kv_heads=4, head_dim=8, activation="silu"),
    "Qwen3": DecoderSize(24, 2, 40, heads=4, kv_heads=2, head_dim=8, activation="silu", theta=1e6, qk_norm=True),
}


def reference(kind: str, size: DecoderSize) -> Any:
    """transformers' model of the kind and size, with random weights in its norms too."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        intermediate_size=size.mlp,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        rms_norm_eps=size.eps,
        rope_parameters={"rope_type": "default", "rope_theta": size.theta},
        vocab_size=16,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    with seeded(1):
        model = getattr(transformers, f"{kind}Model")(config).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("kind", sorted(DECODERS))
def test_decoder_is_transformers_model(kind: str) -> None:
    size = DECODERS[kind]
    model, ours = reference(kind, size), Decoder(size)
    ours.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("embed_tokens")})
    x = torch.randn(2, 8, size.width, generator=torch.Generator().manual_seed(2))
    positions = decoder.positions_of(PRESENT)
    mask = decoder.causal_mask(PRESENT)
    theirs = model(inputs_embeds=x, attention_mask=PRESENT.long(), position_ids=positions, use_cache=False)
    hidden, keys_values = ours(x, positions, mask)
    assert torch.allclose(hidden[PRESENT], theirs.last_hidden_state[PRESENT], atol=1e-5)
    assert [k.shape for k, _ in keys_values] == [(2, size.kv_heads, 8, size.head_dim)] * size.layers


@pytest.mark.parametrize("kind", sorted(DECODERS))
def test_a_second_pass_over_keys_and_values_is_the_end_of_one_pass(kind: str) -> None:
    size = DECODERS[kind]
    with seeded(3):
        ours, x = Decoder(size), torch.randn(2, 8, size.width)
    positions, mask = decoder.positions_of(PRESENT), decoder.causal_mask(PRESENT)
    whole, _ = ours(x, positions, mask)
    _, past = ours(x[:, :3], positions[:, :3], mask[..., :3, :3])
    rest, _ = ours(x[:, 3:], positions[:, 3:], mask[..., 3:, :], past)
    assert torch.allclose(rest[PRESENT[:, 3:]], whole[:, 3:][PRESENT[:, 3:]], atol=1e-5)


def test_siglip_is_transformers_model() -> None:
    from transformers import SiglipVisionConfig
    from transformers import SiglipVisionModel as Theirs

    size = VisionSize(width=24, layers=2, mlp=40, heads=4, image=42)
    config = SiglipVisionConfig(
        hidden_size=24, num_hidden_layers=2, intermediate_size=40, num_attention_heads=4, image_size=42, patch_size=14,
        vision_use_head=False, hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip
    with seeded(4):
        theirs, ours = Theirs(config).eval(), SiglipVisionModel(size)
        for parameter in theirs.parameters():
            nn.init.normal_(parameter, std=0.4)
        images = torch.randn(2, 3, 42, 42)
    ours.load_state_dict({name.removeprefix("vision_model."): x for name, x in theirs.state_dict().items()})
    expected = theirs(images).last_hidden_state
    assert torch.allclose(ours(images, torch.float32), expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("kind", sorted(DECODERS))
def test_recomputed_activations_give_equal_gradients(kind: str) -> None:
    size = DECODERS[kind]
    with seeded(5):
        plain, again = Decoder(size), Decoder(size)
        x = torch.randn(2, 8, size.width)
    again.load_state_dict(plain.state_dict())
    again.checkpointing = True
    for model in (plain, again):
        hidden, keys_values = model(x, decoder.positions_of(PRESENT), decoder.causal_mask(PRESENT))
        (hidden[PRESENT].square().sum() + sum(k.sum() + v.square().sum() for k, v in keys_values)).backward()
    for (name, p), q in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        assert torch.equal(p.grad, q.grad), name


def test_an_adaptive_norm_has_scale_shift_and_gate_in_this_order() -> None:
    norm = AdaRMSNorm(2, 1, eps=0.0)
    with torch.no_grad():
        norm.dense.weight.copy_(torch.arange(6.0).unsqueeze(1))
        norm.dense.bias.zero_()
    x, condition = torch.tensor([[[3.0, 4.0]]]), torch.ones(1, 1)
    normed, gate = norm(x, condition)
    root_mean_square = 12.5**0.5
    assert torch.allclose(normed[0, 0], torch.tensor([3.0 * 1 / root_mean_square + 2, 4.0 * 2 / root_mean_square + 3]))
    assert torch.equal(gate, torch.tensor([[[4.0, 5.0]]]))


def test_adaptive_decoder_gates_its_branches() -> None:
    size = dataclasses.replace(DECODERS["Gemma"], condition=6)
    model = Decoder(size)
    for module in model.modules():
        if isinstance(module, AdaRMSNorm):
            nn.init.zeros_(module.dense.weight)
            nn.init.zeros_(module.dense.bias)
    x = torch.randn(2, 8, size.width, generator=torch.Generator().manual_seed(6))
    hidden, _ = model(x, decoder.positions_of(PRESENT), None, condition=torch.ones(2, 6))
    assert torch.equal(hidden, attention_free(x))  # gates of 0 close every branch


def attention_free(x: Tensor) -> Tensor:
    """x after a root-mean-square norm alone."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_a_query_that_sees_nothing_gets_zeros_or_the_mean_of_all_values() -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8, generator=torch.Generator().manual_seed(7)).unbind(0)
    nothing = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    assert torch.equal(decoder.attend(q, k, v, nothing), torch.zeros(1, 4, 16))
    mean = v.mean(2, keepdim=True).expand(-1, -1, 4, -1).transpose(1, 2).flatten(2)
    assert torch.allclose(decoder.attend(q, k, v, decoder.additive(nothing, torch.float32)), mean, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", ["none", "of a key", "of a query", "of heads"])
def test_shared_keys_serve_neighbouring_heads(kv_heads: int, mask: str) -> None:
    generator = torch.Generator().manual_seed(8)
    q = torch.randn(2, 4, 3, 8, generator=generator)
    k, v = torch.randn(2, 2, kv_heads, 5, 8, generator=generator).unbind(0)
    seen = torch.rand(2, 1, 1 if mask == "of a key" else 3, 5, generator=generator) < 0.6
    seen[..., 0] = True
    given = decoder.for_shared_heads(seen, 4 // kv_heads) if mask == "of heads" else seen
    summands = None if mask == "none" else decoder.additive(given, torch.float32)
    hidden = torch.zeros(2, 1, 5) if mask == "none" else decoder.additive(seen, torch.float32).squeeze(1)
    found = decoder.attend(q, k, v, summands).unflatten(-1, (4, 8))
    for head in range(4):
        shared = head * kv_heads // 4
        weights = torch.softmax(q[:, head] @ k[:, shared].mT / 8**0.5 + hidden, dim=-1)
        assert torch.allclose(found[:, :, head], weights @ v[:, shared], atol=1e-6)
