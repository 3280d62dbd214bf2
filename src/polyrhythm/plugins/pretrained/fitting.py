"""Declares a released architecture, and compares a folder with it: size, and tensors by name and shape.

Reads no tensor. Each network module defines one `Architecture` per released form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any

from torch import nn

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.folder_files import matches
from polyrhythm.readable import counted, few
from polyrhythm.specs import WeightSpec
from polyrhythm.specs.weights import weight_specs


@dataclass(frozen=True, slots=True)
class Architecture:
    """One published architecture. All patterns are `fnmatch` patterns of complete names of the network's tensors.

    name: the policy's type.
    size: maps (config.json, the folder's tensors by the network's names) to the size of the network; tensor shapes take
    precedence over config.json. ValueError: they are inconsistent.
    network: maps a size to an `nn.Module` whose state_dict has the released names and which can be built on the meta
    device. Its `initialise()`, if any, draws the parameters of a network without a checkpoint.
    aliases: name in some folders -> the network's name of the same tensor (tied embeddings). If a folder has both, the
    network's name is read, and saving writes both.
    optional: tensors of torch's own layers that a folder may lack; they are drawn from the seed (an unused released
    head).
    unused: tensors of a folder that the network lacks and that are not reported as unexpected, such as the value and
    noise heads of RLinf's PPO checkpoints; saving copies them.
    parts: `train` -> patterns of the tensors that it trains; `lora` -> patterns of adapted matrices.
    dead: tensors that do not affect any output; never trained.
    float32: tensors that the release keeps in float32 whatever the backbone's dtype.
    config: maps a size to a config.json that `size` reads back, for a network without a folder.
    """

    name: str
    size: Callable[[Mapping[str, Any], Mapping[str, WeightSpec]], Any]
    network: Callable[[Any], Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dead: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()
    config: Callable[[Any], Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """Comparison of a folder's tensors with a network's. found: network's name -> the folder's; missing, unexpected:
    names; reshaped: name -> (the network's form, the folder's)."""

    found: Mapping[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: Mapping[str, tuple[WeightSpec, WeightSpec]]

    @property
    def is_whole(self) -> bool:
        return not (self.missing or self.unexpected or self.reshaped)


def fit(checkpoint: Checkpoint, wanted: Mapping[str, WeightSpec], of: Architecture) -> Fit:
    """Compare the folder with the `wanted` tensors of a network. Dtypes may differ."""
    found = {name: stored for stored, name in of.aliases.items() if stored in checkpoint.tensors and name in wanted}
    found |= {name: name for name in wanted if name in checkpoint.tensors}
    known = {*wanted, *checkpoint.side, *(stored for stored, name in of.aliases.items() if name in wanted)}
    pairs = {name: (wanted[name], checkpoint.tensors[stored]) for name, stored in found.items()}
    return Fit(
        found=found,
        missing=tuple(name for name in wanted if name not in found and not matches(name, of.optional)),
        unexpected=tuple(name for name in checkpoint.tensors if name not in known and not matches(name, of.unused)),
        reshaped={name: pair for name, pair in pairs.items() if pair[0].shape != pair[1].shape},
    )


def check_fit(of: Architecture, checkpoint: Checkpoint, network: nn.Module) -> Fit:
    """Compare the folder with a network. ConfigError unless the folder has exactly the network's tensors in their
    shapes. The network may be on meta: `form` calls this, so that a wrong folder is reported before anything starts."""
    checkpoint.require(of.name)
    found = fit(checkpoint, weight_specs(network.state_dict()), of)
    if not found.is_whole:
        raise ConfigError(
            f"checkpoint = {checkpoint.folder}: {misfit(found, of)}{without_config(checkpoint)}; look at polyrhythm "
            f"policies inspect {checkpoint.folder}, and download it again or name another folder"
        )
    return found


def misfit(found: Fit, of: Architecture) -> str:
    shapes = [
        f"{name} is {list(there.shape)}, {list(ours.shape)} expected" for name, (ours, there) in found.reshaped.items()
    ]
    parts = {
        "missing": list(found.missing),
        "of another shape": shapes,
        "unexpected": list(found.unexpected),
    }
    told = [f"{counted(len(names), 'tensor')} {what} ({few(names)})" for what, names in parts.items() if names]
    return f"compared with the network of {of.name}, it has " + ", ".join(told)


def released_size(of: Architecture, checkpoint: Checkpoint) -> Any:
    """The size of the checkpoint's network. ConfigError: another architecture, or config and tensors disagree."""
    checkpoint.require(of.name)
    try:
        size = of.size(checkpoint.config, checkpoint.tensors)
        _check_numbers(size)
    except KeyError as error:
        raise ConfigError(
            f"checkpoint = {checkpoint.folder}: {error.args[0]} is neither in config.json nor among the tensors, so "
            f"the size of {of.name} is unknown; download the folder again"
        ) from error
    except ValueError as error:
        raise ConfigError(f"checkpoint = {checkpoint.folder}: {error}{without_config(checkpoint)}") from error
    except (TypeError, AttributeError, IndexError, ZeroDivisionError) as error:  # any JSON may be in there
        raise ConfigError(
            f"checkpoint = {checkpoint.folder}: its config.json does not describe a network of {of.name} ({error}); "
            "copy it again from its release"
        ) from error
    return size


