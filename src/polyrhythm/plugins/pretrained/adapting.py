"""Selects the trained part of a network: everything, its action part, adapters, or the last layers.

Patterns are `fnmatch` patterns of complete names of the network's tensors (`Architecture.parts`); tensors that do not
affect any output (`dead`) are never trained. Modules outside the network (critic, noise head) are always trained.

An adapted linear layer `X` (LoRA by peft, adapter name "default") has these names in the network's state_dict:

    X.base_layer.weight, X.base_layer.bias       the released X.weight and X.bias, frozen
    X.lora_A.default.weight [rank, inputs]       the adapter; the layer adds alpha/rank · B·A·x
    X.lora_B.default.weight [outputs, rank]

`released_name` maps them back. All other tensors keep their released names.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import BaseModel, BeforeValidator, Field
from torch import Tensor, nn

from polyrhythm.errors import ConfigError, MissingError, install_command
from polyrhythm.plugins.pretrained.building import load_into, slots_by_name, tied_names
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.folder_files import matches
from polyrhythm.plugins.pretrained.precision import Precision, cast
from polyrhythm.policies.base import SETTINGS
from polyrhythm.policies.form import Role
from polyrhythm.policies.mlp import seeded
from polyrhythm.policies.traits import PolicyTraits
from polyrhythm.specs.hashing import mix

#: What is trained of a network; see `train` of a policy's settings.
TrainedPart = Literal["all", "expert", "lora", "head"]


Item = TypeVar("Item")
#: A text; None is "", which a command line can write as null without quotes.
Named = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]
#: A tuple, from a list of YAML or JSON too.
Listed = Annotated[tuple[Item, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]


class LoraSettings(BaseModel):
    """Low-rank adapters (Hu et al. 2021) in place of training the matrices themselves."""

    model_config = SETTINGS

    rank: int = Field(32, ge=1)
    """Rank of an adapter."""
    alpha: float = Field(32.0, gt=0.0)
    """Scale of an adapter's output, divided by rank."""
    targets: Listed[str] = ()
    """Name patterns of the matrices that get adapters; empty: the architecture's choice of backbone and expert."""
    also: Listed[str] = ()
    """Name patterns of tensors that are trained in full beside the adapters, such as an action head; their modules have
    no adapters."""


#: Name of the one adapter of a layer, as peft has it by default.
ADAPTER = "default"
_BASE = ".base_layer."
_ADAPTER_PART = re.compile(r"\.lora_[AB]\.")


def released_name(name: str) -> str | None:
    """The released name of a tensor in the network's state_dict; None for a part of an adapter."""
    return None if _ADAPTER_PART.search(name) else name.replace(_BASE, ".")


def trained_names(
    names: Iterable[str], train: TrainedPart, parts: Mapping[str, Sequence[str]], dead: Sequence[str] = ()
) -> frozenset[str]:
    """Released names of the tensors that `all`, `expert` or `head` trains. ValueError: none."""
    names = list(names)
    if train == "all":
        patterns: Sequence[str] = ("*",)
    elif train in parts:
        patterns = parts[train]
    else:
        raise ValueError(f"policy.train = {train}: the network has no such part; use one of all, {_listed(parts)}")
    found = frozenset(name for name in names if matches(name, patterns) and not matches(name, dead))
    if not found:
        raise ValueError(
            f"policy.train = {train}: its patterns ({', '.join(patterns)}) match no tensor that can be trained; "
            f"use another of all, {_listed(parts)}"
        )
    return found


def adapted_layers(
    network: nn.Module, lora: LoraSettings, parts: Mapping[str, Sequence[str]], dead: Sequence[str] = ()
) -> list[str]:
    """Paths of the linear layers that receive adapters: those that match `lora.targets`, else the architecture's
    part `lora`, else all; never dead ones. ValueError: none."""
    patterns = tuple(lora.targets) or tuple(parts.get("lora", ("*",)))
    weights = {f"{path}.weight": path for path, module in network.named_modules() if isinstance(module, nn.Linear)}
    found = [path for name, path in weights.items() if matches(name, patterns) and not matches(name, dead)]
    if not found:
        raise ValueError(
            f"policy.lora.targets = {', '.join(patterns)}: matches the weight of no linear layer; "
            f"name some, such as {next(iter(weights), '*')}"
        )
    return found


