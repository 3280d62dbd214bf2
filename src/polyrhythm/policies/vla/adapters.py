"""Low-rank adapters in peft's layout: saved, opened, and merged into the folder that they were trained on.

    adapter_config.json         rank, alpha, target modules, base
    adapter_model.safetensors   base_model.model.<module>.lora_A.weight [r,in] and .lora_B.weight [out,r]

A matrix W becomes W + alpha/r · B·A (Hu et al. 2021), or alpha/√r with rank-stabilised adapters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.errors import ConfigError
from polyrhythm.files import name_in_errors
from polyrhythm.policies.vla.building import NETWORK
from polyrhythm.policies.vla.checkpoint import Checkpoint, read_stored
from polyrhythm.policies.vla.folder_files import ADAPTER_CONFIG, ADAPTER_TENSORS, OURS, few, read_json
from polyrhythm.policies.vla.safetensors_headers import read_header
from polyrhythm.policies.vla.saving import new_folder, save_changed, write_tensors

_PEFT = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
#: peft's lora_alpha where adapter_config.json has none.
_ALPHA = 8
#: What makes other adapters than these of the plain kind, by key of adapter_config.json.
_OTHER_KINDS = ("use_dora", "fan_in_fan_out", "lora_bias", "megatron_config", "trainable_token_indices")


@dataclass(frozen=True, slots=True)
class Adapters:
    """An opened folder of adapters. config: adapter_config.json. ranks: of the tensors, by name of the adapted layer as
    the base has it; what adapter_config.json says of ranks is not read. replaced: tensors that the folder holds whole
    (peft's modules_to_save), by the base's name -> stored name."""

    folder: Path
    config: Mapping[str, Any]
    ranks: Mapping[str, int]
    replaced: Mapping[str, str]

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the adapted layers."""
        return tuple(self.ranks)

    @property
    def base(self) -> str:
        """The base that the folder names, "" if none."""
        return str(self.config.get("base_model_name_or_path") or "")

    @classmethod
    def open(cls, folder: str | Path) -> Adapters:
        """ConfigError: no adapters of the plain kind."""
        folder = Path(folder).expanduser()
        for name in (ADAPTER_CONFIG, ADAPTER_TENSORS):
            if not (folder / name).is_file():
                raise ConfigError(f"{folder}: it holds no {name}; name a folder of adapters in peft's layout")
        config = read_json(folder / ADAPTER_CONFIG)
        others = [key for key in _OTHER_KINDS if config.get(key)]
        if config.get("peft_type", "LORA") != "LORA" or others:
            kind = others[0] if others else config["peft_type"]
            raise ConfigError(f"{folder / ADAPTER_CONFIG}: {kind} is not supported; merge it with peft itself")
        stored = read_header(folder / ADAPTER_TENSORS).tensors
        names = {plain_name(name): name for name in stored}
        ranks = {
            plain.removesuffix(_A): stored[name].shape[0]
            for plain, name in names.items()
            if plain.endswith(_A) and stored[name].shape
        }
        pairs = {module + ending for module in ranks for ending in (_A, _B)}
        replaced = {plain: name for plain, name in names.items() if plain not in pairs}
        if odd := [name for name in replaced if ".lora_" in name or name.startswith("lora_")]:
            raise ConfigError(f"{folder}: {few(odd)} cannot be merged here; merge it with peft itself")
        return cls(folder, config, ranks, replaced)

    def scale(self, module: str) -> float:
        """What B·A is multiplied by. ConfigError: adapter_config.json does not tell it."""
        alpha, rank = self._alpha(module), self.ranks[module]
        return alpha / (sqrt(rank) if self.config.get("use_rslora") else rank)

    def _alpha(self, module: str) -> float:
        """That of the first pattern which fits, else lora_alpha. A pattern is a regular expression of the layer's name
        or of its end behind a dot, as in peft."""
        patterns = self.config.get("alpha_pattern") or {}
        try:
            fitting = (value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module))
            return float(next(fitting, self.config.get("lora_alpha", _ALPHA)))
        except (TypeError, ValueError, AttributeError, re.error) as error:
            raise ConfigError(
                f"{self.folder / ADAPTER_CONFIG}: lora_alpha and alpha_pattern do not tell the scale of {module} "
                f"({error}); copy it again from where the adapters were saved"
            ) from error

    def read(self) -> dict[str, Tensor]:
        """All tensors by plain name."""
        stored = read_header(self.folder / ADAPTER_TENSORS).tensors
        return dict(read_stored(self.folder / ADAPTER_TENSORS, {plain_name(name): name for name in stored}))


