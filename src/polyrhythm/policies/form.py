"""The form of a policy, declared before any weight exists: shapes, dtypes and sizes.

Arena, weights channel, batch buffers and memory estimates are made from a form, in processes that never build the
policy. `polyrhythm check` compares a form with the built module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyrhythm.policies.traits import PolicyTraits, policy_traits
from polyrhythm.specs import ArraySpec, WeightSpec
from polyrhythm.specs.weights import weight_specs

T = TypeVar("T")
Role = Literal["act", "train"]
ValueKind = Literal["chunk", "action"]


@dataclass(frozen=True, slots=True)
class PolicyForm:
    """Declared form of a policy for one environment.

    chunk: C, primitive actions per forward pass. action_dim: A. value: one value per chunk ([B]) or action ([B,C]).
    answers: name → spec of one row of `Act.forward_inputs`; bfloat16 is declared (and stored) as float32. published:
    name → tensor that generators receive from the trainer, in the generators' dtype. parameters, trainable: numbers of
    entries. act_bytes, train_bytes: parameters and buffers of the module by role. trainable_bytes: part of train_bytes
    that an optimizer changes. block_bytes: largest unit that sharded ranks gather whole (a member of a module list, or
    everything outside of these); 0: not declared. row_tokens: tokens of the longest row in training; 0: rows have equal
    length (`traits.counts_tokens`). row_cache: bytes of keys and values that a streaming generator keeps for each
    running row. engine: purpose → bytes of an engine with other caches, independent of running rows; None: it keeps
    `row_cache`. traits: optional abilities.
    """

    chunk: int
    action_dim: int
    value: ValueKind
    answers: Mapping[str, ArraySpec]
    published: Mapping[str, WeightSpec]
    parameters: int
    trainable: int
    act_bytes: int
    train_bytes: int
    trainable_bytes: int
    block_bytes: int = 0
    row_tokens: int = 0
    row_cache: int = 0
    engine: Mapping[str, int] | None = None
    traits: PolicyTraits = field(default_factory=PolicyTraits)


#: Methods that overwrite a tensor's values and keep its shape.
_FILLS = "normal uniform bernoulli exponential log_normal random erfinv clamp zero fill copy add sub mul div"
_FILLING = frozenset(getattr(Tensor, f"{name}_") for name in _FILLS.split())


def _filled(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The meta tensor that this call only fills, None for other calls."""
    first = args[0] if args else kwargs.get("tensor")  # by name in torch.nn.init
    fills = func in _FILLING or getattr(func, "__module__", "") == "torch.nn.init"
    return first if fills and isinstance(first, Tensor) and first.is_meta else None


#: Binary elementwise operations whose result has the operands' type, a float type, or bool.
_SAME = frozenset(
    getattr(Tensor, name)
    for name in ("add", "sub", "mul", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__")
)
_FLOAT = frozenset(getattr(Tensor, name) for name in ("div", "__truediv__", "__rtruediv__"))
_BOOL = frozenset(getattr(Tensor, name) for name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "ne"))