def whole_tensors(
    trained: Iterable[str], adapted: Collection[str], tied: Sequence[Sequence[str]] = ()
) -> dict[str, str]:
    """Fully trained tensors beside adapters, as peft saves them: name -> its name among `trained`. trained: names;
    tensors of adapted layers are excluded. tied: groups of names that are one tensor. ConfigError: a tensor lies in a
    module that cannot be saved whole, because its layers have adapters or it is the network."""
    whole = {name: name for name in trained if name.rpartition(".")[0] not in adapted}
    for names in tied:  # peft copies each module that it saves, so a tied tensor is saved by each of its names
        whole |= {name: one for one in names if one in whole for name in names}
    for name in whole:
        module = name.rpartition(".")[0]
        inner = [layer for layer in adapted if f"{layer}.".startswith(f"{module}." if module else "")]
        if inner or not module:
            what = f"{inner[0]} in the same module has an adapter" if inner else "it is in no module of its own"
            raise ConfigError(
                f"policy.lora.also: {name} is trained in full, but {what}, and peft saves whole modules; leave it out, "
                "or choose lora.targets without that layer"
            )
    return whole


@dataclass(frozen=True, slots=True)
class Adaptation:
    """What is trained of a network, and its dtypes. Steps of a build, all of which work on the meta device: `prepare`
    the empty network, fill it from the checkpoint or the seed, `finish` it.

    parts, dead: name patterns of the architecture. checkpointing: recompute activations in the backward pass.
    """

    train: TrainedPart
    parts: Mapping[str, Sequence[str]]
    precision: Precision
    dead: tuple[str, ...] = ()
    lora: LoraSettings = field(default_factory=LoraSettings)
    checkpointing: bool = False

    def prepare(self, network: nn.Module, role: Role) -> None:
        """Set `requires_grad` and the dtype of every parameter. ValueError: nothing would be trained."""
        parameters = dict(network.named_parameters(remove_duplicate=self.train != "lora"))
        if self.train == "lora":
            for pattern in self.lora.also:
                if not any(matches(name, (pattern,)) for name in parameters):
                    raise ValueError(
                        f"policy.lora.also = {pattern}: matches no tensor of the network; correct it or leave it out"
                    )
            also = (name for name in parameters if matches(name, self.lora.also))
            trained = frozenset(name for name in also if not matches(name, self.dead))
            whole_tensors(trained, adapted_layers(network, self.lora, self.parts, self.dead), tied_names(network))
        else:
            trained = trained_names(parameters, self.train, self.parts, self.dead)
        tensors = {id(parameters[name]) for name in trained}  # a tied one has several names
        for p in parameters.values():
            p.requires_grad_(id(p) in tensors)
        cast(network, self.precision, role)

    def finish(self, network: nn.Module, role: Role, seed: int) -> None:
        """Add the adapters, drawn from `seed`, and determine the published tensors; the network is on its device."""
        if self.train == "lora":
            add_adapters(network, self.lora, adapted_layers(network, self.lora, self.parts, self.dead), seed)
            cast(network, self.precision, role)
            draw_adapters(network, seed)
        if self.checkpointing:
            set_checkpointing(network)
        trained = {name for name, p in network.named_parameters() if p.requires_grad}
        network.frozen_names = frozenset(network.state_dict().keys() - trained)  # type: ignore[assignment]


def add_adapters(network: nn.Module, lora: LoraSettings, layers: Sequence[str], seed: int) -> None:
    """Wrap the linear layers at these paths with adapters, in place. Their values are drawn later (`draw_adapters`).
    Afterwards only adapters and previously trained parameters require gradients."""
    try:
        from peft import LoraConfig, inject_adapter_in_model  # takes seconds, and only adapters need it
    except ImportError as error:
        raise MissingError(f"policy.train = lora needs peft ({error}); run: {install_command('vla')}") from error

    flags = {released_name(name): p.requires_grad for name, p in network.named_parameters()}
    paths = "|".join(map(re.escape, layers))
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=paths)
    with seeded(seed):
        inject_adapter_in_model(config, network, ADAPTER)
    for name, p in network.named_parameters():
        released = released_name(name)
        p.requires_grad_(released is None or (flags[released] and _BASE not in name))


@torch.no_grad()
def draw_adapters(network: nn.Module, seed: int, *, allocate: bool = False) -> None:
    """Initialise the adapters: B zero, so that outputs do not change; A uniform in ±1/√inputs from (seed, name),
    equal on every device and for any set of adapted layers. allocate: also allocate adapters on meta, on the host."""
    for path, module in network.named_modules():
        for name, p in module.named_parameters(prefix=path, recurse=False):
            if not _ADAPTER_PART.search(name) or (p.is_meta and not allocate):
                continue
            if p.is_meta:
                module.to_empty(device="cpu", recurse=False)
            weight = module.get_parameter("weight").zero_()
            if ".lora_A." in name:
                rng = torch.Generator().manual_seed(mix(seed, zlib.crc32(name.encode())))
                weight.copy_((torch.rand(p.shape, generator=rng) * 2.0 - 1.0) / math.sqrt(p.shape[1]))


