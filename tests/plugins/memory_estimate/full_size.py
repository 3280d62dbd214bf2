"""Two updates of a full-size π0 on a CPU, by the account of torch's allocator, beside what the plan says of them.

    python -m tests.plugins.memory_estimate.full_size [section.key=value ...]

With adapters, activations recomputed, one chunk step: 8.4 GiB of memory at most and 80 s of CPU. Weights are repeated
random numbers, which are drawn in seconds.
"""

from __future__ import annotations

import sys

import torch
from tests.plugins.memory_estimate.measured import CPU, SMALL, Run, update
from torch import nn

from polyrhythm.plugins.pretrained.building import slots_by_name
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import weights_on_meta

SETTINGS = (
    *("placement=null", "devices=null", "policy.checkpoint=''", "policy.tokenizer=''", "policy.size=released"),
    *("policy.train=lora", "policy.gradient_checkpointing=true", "training.optimizer.offload=false"),
    *(*SMALL, "env.max_steps=5", "training.mini_batch_samples=1", "groups.size=1", "training.micro_batch_steps=1"),
)
_BLOCK = 2**20
_MADE: list[Policy] = []


class SharedRun(Run):
    """Generator and trainer have one module."""

    def build(self, role: object) -> Policy:
        if not _MADE:
            _MADE.append(self.fill())
        return _MADE[0]

    def fill(self) -> Policy:
        with weights_on_meta():
            policy: Policy = self.settings.outline(self.spec, role="train")
        block = 0.02 * torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0))
        for slots in slots_by_name(as_module(policy)).values():
            held, key = slots[0]
            if isinstance(held[key], nn.Parameter):
                made = torch.zeros(held[key].shape, dtype=held[key].dtype)
                for piece in made.view(-1).split(_BLOCK) if made.dim() > 1 else ():
                    piece.copy_(block[: len(piece)])
                made = nn.Parameter(made, requires_grad=held[key].requires_grad)
                for owner, name in slots:
                    owner[name] = made
        as_module(policy).eval()
        return policy


def main() -> None:
    torch.set_num_threads(1)
    found = update(SharedRun.of("metaworld_pi0_24gb", [*SETTINGS, *sys.argv[1:]], CPU))
    ratio = found.held / found.planned
    sys.stdout.write(f"update: planned {found.planned:,}, held {found.held:,}, ratio {ratio:.3f}\n")


if __name__ == "__main__":
    main()
