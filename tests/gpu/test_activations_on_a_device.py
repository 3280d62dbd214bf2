"""Estimated bytes of a pass beside what torch's allocator gives on a device."""

from __future__ import annotations

import pytest
import torch
from tests.plugins.memory_estimate.micro_batch import parts, zeros

from polyrhythm.pipeline.array_specs import shown
from polyrhythm.plugins.memory_estimate.activations import Activations, estimate_activations
from polyrhythm.policies.base import as_module

pytestmark = pytest.mark.gpu
#: The estimate is of the CPU's kernels; a device's may keep other tensors and allocate workspaces.
FACTOR = 1.5


@pytest.mark.parametrize("policy", ["{type: tiny_vla}", "{type: pi0}", "{type: openvla_oft}", "{type: groot_n1d5}"])
def test_the_allocator_gives_what_is_estimated(policy: str, cuda: torch.device) -> None:
    rows = 200
    settings, spec, form = parts(policy)
    found = estimate_activations(settings, spec, form)
    assert isinstance(found, Activations)
    made = settings.build(spec, seed=0, device=str(cuda), role="train")
    module = as_module(made).eval()
    obs = {name: x.to(cuda) for name, x in zeros(dict(shown(spec)), rows).items()}
    answers = {name: x.to(cuda) for name, x in zeros(dict(form.answers), rows).items()}

    def once() -> None:
        result = made.evaluate(obs, answers)
        (result.logprob.sum() + result.value.sum() + result.entropy.sum()).backward()
        module.zero_grad()

    once()  # libraries allocate their workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    once()
    held = torch.cuda.max_memory_allocated() - before
    estimate = found.training(rows) + form.trainable_bytes
    assert estimate / FACTOR < held < estimate * FACTOR