def _empty(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


#: Factory functions of tensors, by shape arguments.
_FACTORIES: dict[Any, Callable[..., Tensor]] = {
    torch.rand: _empty,
    torch.randn: _empty,
    torch.linspace: lambda _start, _end, steps: _empty(steps),
    torch.arange: lambda *ends: _empty(len(range(*ends)), dtype=torch.int64),
}
#: Factories that draw on the host even with a default device, or whose meta kernels are slow.
_SLOW = frozenset((torch.normal, torch.randint, torch.eye))


class _ShapesOnly(TorchFunctionMode):
    """Runs the arithmetic of constructors on the meta device, by shapes and dtypes alone.

    Torch's own meta kernels give the same results, but the first call of one imports the compiler, which takes 2 to 9
    s. Other operations still work, only slower.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (filled := _filled(func, args, kwargs)) is not None:
            return filled
        if not kwargs and func in _SAME | _FLOAT | _BOOL and all(not isinstance(x, Tensor) or x.is_meta for x in args):
            return _elementwise(func, *args)
        if func is torch.stack and _is_plain_stack(args, kwargs):
            return _stacked(*args, **kwargs)
        if func in _FACTORIES and not kwargs and _takes(func, args):
            return _FACTORIES[func](*args)
        if func in _SLOW and (shape := _shape(func, args, kwargs)) is not None:
            return _empty(*shape, dtype=kwargs.get("dtype", torch.int64 if func is torch.randint else None))
        return func(*args, **kwargs)


def _shape(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[int] | None:
    """Shape that a call of a function of `_SLOW` gives; None if torch itself has to see its arguments."""
    if not kwargs.keys() <= {"mean", "std", "low", "high", "size", "dtype", "generator"}:
        return None
    if func is torch.eye:
        return (args * 2)[:2] or None
    shape = kwargs.get("size", args[-1] if args else None)
    return shape if isinstance(shape, (tuple, list)) else None


def _takes(func: Any, args: tuple[Any, ...]) -> bool:
    kinds = (int, float) if func is torch.linspace else (int,)
    return all(type(x) in kinds for x in args) and (func is not torch.linspace or len(args) == 3)


def _elementwise(func: Any, left: Tensor, right: Any) -> Tensor:
    shape = np.broadcast_shapes(left.shape, right.shape if isinstance(right, Tensor) else ())
    dtype = torch.bool if func in _BOOL else torch.result_type(left, right)
    if func in _FLOAT and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    return torch.empty(shape, dtype=dtype, device="meta")


def _is_plain_stack(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    alike = bool(args) and len({(x.dtype, x.is_meta) for x in args[0]}) == 1
    return alike and args[0][0].is_meta and kwargs.keys() <= {"dim"}


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return torch.empty(shape, dtype=tensors[0].dtype, device="meta")


def outlined(make: Callable[[], T]) -> T:
    """Build `make()` on torch's meta device, by shapes and dtypes alone: without memory, in milliseconds at any size;
    random state is unchanged."""
    with torch.device("meta"), _ShapesOnly(), torch.random.fork_rng(devices=[]):
        return make()


#: Factories whose values no constructor relies on: they are overwritten, or drawn.
_DRAWN = frozenset((torch.empty, torch.rand, torch.randn))
#: Factories of one repeated value: weights if they are large, constants if not.
_REPEATED = frozenset((torch.zeros, torch.ones))
_LARGE = 1 << 16


class _WeightsOnMeta(TorchFunctionMode):
    """Creates a constructor's weights on the meta device, large zeros and ones included; computes everything else
    normally.

    Weights take neither memory nor time, while constants made from numbers (frequencies, tables, scales) have their
    values, in the state_dict or not.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWN or func in _REPEATED:
            shape = kwargs.get("size", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
            if func in _DRAWN or prod(shape) > _LARGE:
                return torch.empty(tuple(shape), dtype=kwargs.get("dtype"), device="meta")
        filled = _filled(func, args, kwargs)
        return func(*args, **kwargs) if filled is None else filled


@contextmanager
def weights_on_meta() -> Iterator[None]:
    """Context in which modules are built without memory for weights, but with real constants, to be filled from a
    checkpoint; random state is unchanged."""
    with torch.random.fork_rng(devices=[]), _WeightsOnMeta():
        yield


def describe(
    make: Callable[[Role], nn.Module], answers: Mapping[str, ArraySpec], value: ValueKind = "chunk"
) -> PolicyForm:
    """Form of the modules that `make` builds for each role. `make` runs in `outlined`. The form publishes
    `published_state` of the acting module. ValueError: `make` needs the values of a tensor."""
    try:
        acting, training = outlined(lambda: make("act")), outlined(lambda: make("train"))
    except (NotImplementedError, RuntimeError, TypeError) as error:
        if "meta" not in str(error):
            raise
        raise ValueError(
            f"form(): the policy's constructor reads values of tensors ({str(error).splitlines()[0]}); "
            "compute them with plain Python or numpy"
        ) from error
    trainable = [p for p in training.parameters() if p.requires_grad]
    return PolicyForm(
        chunk=int(acting.chunk),  # type: ignore[arg-type]
        action_dim=int(acting.action_dim),  # type: ignore[arg-type]
        value=value,
        answers=dict(answers),
        published=weight_specs(published_state(acting)),
        parameters=sum(p.numel() for p in training.parameters()),
        trainable=sum(p.numel() for p in trainable),
        act_bytes=module_bytes(acting),
        train_bytes=module_bytes(training),
        trainable_bytes=sum(p.nbytes for p in trainable),
        block_bytes=largest_block(training),
        traits=policy_traits(training),
    )


def published_state(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that generators receive and weight files hold: `published()` of a policy that has it, else the
    state_dict."""
    state: dict[str, Tensor] = module.state_dict()
    return (
        cast("Callable[[], dict[str, Tensor]]", module.published)() if policy_traits(module).publishes_part else state
    )


@torch.no_grad()
def load_published(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Overwrite the tensors of `published_state` in place. ValueError: names or shapes differ; then nothing is
    changed."""
    own = published_state(module)
    if odd := sorted(own.keys() ^ state.keys()):
        raise ValueError(f"weights do not fit the policy: {odd[0]} (and {len(odd) - 1} more) is on one side only")
    for name, tensor in state.items():
        if own[name].shape != tensor.shape:
            raise ValueError(
                f"weights do not fit the policy: {name} is {tuple(tensor.shape)}, it should be {tuple(own[name].shape)}"
            )
    for name, tensor in state.items():
        own[name].copy_(tensor)


def module_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(x.nbytes for x in (*module.parameters(), *module.buffers()))


def largest_block(module: nn.Module) -> int:
    """Bytes of the largest member of any module list, or of all parameters and buffers outside of these if that is
    more."""
    blocks = [block for part in module.modules() if isinstance(part, nn.ModuleList) for block in part]
    inner = {id(x) for block in blocks for x in (*block.parameters(), *block.buffers())}
    rest = sum(x.nbytes for x in (*module.parameters(), *module.buffers()) if id(x) not in inner)
    return max([rest, *map(module_bytes, blocks)])