def plain_name(name: str) -> str:
    """A name of peft's, saved or in a wrapped module, in the base's terms: `<module>.lora_A.weight`."""
    plain = name.removeprefix(_PEFT)
    for kind in ("lora_A", "lora_B"):
        plain = plain.replace(f".{kind}.default.", f".{kind}.")
    return plain.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")


def is_adapter(name: str) -> bool:
    """Whether a tensor of this name is an adapter's."""
    return plain_name(name).endswith((_A, _B))


def save_adapters(
    state: Mapping[str, Tensor],
    out: Path,
    *,
    alpha: float,
    base: str,
    also: Sequence[str] = (),
    task: str | None = None,
) -> None:
    """Write the adapters of a policy's state_dict into the new folder `out` in peft's layout, ours beside.

    state: names under `network.`, those of adapters as `is_adapter` has them. also: patterns of tensors that were
    trained in full; all others of the network are the base's and left out. base: its folder, as adapter_config.json
    tells it; task: the kind of model, where peft has one. ConfigError: no adapters.
    """
    network = {plain_name(name.removeprefix(NETWORK)): x for name, x in state.items() if name.startswith(NETWORK)}
    modules = sorted(name.removesuffix(_A) for name in network if name.endswith(_A))
    whole = sorted(name for name in network if not is_adapter(name) and any(fnmatchcase(name, one) for one in also))
    if not modules:
        raise ConfigError("the policy has no adapters; train it with policy.train = lora, or save the whole network")
    found = {_PEFT + name: tensor for name, tensor in network.items() if is_adapter(name) or name in whole}
    ranks = {module: network[module + _A].shape[0] for module in modules}
    rank = max(ranks.values())
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": modules,
        "rank_pattern": {module: other for module, other in ranks.items() if other != rank},
        "modules_to_save": sorted({name.rpartition(".")[0] for name in whole}) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "task_type": task,
    }
    ours = {name: x for name, x in state.items() if not name.startswith(NETWORK)}
    with new_folder(out) as unfinished, name_in_errors(out):
        (unfinished / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        write_tensors(found, unfinished / ADAPTER_TENSORS)
        if ours:
            write_tensors(ours, unfinished / OURS)


def merge(adapters: Adapters, base: Checkpoint, out: Path) -> None:
    """Write the base with the adapters added to its matrices, in its layout and dtypes, into the new folder `out`.

    ConfigError: an adapted matrix is not in the base or has another shape, or its scale is not told. The sum is taken
    in float32.
    """
    tensors = adapters.read()
    matrices = {_in_base(f"{module}.weight", base, adapters): module for module in adapters.modules}
    whole = {_in_base(name, base, adapters): name for name in adapters.replaced}
    scales = {name: adapters.scale(module) for name, module in matrices.items()}
    fix = f"name the base that it was trained on ({adapters.base or 'its adapter_config.json names none'})"
    for name, module in matrices.items():
        a, b, there = tensors[module + _A], tensors.get(module + _B), base.tensors[name].shape
        if b is None or a.ndim != 2 or (b.shape[0], a.shape[1]) != there:
            told = "lacks its second matrix" if b is None else f"makes {[b.shape[0], *a.shape[1:]]}"
            raise ConfigError(f"{adapters.folder}: the adapter of {name} {told}, the base has {list(there)}; {fix}")
    for name, stored in whole.items():
        if tensors[stored].shape != base.tensors[name].shape:
            raise ConfigError(
                f"{adapters.folder}: {name} is {list(tensors[stored].shape)}, the base has "
                f"{list(base.tensors[name].shape)}; {fix}"
            )

    def new(name: str) -> Tensor | None:
        if name in whole:
            return tensors[whole[name]]
        if name not in matrices:
            return None
        ((_, weight),) = base.read([name])
        a, b = (tensors[matrices[name] + ending].float() for ending in (_A, _B))
        return torch.addmm(weight.float(), b, a, alpha=scales[name])

    file = adapters.folder / OURS
    ours = dict(read_stored(file, {name: name for name in read_header(file).tensors})) if file.is_file() else {}
    save_changed(base, new, out, ours)


def _in_base(name: str, base: Checkpoint, adapters: Adapters) -> str:
    """The base's name of a tensor, with or without the release's prefix. ConfigError: it has none."""
    for candidate in (name, name.removeprefix("model.")):
        if candidate in base.tensors:
            return candidate
    raise ConfigError(
        f"{adapters.folder}: {name} is adapted, but {base.folder} has no such tensor; name the base that it was "
        f"trained on ({adapters.base or 'its adapter_config.json names none'})"
    )
