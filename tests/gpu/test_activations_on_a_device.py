"""What an update and a pass hold by torch's allocator on a device, beside what the plan says of them."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.plugins.memory_estimate.measured import SMALL, Run, act, update
from tests.plugins.memory_estimate.test_held import ACCURACY, EXPERT, LORA

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["policy={type: pi0, chunk: 2}"],
        [f"policy={EXPERT}", "training.optimizer.offload=true"],
        [f"policy={EXPERT}", "training.precomputed_mib=0", "algorithm.kl.coef=0.1"],
        [f"policy={LORA}", "training.optimizer.offload=true"],
        ["policy={type: pi05, chunk: 2, gradient_checkpointing: true}"],
        ["policy={type: openvla_oft, chunk: 2}"],
        ["policy={type: groot_n1d5, chunk: 2}"],
    ],
)
def test_the_allocator_gives_what_is_planned(settings: list[str], cuda: torch.device) -> None:
    run = Run.of("quickstart", [*SMALL, *settings, "placement=colocated"], cuda)
    for measure in (update, act):
        measure(run)  # libraries allocate their workspaces
        gc.collect()
        found = measure(run)
        assert found.held == pytest.approx(found.planned, rel=ACCURACY)