#: Annotation of a size's field -> what its value may be.
_NUMBERS: Mapping[Any, Any] = {"int": int, "float": (int, float)}


def _check_numbers(size: Any) -> None:
    """ValueError: a field of the size, or of a nested size, is not a valid number."""
    for entry in fields(size) if is_dataclass(size) else ():
        value = getattr(size, entry.name)
        if is_dataclass(value):
            _check_numbers(value)
        elif entry.type in _NUMBERS and not (isinstance(value, _NUMBERS[entry.type]) and value >= 0):
            raise ValueError(
                f"config.json gives {entry.name} = {value!r}, not a number; copy it again from its release"
            )


def without_config(checkpoint: Checkpoint) -> str:
    """A likely reason for a misfit, appended to an error; "" if the folder has a config.json."""
    return "" if checkpoint.config else " (it has no config.json, so the sizes of the release were assumed)"


#: In place of an axis: the number of modules whose names begin so.
COUNT = -1


def read_fields(config: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a size that config.json tells: field -> value, without those that it lacks. keys: field -> key, `.`
    between a section and its key, `|` between alternatives, of which the first there counts."""
    found: dict[str, Any] = {}
    for name, alternatives in keys.items():
        for key in alternatives.split("|"):
            value: Any = config
            for part in key.split("."):
                value = None if value is None else value.get(part)
            if value is not None:
                found.setdefault(name, value)
    return found


def fields_of_tensors(tensors: Mapping[str, WeightSpec], shapes: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    """The fields of a size that tensors determine. shapes: field -> name of a tensor and axis, or beginning of names
    and COUNT."""
    found = {}
    for field_name, (name, axis) in shapes.items():
        if axis == COUNT:
            if numbers := {one[len(name) :].partition(".")[0] for one in tensors if one.startswith(name)}:
                found[field_name] = len(numbers)
        elif name in tensors:
            found[field_name] = tensors[name].shape[axis]
    return found


def with_fields(size: Any, values: Mapping[str, Any]) -> Any:
    """The size with these fields; `.` enters a nested size."""
    nested: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        outer, _, inner = name.partition(".")
        nested.setdefault(outer, {})[inner] = value
    changes = {
        name: inner[""] if "" in inner else with_fields(getattr(size, name), inner) for name, inner in nested.items()
    }
    return replace(size, **changes)


def config_of(size: Any, *tables: Mapping[str, str]) -> dict[str, Any]:
    """A config.json with these fields, which `read_fields` reads back; of a field's alternatives the first."""
    content: dict[str, Any] = {}
    for name, alternatives in (item for keys in tables for item in keys.items()):
        *sections, last = alternatives.partition("|")[0].split(".")
        inner = content
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = attrgetter(name)(size)
    return content
