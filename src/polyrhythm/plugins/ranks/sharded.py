"""Sharded ranks: each has a part of every tensor, with FSDP2, block by block, and once for the rest.

Where several hosts have equally many ranks each, more than one, the ranks of a host share the tensors among them, and
each host has them all (HSDP): within a step only sums of gradients cross hosts. Otherwise all ranks share them.

A block's weights are whole on a rank only while it computes. Blocks are the repeated layers of a policy: modules in a
`ModuleList` of at least two of one class that contain modules themselves. A policy may name others (`blocks`). Methods
of a block other than `forward` that use its weights must be listed in its class's `forward_methods`; for the policy
these are `POLICY_METHODS`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from polyrhythm.config.sections.placement import ShardSettings
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.ranks import hosts_of_replicas
from polyrhythm.plugins.ranks.collectives import CONNECT_S, ProcessRanks, add_bit_sums
from polyrhythm.plugins.ranks.rendezvous import left
from polyrhythm.plugins.ranks.shards import is_sharded, join, part_of, piece_of, save_folder, shard_of
from polyrhythm.policies.base import extended
from polyrhythm.policies.constants import FIX, plain_tensors
from polyrhythm.policies.traits import policy_traits
from polyrhythm.training.checkpoint import Saving
from polyrhythm.training.ranks import Meeting, Piece

#: Methods of a policy in which its own weights, those outside of blocks, are whole.
POLICY_METHODS = ("evaluate", "value", "late_values", "precompute", "act", "sft_loss")
#: Layers that compute in the policy's dtype whatever their weights' (`plugins.pretrained.precision`).
_COMPUTE_IN_DTYPE = (nn.Linear, nn.Conv2d, nn.Embedding)


class ShardedRanks(ProcessRanks):
    """See `training.ranks.Ranks`."""

    divides = True
    _first = _whole_ones = False  # whether this rank writes its rows, and the tensors that are not sharded
    replicas = 1

    def connect(self, meeting: Meeting) -> Sequence[ProcessGroup]:
        """mesh: of the ranks' devices, (shards) or (replicas, shards); host_mesh: the same for gathers in host memory,
        None if ranks are on devices of their own."""
        hosts = hosts_of_replicas(meeting.hosts, self.settings)
        self.host_mesh = None
        if not hosts:
            everyone = dist.group.WORLD
            assert everyone is not None
            self.mesh = DeviceMesh.from_group(everyone, self.device.type)
            if self.own_device is None:
                self.host_mesh = DeviceMesh.from_group(self.host_group, "cpu")
            return ()
        self.replicas = len(hosts)
        shards, _ = dist.new_subgroups_by_enumeration(hosts, timeout=left(meeting, CONNECT_S))
        replicas, _ = dist.new_subgroups_by_enumeration(
            [list(same) for same in zip(*hosts, strict=True)], timeout=left(meeting, CONNECT_S)
        )
        groups, names = [replicas, shards], ("replicas", "shards")
        self.mesh = DeviceMesh.from_group(groups, self.device.type, mesh=hosts, mesh_dim_names=names)
        if self.own_device is None:
            self.host_mesh = DeviceMesh.from_group(groups, "cpu", mesh=hosts, mesh_dim_names=names)
        return groups

    def wrap(self, step: nn.Module) -> nn.Module:
        sums: dict[str, int] = {}
        assert isinstance(step.policy, nn.Module)
        self._shard(step.policy, sums)
        self.check_equal(sums)
        return step

    def shard(self, policy: nn.Module) -> None:
        self._shard(policy, None)

    def _shard(self, policy: nn.Module, sums: dict[str, int] | None) -> None:
        """sums: for a policy that will be trained, filled by `add_bit_sums`."""

        def read(part: nn.Module) -> None:
            if policy_traits(policy).loads_in_parts:
                extended(policy).load_part(part, str(self.device))
            check_read(policy, part)
            if sums is not None:
                add_bit_sums(policy, part, sums)

        shard_policy(policy, self.mesh, self.settings, trained=sums is not None, before=read)

    def reducing(self, wrapped: nn.Module, *, last: bool, counts: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()  # shards of gradients are summed in every micro-step: whole ones would not fit

    def part(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        return part_of(x, like)

    def parts(self, tensors: list[Tensor]) -> list[Tensor]:
        return [part_of(x) for x in tensors]

    def join(self, part: Tensor, like: Tensor) -> Tensor:
        return join(part, like)

    def norms(self, each: Tensor) -> Tensor:
        squares = each.to(torch.promote_types(each.dtype, torch.float32)).square()
        return (self.total(squares) / self.replicas).sqrt()  # over all ranks, so that replicas clip by the same bits

    def snapshot(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, x in state.items():
            yield name, self._whole(x) if is_sharded(x) else x

    def _whole(self, x: Any) -> Tensor:
        """The whole tensor. Gloo gathers in host memory: given shards on a device it ends the process (torch 2.11)."""
        if self.host_mesh is None:
            whole: Tensor = x.full_tensor()
            return whole
        own = x.to_local().to("cpu")
        placed = DTensor.from_local(own, self.host_mesh, x.placements, shape=x.shape, stride=x.stride())
        return placed.full_tensor()

    def divide_writing(self, state: Mapping[str, Tensor], memory: str) -> bool:
        index, count = max((shard_of(x) for x in state.values()), key=lambda found: found[1], default=(0, 1))
        found = self.gather([memory, index, count])
        there, _, shards = found[0]
        own = [(rank, shard) for rank, (where, shard, _) in enumerate(found) if where == there != ""]
        writers = {shard: rank for rank, shard in reversed(own)}
        self._first, self._whole_ones = writers.get(index) == self.rank and memory == there, self.rank == 0
        return set(writers) == set(range(shards))

    def pieces(self, state: Mapping[str, Tensor]) -> list[Piece]:
        return [
            piece_of(name, x)
            for name, x in state.items()
            if (self._first if is_sharded(x) and shard_of(x)[1] > 1 else self._whole_ones)
        ]

    def save(self, state: Mapping[str, Any], path: Path, *, background: bool = False) -> Saving:  # noqa: ARG002
        return save_folder(state, path, self.rank, self.background)


def shard_policy(
    policy: nn.Module,
    mesh: DeviceMesh,
    settings: ShardSettings | None = None,
    *,
    trained: bool = True,
    before: Callable[[nn.Module], None] = lambda _: None,
) -> None:
    """Replace the parameters by their shards on the mesh's device, in place, so that one block at a time is whole
    there.

    trained: backward passes follow; they drop the weights outside of blocks, which a forward pass leaves whole for
    them. before: called with each block and then the policy, before it is sharded; it may read tensors that are still
    on meta. ConfigError: a tensor cannot be sharded, or stays unsharded.
    """
    settings = settings or ShardSettings()
    for name, p in policy.named_parameters():
        if p.dim() == 0:
            raise ConfigError(
                f"placement.trainer.strategy = shard: {name} has no dimension; use replicate, or give it one"
            )
    pinned = mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if settings.cpu_offload else OffloadPolicy()
    own_dtype = getattr(torch, policy_traits(policy).dtype)
    for module in (*blocks_of(policy), policy):
        _check_one_dtype(policy, module)
        before(module)
        if module is policy or type(module).__module__.startswith("polyrhythm."):
            # Torch warns of views that are returned, as they must not be changed in place; here none is.
            warnings.filterwarnings("ignore", rf"FSDP2-wrapped module \(FSDP{type(module).__name__}\) returned a view")
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=settings.reshard and module is not policy if trained else True,
            mp_policy=_precision(module, own_dtype),
            offload_policy=offload,
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)  # sums, as losses are divided by the normaliser of all ranks
        module.set_force_sum_reduction_for_comms(True)
        for name in POLICY_METHODS if module is policy else getattr(module, "forward_methods", ()):
            if hasattr(module, name):
                register_fsdp_forward_method(module, name)
    _check_moved(policy, mesh.device_type)


def check_read(policy: nn.Module, part: nn.Module) -> None:
    """ConfigError: a tensor in this part of the policy is still on the meta device."""
    here = {id(x) for x in (*part.parameters(), *part.buffers()) if x.is_meta}
    for name, x in (*policy.named_parameters(), *policy.named_buffers()) if here else ():
        if id(x) in here:
            raise ConfigError(
                f"policy: {name} has no value when it is to be divided among the ranks; read it in load_part, or give "
                "it one in build_in_parts"
            )


def _check_moved(policy: nn.Module, device_type: str) -> None:
    for path, x in plain_tensors(policy).items():
        if x.device.type != device_type:
            raise ConfigError(
                f"policy: {path} is a tensor on {x.device.type}, but neither parameter nor buffer, so it stays there "
                f"while the policy goes to {device_type}; {FIX}"
            )


def blocks_of(policy: nn.Module) -> list[nn.Module]:
    """The modules whose weights are gathered one after another; none is inside another."""
    found = list(extended(policy).blocks() if policy_traits(policy).names_blocks else _repeated(policy))
    inner = {id(part) for block in found for part in block.modules() if part is not block}
    return [block for block in found if id(block) not in inner]


def _repeated(policy: nn.Module) -> Iterator[nn.Module]:
    for module in policy.modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2 or len({type(part) for part in module}) > 1:
            continue
        for part in module:
            if any(True for _ in part.children()) and any(True for _ in part.parameters()):
                yield part


def _precision(module: nn.Module, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Weights are gathered in the policy's dtype if a block uses all of them in it; gradients are summed in float32."""
    parts = [part for part in module.modules() if any(True for _ in part.parameters(recurse=False))]
    rounded = dtype != torch.float32 and all(type(part) in _COMPUTE_IN_DTYPE for part in parts)
    reduce = torch.float32 if any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters()) else None
    if rounded:
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    return MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)


def _check_one_dtype(policy: nn.Module, module: nn.Module) -> None:
    dtypes = {p.dtype for p in module.parameters() if p.requires_grad and not hasattr(p, "to_local")}
    if len(dtypes) > 1:
        kinds = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        what = "the policy" if module is policy else type(module).__name__
        raise ConfigError(
            f"placement.trainer.strategy = shard: trained tensors of {what} are {kinds}; set policy.master = float32"
        )
