"""What an update and a pass hold by torch's allocator on a device, beside what the plan says of them."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.plugins.memory_estimate.measured import SMALL, Run, act, update
from tests.plugins.memory_estimate.test_held import ACCURACY, EXPERT, LORA

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("cartpole", ["policy.hidden=256", "rollout.segment_steps=16"]),
        ("reach", ["policy.hidden=256"]),
        ("quickstart_lm", ["groups.size=2"]),
        ("quickstart", []),
        ("quickstart", ["policy={type: pi0, chunk: 2}"]),
        ("quickstart", [f"policy={EXPERT}", "training.optimizer.offload=true"]),
        ("quickstart", [f"policy={EXPERT}", "training.precomputed_mib=0", "algorithm.kl.coef=0.1"]),
        ("quickstart", [f"policy={LORA}", "training.optimizer.offload=true"]),
        ("quickstart", ["policy={type: pi05, chunk: 2, gradient_checkpointing: true}"]),
        ("quickstart", ["policy={type: openvla_oft, chunk: 2}"]),
        ("quickstart", ["policy={type: groot_n1d5, chunk: 2}"]),
    ],
)
def test_the_allocator_gives_what_is_planned(recipe: str, settings: list[str], cuda: torch.device) -> None:
    run = Run.of(recipe, [*SMALL, *settings, "placement=colocated"], cuda)
    for measure in (update, act):
        measure(run)  # libraries allocate their workspaces
        gc.collect()
        found = measure(run)
        assert found.held == pytest.approx(found.planned, rel=ACCURACY)
