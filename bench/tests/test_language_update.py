"""The update of a language model, packed and padded, is the same update."""

from __future__ import annotations

import torch

from polyrhythm.plugins.language.causal_lm.policy import CausalLmSettings
from polyrhythm_bench.cases import language_update
from polyrhythm_bench.cases.language_update import Padded


def test_padded_and_packed_compute_the_same_numbers():
    options = language_update.arguments().parse_args(["--rows", "6", "--longest", "64", "--vocabulary", "50"])
    spec = language_update.spec_of(options)
    section = CausalLmSettings(layers=1, width=32, heads=2)
    packed = section.build(spec, seed=0, device="cpu", role="train")
    padded = Padded(section, spec, packed.network)
    batch = language_update.samples(options)
    obs = {name: torch.stack([torch.from_numpy(x.obs[name][:1].copy()) for x in batch])[:, 0] for name in batch[0].obs}
    inputs = {"message": torch.stack([torch.from_numpy(x.forward_inputs["message"]) for x in batch])[:, 0]}
    ours, theirs = packed.evaluate(obs, inputs), padded.evaluate(obs, inputs)
    assert ours.logprob.abs().max() > 1
    torch.testing.assert_close(ours.logprob, theirs.logprob, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.entropy, theirs.entropy, atol=1e-4, rtol=0)