def set_checkpointing(module: nn.Module) -> None:
    """Recompute activations in the backward pass, in all submodules with an attribute `checkpointing`. ValueError:
    there are none."""
    able = [part for part in module.modules() if hasattr(part, "checkpointing")]
    if not able:
        raise ValueError(
            "policy.gradient_checkpointing = true: no part of the network has the attribute checkpointing; set it to "
            "false"
        )
    for part in able:
        part.checkpointing = True  # type: ignore[assignment]


#: Traits of a policy around a network of which a part may be trained.
ADAPTED = PolicyTraits(publishes_part=True, shares_reference=True, loads_in_parts=True)


class AdaptedPolicy(nn.Module):
    """A policy around a `network` that may be trained in part; its other submodules and buffers are always trained.
    `published` and the reference policy follow from `Adaptation.finish`."""

    traits: PolicyTraits
    network: nn.Module
    unread: tuple[Checkpoint, dict[str, str]] | None = None
    """Where the network is built in parts, what it lacks still: the checkpoint, and name without adapters -> the
    folder's name (`fitting.fit`)."""

    def load_part(self, part: nn.Module, device: str) -> None:
        """Replace the tensors of this part of the policy that have not been read yet by copies of the checkpoint's on
        `device`, in their dtypes."""
        if self.unread is None:
            return
        checkpoint, left = self.unread
        inside = {id(held) for module in part.modules() for held in (module._parameters, module._buffers)}
        wanted = {}
        for name, slots in slots_by_name(self.network).items():
            released = released_name(name)
            if released in left and any(id(held) in inside for held, _ in slots):
                wanted[name] = left.pop(released)
        load_into(self.network, checkpoint, wanted, device=device)

    def published(self) -> dict[str, Tensor]:
        """The part of the state_dict that training may change; generators receive it, and weight files store it."""
        frozen = {f"network.{name}" for name in getattr(self.network, "frozen_names", ())}
        state: dict[str, Tensor] = self.state_dict()
        return {name: tensor for name, tensor in state.items() if name not in frozen}

    def reference_state(self) -> dict[str, Tensor]:
        """Copies of the tensors that training changes, for `as_reference`. Adapters whose B is still zero are
        omitted, because switching them off is equivalent."""
        of_b = (p for name, p in self.network.named_parameters() if ".lora_B." in name)
        fresh = not any(bool((p.full_tensor() if hasattr(p, "full_tensor") else p).any()) for p in of_b)
        return {
            name: tensor.clone()
            for name, tensor in self.published().items()
            if not (fresh and _ADAPTER_PART.search(name))
        }

    @contextmanager
    def as_reference(self, state: Mapping[str, Tensor]) -> Iterator[None]:
        """The policy as of `reference_state`'s call; frozen tensors are shared. No other thread may read the weights
        inside the context."""
        own = self.state_dict(keep_vars=True)
        adapts = any(_ADAPTER_PART.search(name) for name in state)
        held: dict[str, Tensor] = {}
        with nullcontext() if adapts else adapters_off(self.network):
            try:
                for name, tensor in state.items():
                    held[name] = _exchange(own[name], tensor)
                yield
            finally:
                for name, tensor in held.items():
                    _exchange(own[name], tensor)
                for part in self.modules():  # weights gathered from other ranks are stale now
                    if callable(reshard := getattr(part, "reshard", None)):  # an FSDPModule, which is slow to import
                        reshard()


def _exchange(own: Tensor, other: Tensor) -> Tensor:
    if not hasattr(own, "to_local"):
        held, own.data = own.data, other
        return held
    with torch.no_grad():  # sharded over ranks that gather from its memory: copy the values
        held = own.detach().clone()
        own.copy_(other)
    return held


@contextmanager
def adapters_off(network: nn.Module) -> Iterator[None]:
    """Switch the network's adapters off inside the context."""
    layers = [part for part in network.modules() if hasattr(part, "lora_A") and hasattr(part, "enable_adapters")]
    flags = [(p, p.requires_grad) for layer in layers for p in layer.parameters()]
    try:
        for layer in layers:
            layer.enable_adapters(False)  # type: ignore[operator]
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)  # type: ignore[operator]
        for p, flag in flags:
            p.requires_grad_(flag)


def _listed(parts: Mapping[str, object]) -> str:
    return ", ".join(sorted({*parts, "lora"}))
