"""Several ranks, each a process of its own, over torch.distributed. Imported only where there are several."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from polyrhythm.errors import ConfigError
from polyrhythm.policies.base import extended
from polyrhythm.policies.traits import policy_traits
from polyrhythm.training.ranks import Strategy, is_sharded
from polyrhythm.training.replicas import ReplicatedStep, sum_bucket

if TYPE_CHECKING:
    from polyrhythm.config.sections.placement import ShardSettings

#: Supervision ends a rank that waits too long; a collective of its own accord only after this.
_DEADLINE = timedelta(days=7)
#: Environment variables by which gloo and NCCL choose the network interface of ranks on one host.
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
#: What tells DDP to leave buffers alone: torch 2.13 has renamed it.
_SYNCS_BUFFERS = "forward_sync_buffers"
if _SYNCS_BUFFERS not in signature(DistributedDataParallel).parameters:
    _SYNCS_BUFFERS = "broadcast_buffers"


class ProcessRanks:
    """See `ranks.Ranks` and `ranks.open_ranks`."""

    def __init__(
        self, rank: int, size: int, store: Path, device: str, strategy: Strategy, shard: ShardSettings | None
    ) -> None:
        self.rank, self.size, self.strategy = rank, size, strategy
        self.device, self._settings = torch.device(device), shard
        self._replicated: ReplicatedStep | None = None
        files = FileStore(str(store), size)
        files.set_timeout(_DEADLINE)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with _loopback():
            backend = _backend(files, rank, size, self.device)
            # NCCL connects at its first collective unless it is told its device now, while the interface is set.
            own = self.device if "nccl" in backend else None
            dist.init_process_group(backend, store=files, rank=rank, world_size=size, timeout=_DEADLINE, device_id=own)
            self._host = dist.new_group(backend="gloo", timeout=_DEADLINE)
            self._host_mesh = DeviceMesh.from_group(self._host, "cpu") if own is None else None
            self.background = dist.new_group(backend="gloo", timeout=_DEADLINE)

    def total(self, x: Tensor) -> Tensor:
        summed = x.detach().clone()
        dist.all_reduce(summed, group=self._host if summed.is_cpu else None)
        return summed

    def totals(self, numbers: Sequence[float]) -> Sequence[float]:
        return self.total(torch.tensor(numbers, dtype=torch.float64)).tolist()

    def most(self, count: int) -> int:
        largest = torch.tensor(count)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._host)
        return int(largest)

    def gather(self, item: Any) -> list[Any]:
        text = json.dumps(item).encode()
        room = self.most(len(text))
        own = torch.frombuffer(bytearray(text.ljust(room)), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self._host)
        return [json.loads(bytes(x.tolist())) for x in found]

    def wrap(self, step: nn.Module) -> nn.Module:
        policy = step.policy
        assert isinstance(policy, nn.Module)
        sums: dict[str, int] = {}
        if self.strategy == "shard":
            self._shard(policy, sums)
            self._check_equal(sums)
            return step
        _add_bit_sums(policy, policy, sums)
        self._check_equal(sums)
        self._replicated = ReplicatedStep(step)
        wrapped = DistributedDataParallel(
            self._replicated,
            gradient_as_bucket_view=True,
            init_sync=False,
            **{_SYNCS_BUFFERS: False},  # type: ignore[arg-type]
        )
        wrapped.register_comm_hook(self._replicated, sum_bucket)
        return wrapped

    def shard(self, policy: nn.Module) -> None:
        if self.strategy == "shard":
            self._shard(policy)

    def _shard(self, policy: nn.Module, sums: dict[str, int] | None = None) -> None:
        """sums: of a policy that will be trained, to be filled by `_add_bit_sums`."""
        from polyrhythm.training.sharding import check_read, shard_policy

        everyone = dist.group.WORLD
        assert everyone is not None
        mesh = DeviceMesh.from_group(everyone, self.device.type)

        def read(part: nn.Module) -> None:
            if policy_traits(policy).loads_in_parts:
                extended(policy).load_part(part, str(self.device))
            check_read(policy, part)
            if sums is not None:
                _add_bit_sums(policy, part, sums)

        shard_policy(policy, mesh, self._settings, trained=sums is not None, before=read)

    @contextmanager
    def reducing(self, wrapped: nn.Module, *, last: bool, counts: bool) -> Iterator[None]:
        if not isinstance(wrapped, DistributedDataParallel):
            yield  # shards of gradients are summed in every micro-step: whole ones would not fit
            return
        with wrapped.module.reducing(last=last, counts=counts), nullcontext() if last else wrapped.no_sync():
            yield

    def norms(self, each: Tensor) -> Tensor:
        if self.strategy != "shard":
            return each
        return self.total(each.to(torch.promote_types(each.dtype, torch.float32)).square()).sqrt()

    def snapshot(self, state: Mapping[str, Tensor], names: Iterable[str] = ()) -> Iterator[tuple[str, Tensor]]:
        for name in tuple(names) or state:
            x = state[name]
            yield name, self._whole(x) if is_sharded(x) else x

    def _whole(self, x: Any) -> Tensor:
        """A sharded tensor as one. Gloo gathers it in host memory, where its messages lie anyway: given the shards of a
        device it ends the process (torch 2.11)."""
        if self._host_mesh is None:
            whole: Tensor = x.full_tensor()
            return whole
        from torch.distributed.tensor import DTensor

        own = x.to_local().to("cpu")
        placed = DTensor.from_local(own, self._host_mesh, x.placements, shape=x.shape, stride=x.stride())
        return placed.full_tensor()

    def buffers(self) -> list[Tensor]:
        return [] if self._replicated is None else list(self._replicated.buckets)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def divides(self) -> bool:
        return self.strategy == "shard"

    def _check_equal(self, sums: dict[str, int]) -> None:
        """ConfigError unless all ranks have the same weights, by integer sums of their bits: no order changes these."""
        names = list(sums)
        found = self.gather([names, list(sums.values())])
        for rank, (other_names, others) in enumerate(found):
            if other_names != found[0][0]:
                raise ConfigError(
                    f"policy: rank {rank} built other tensors than rank 0; build it from the settings alone"
                )
            for name, a, b in zip(names, found[0][1], others, strict=True):
                if a != b:
                    raise ConfigError(
                        f"policy: rank {rank} built another {name} than rank 0; draw it from the seed alone"
                    )


def _add_bit_sums(policy: nn.Module, part: nn.Module, sums: dict[str, int]) -> None:
    """Add those of the parameters within a part of the policy that are whole still, by their names in the policy."""
    own = {id(p) for p in part.parameters()}
    for name, p in policy.named_parameters():
        if id(p) in own and not is_sharded(p):
            sums[name] = _bit_sum(p.detach())


def _bit_sum(x: Tensor) -> int:
    bits = x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    return int(bits.sum(dtype=torch.int64))


def _backend(store: FileStore, rank: int, size: int, device: torch.device) -> str:
    """NCCL for device tensors needs a GPU for each rank."""
    if device.type != "cuda":
        return "gloo"
    store.set(f"gpu/{rank}", str(torch.cuda.get_device_properties(device).uuid))
    gpus = {bytes(store.get(f"gpu/{other}")) for other in range(size)}
    return "cpu:gloo,cuda:nccl" if len(gpus) == size else "cpu:gloo,cuda:gloo"


@contextmanager
def _loopback() -> Iterator[None]:
    """Connections within it use the loopback interface, unless the user has chosen one."""
    added = [name for name in _INTERFACES if name not in os.environ]
    os.environ.update(dict.fromkeys(added, "lo"))
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
