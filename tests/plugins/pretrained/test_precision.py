"""In which dtypes networks are kept and computed: acting and training agree; float32 is as without autocast."""

from __future__ import annotations

import pytest
import torch
from tests.plugins.pretrained.test_adapting import build, logprob, observations, tokens, train
from tests.stations import test_capturable as small
from torch import nn

from polyrhythm.plugins.pretrained.precision import Precision, cast, in_float32
from polyrhythm.plugins.vla.decoder import Decoder, DecoderSize
from polyrhythm.policies.form import published_state
from polyrhythm.policies.mlp import seeded

BF16 = torch.bfloat16
SIZE = DecoderSize(width=48, layers=3, mlp=96, heads=4, kv_heads=2, head_dim=12, activation="gelu_tanh")


def acting_of(training, **changes):
    """A generator's module that has taken the trainer's weights, rounded as published."""
    acting = build("act", **changes)
    own = acting.state_dict()
    with torch.no_grad():
        for name, tensor in published_state(training).items():
            own[name].copy_(tensor)
    return acting


@pytest.mark.parametrize("train_mode", ["all", "expert", "head", "lora"])
@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_acting_weights_are_the_training_weights_rounded(train_mode, master):
    training = build(train=train_mode, dtype="bfloat16", master=master)
    train(training)
    acting = acting_of(training, train=train_mode, dtype="bfloat16", master=master)
    flags = {name: p.requires_grad for name, p in training.named_parameters()}
    for name, tensor in acting.state_dict().items():
        source = training.state_dict()[name]
        single = "norm" in name or name.startswith(("critic.", "network.head.", "network.queries"))
        assert tensor.dtype is (torch.float32 if single else BF16), name
        kept = torch.float32 if single or (flags[name] and master == "float32") else BF16
        assert source.dtype is kept, name
        assert torch.equal(tensor, source.to(tensor.dtype)), name


@pytest.mark.parametrize("train_mode", ["all", "expert", "head", "lora"])
def test_log_probs_and_values_of_both_roles_agree(train_mode):
    training = build(train=train_mode, dtype="bfloat16")
    train(training)
    acting = acting_of(training, train=train_mode, dtype="bfloat16")
    obs, chosen = observations(16), tokens(16)
    ours, theirs = (policy.evaluate(obs, {"tokens": chosen}) for policy in (training, acting))
    assert ours.logprob.dtype is ours.value.dtype is theirs.logprob.dtype is torch.float32
    torch.testing.assert_close(ours.logprob, theirs.logprob, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.value, theirs.value, atol=1e-6, rtol=0)
    single = build(train=train_mode)
    train(single)
    assert (logprob(single, obs, chosen) - ours.logprob).abs().max() > 1e-4, "float32 is something else"


class Language(nn.Module):
    """A decoder with an embedding, a convolution and a head; the head is tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 48)
        self.patches = nn.Conv2d(3, 48, 2, 2)
        self.decoder = Decoder(SIZE)
        self.head = nn.Linear(48, 7)

    def forward(self, ids, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((tokens.to(self.embed(ids).dtype), self.embed(ids)), dim=1)
        places = torch.arange(x.shape[1]).expand(len(x), -1)
        return self.head(self.decoder(x, places, None)[0])


def language():
    with seeded(0):
        return Language()


def inputs():
    rng = torch.Generator().manual_seed(1)
    return torch.randint(31, (3, 5), generator=rng), torch.randn(3, 3, 4, 4, generator=rng)


def test_a_decoder_computes_alike_in_both_roles():
    """Embeddings, convolutions and layers that are float32 in the release included."""
    precision = Precision(BF16, torch.float32, ("head.*", "patches.*"))
    training, acting = language(), language()
    cast(training, precision, "train")
    cast(acting, precision, "act")
    assert training.embed.weight.dtype is torch.float32
    assert acting.embed.weight.dtype is BF16
    assert acting.head.weight.dtype is acting.patches.weight.dtype is torch.float32
    with precision.computing("cpu"):
        ours, theirs = training(*inputs()), acting(*inputs())
    assert ours.dtype is theirs.dtype is torch.float32
    assert torch.equal(ours, theirs)
    ours.square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in training.parameters())


def test_float32_is_bit_equal_to_no_autocast_at_all():
    precision = Precision(torch.float32)
    plain, ours = language(), language()
    cast(ours, precision, "train")
    assert [type(module) for module in ours.modules()] == [type(module) for module in plain.modules()]
    with precision.computing("cpu"):
        found = ours(*inputs())
    expected = plain(*inputs())
    assert torch.equal(found, expected)
    found.sum().backward()
    expected.sum().backward()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_what_the_release_keeps_in_float32_computes_in_float32():
    layer = nn.Sequential(nn.Linear(40, 8))
    reference = nn.Linear(40, 8)
    reference.load_state_dict(layer[0].state_dict())
    precision = Precision(BF16, float32=("0.*",))
    cast(layer, precision, "act")
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).to(BF16)
    with precision.computing("cpu"):
        assert torch.equal(layer(x), reference_of(reference, x))
        assert nn.Linear(40, 8)(x).dtype is BF16
        with in_float32("cpu"):
            assert nn.Linear(40, 8)(x.float()).dtype is torch.float32


def reference_of(layer, x):
    with torch.autocast("cpu", enabled=False):
        return layer(x.float())


def test_a_training_module_in_bfloat16_keeps_frozen_tensors_small():
    form = build(dtype="bfloat16", train="expert").network
    kept = {p.dtype for name, p in form.named_parameters() if name.startswith("backbone") and "norm" not in name}
    assert kept == {BF16}


def test_casting_again_changes_nothing():
    precision, network = Precision(BF16, float32=("head.*",)), language()
    cast(network, precision, "act")
    before = {name: p.dtype for name, p in network.named_parameters()}
    kinds = [type(module) for module in network.modules()]
    cast(network, precision, "act")
    assert {name: p.dtype for name, p in network.named_parameters()} == before
    assert [type(module) for module in network.modules()] == kinds


@pytest.mark.parametrize("train_mode", ["all", "expert", "lora"])
@pytest.mark.parametrize("name", ["pi0", "pi05", "openvla_oft", "groot_n1d5"])
def test_published_policies_act_as_the_trainer_evaluates(name, train_mode):
    """In bfloat16 with float32 masters, after weights have moved to numbers that bfloat16 does not have."""
    settings, spec = small.POLICIES[name]
    settings = settings.model_copy(update={"train": train_mode})
    training = settings.build(spec, seed=0, device="cpu", role="train").eval()
    moved = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in training.parameters():
            if p.requires_grad:
                assert p.dtype is torch.float32
                p.add_(0.02 * torch.randn(p.shape, generator=moved))
    acting = settings.build(spec, seed=0, device="cpu", role="act").eval()
    own = acting.state_dict()
    with torch.no_grad():
        for key, tensor in published_state(training).items():
            own[key].copy_(tensor)
    obs, greedy, keys = small.inputs(5)
    act = acting.act(obs, greedy, keys)
    found = training.evaluate(obs, act.forward_inputs)
    assert torch.equal(found.logprob, act.logprob)
    assert torch.equal(found.value, act.value)
