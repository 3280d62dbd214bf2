"""The update of `bench update` on several ranks, written out with torch's DDP or FSDP2: `bench ranks` compares with it.

The same trajectories, dealt to the same ranks, and the same mini-batches. It has what anybody would write: losses
divided by the sums of all ranks, torch's AdamW and clip_grad_norm_; no settings, metrics or padding.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from polyrhythm.plugins.ranks.collectives import share_of
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.specs import Trajectory
from polyrhythm.training.batch import minibatches
from polyrhythm_bench.cases import update
from polyrhythm_bench.cases.update import CLIP, GRAD_CLIP, LR, VALUE_COEF, Update, UpdateCase, gae


class Loss(nn.Module):
    """The loss of one rank's part of a mini-batch, times the number of ranks, by which DDP and FSDP2 divide."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = as_module(policy)

    def forward(self, obs: dict[str, Tensor], inputs: dict[str, Tensor], rest: dict[str, Tensor], by: Tensor) -> Tensor:
        found = self.policy.evaluate(obs, inputs)  # type: ignore[operator]
        ratio, a = (found.logprob - rest["proximal"]).exp(), rest["advantage"].view(-1, 1, 1)
        loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - CLIP, 1 + CLIP))
        total = (rest["mask"] * rest["weight"] * loss).sum() / by[0]
        total = total + VALUE_COEF * 0.5 * (found.value - rest["returns"]).square().sum() / by[1]
        return total * dist.get_world_size()  # type: ignore[no-any-return]


def by_hand(policy: Policy, case: UpdateCase, strategy: str) -> Update:
    """The update on this rank of torch's default group."""
    module, rank, ranks = as_module(policy), dist.get_rank(), dist.get_world_size()
    step: nn.Module = Loss(policy)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # nothing here changes views in place
    if strategy == "shard":
        mesh = init_device_mesh("cpu", (ranks,))
        for block in _blocks(module):
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        for method in ("evaluate", "value"):
            register_fsdp_forward_method(module, method)
    else:
        step = DistributedDataParallel(step)
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.0, fused=True)

    def run(trajectories: Sequence[Trajectory]) -> None:
        share = share_of([t.group for t in trajectories], [t.steps for t in trajectories], rank, ranks)
        own = [trajectories[i] for i in share.own]
        obs = {n: _packed([t.obs[n][:-1] for t in own]) for n in own[0].obs}
        last = {n: torch.from_numpy(np.stack([t.obs[n][-1] for t in own])) for n in own[0].obs}
        inputs = {n: _packed([t.forward_inputs[n] for t in own]) for n in own[0].forward_inputs}
        behavior = _packed([t.logprob for t in own])
        with torch.no_grad():
            ends = policy.value(last) * torch.tensor([t.truncated for t in own])
            proximal = update.in_pieces(policy, obs, inputs, case.minibatch)
        advantage, returns = gae(own, ends.tolist())
        rest = {
            "mask": _packed([t.valid for t in own]).float().unsqueeze(-1).expand_as(behavior),
            "weight": (proximal - behavior).exp(),
            "proximal": proximal,
            "advantage": _whitened(advantage),
            "returns": returns,
        }
        for epoch in range(case.epochs):
            for index in minibatches(share.counts, case.minibatch, (0, 0, epoch)):
                rows, _ = share.pick(index)
                picked = {n: x[rows] for n, x in rest.items()}
                by = torch.stack([picked["mask"].sum(), torch.tensor(float(len(rows)))])
                dist.all_reduce(by)
                total = step({n: x[rows] for n, x in obs.items()}, {n: x[rows] for n, x in inputs.items()}, picked, by)
                optimizer.zero_grad()
                total.backward()
                torch.nn.utils.clip_grad_norm_(parameters, GRAD_CLIP)
                optimizer.step()

    return run


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Transformer layers: members of module lists that hold modules themselves."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) > 1]
    return [block for part in lists for block in part if any(True for _ in block.children())]


def _whitened(x: Tensor) -> Tensor:
    sums = torch.stack([x.sum(), torch.tensor(float(len(x)))])
    dist.all_reduce(sums)
    centred = x - sums[0] / sums[1]
    squares = centred.square().sum()
    dist.all_reduce(squares)
    return centred / ((squares / sums[1]).sqrt() + 1e-8)


def _packed(arrays: Sequence[Any]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))
