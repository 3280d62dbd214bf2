"""Low-rank adapters in peft's layout: opened, merged into their base by peft, and saved for peft.

    adapter_config.json         rank, alpha, target modules, base
    adapter_model.safetensors   base_model.model.<module>.lora_A.weight [r,in] and .lora_B.weight [out,r]; or .bin

A matrix W becomes W + alpha/r · B·A (Hu et al. 2021), or alpha/√r with rank-stabilised adapters. peft supports many
more kinds, some of which change the base at initialisation (PiSSA, OLoRA), so peft itself adds and merges the adapters.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polyrhythm.errors import ConfigError, MissingError, install_command
from polyrhythm.files import name_in_errors, new_folder
from polyrhythm.plugins.pretrained.adapting import whole_tensors
from polyrhythm.plugins.pretrained.building import NETWORK, load_network, save_folder, split_state, untie
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint, read_stored, stored_specs
from polyrhythm.plugins.pretrained.fitting import Architecture, fit
from polyrhythm.plugins.pretrained.folder_files import ADAPTER_CONFIG, ADAPTER_TENSORS, OURS, matches, read_json
from polyrhythm.policies.mlp import seeded
from polyrhythm.readable import few
from polyrhythm.safetensors_files import write_tensors
from polyrhythm.specs.weights import weight_specs

_PEFT = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
#: Ends of a matrix's adapter that say its module and its rank, the first dimension.
_RANKED = (_A, ".lora_embedding_A")
#: Name of the adapters' tensors as torch.save writes them, where peft was told so.
_TORCH_TENSORS = "adapter_model.bin"
#: Prefix that a release may have before the names of the network.
_RELEASE = "model."
#: Prefixes that a folder may lack: of a model saved without its output layer, such as the first GPT-2.
LEFT_OUT = ("", _RELEASE, "transformer.")

#: Keys of adapter_config.json by which peft merges: of the adapters, of their variants, of the layers that have one, of
#: what is whole.
_MATHS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "fan_in_fan_out")
_VARIANTS = ("velora_config", "kasa_config", "monteclora_config", "use_bdlora", "use_qalora", "qalora_group_size")
_TARGETS = ("target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern")
_WHOLE = ("bias", "modules_to_save", "trainable_token_indices", "ensure_weight_tying", "init_lora_weights")
MERGED_BY = frozenset(_MATHS + _VARIANTS + _TARGETS + _WHOLE)
#: Keys that say where the adapters are from and how they were trained or are run, and nothing about what they add.
_ORIGIN = ("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision")
_TRAINING = ("lora_dropout", "eva_config", "corda_config", "lora_ga_config", "loftq_config")
_RUNNING = ("inference_mode", "runtime_config", "megatron_core")
NOT_NEEDED = frozenset(_ORIGIN + _TRAINING + _RUNNING)
#: Values of init_lora_weights that leave the base as it is; those that change it so that peft repeats it exactly.
_KEEP_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
_CHANGE_BASE = ("pissa", "olora")


@dataclass(frozen=True, slots=True)
class Adapters:
    """A folder of adapters. config: adapter_config.json; file: of the tensors; ranks: of the adapters, by name of
    the adapted layer; whole: names of other tensors, such as peft's modules_to_save."""

    folder: Path
    config: Mapping[str, Any]
    file: Path
    ranks: Mapping[str, int]
    whole: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the adapted layers."""
        return tuple(self.ranks)

    @property
    def base(self) -> str:
        """The base that the folder names, "" if none; shown to the user, never opened."""
        named = str(self.config.get("base_model_name_or_path") or "")
        return named if named.isprintable() else repr(named)

    @classmethod
    def open(cls, folder: str | Path) -> Adapters:
        """ConfigError: the folder has no adapters, or adapters that cannot be merged into one model."""
        folder = Path(folder).expanduser()
        files = [folder / name for name in (ADAPTER_TENSORS, _TORCH_TENSORS) if (folder / name).is_file()]
        for name, found in ((ADAPTER_CONFIG, (folder / ADAPTER_CONFIG).is_file()), (ADAPTER_TENSORS, files)):
            if not found:
                raise ConfigError(f"{folder}: it holds no {name}; name a folder of adapters in peft's layout")
        config = read_json(folder / ADAPTER_CONFIG)
        if problem := _unmergeable(config):
            raise ConfigError(f"{folder / ADAPTER_CONFIG}: {problem}")
        specs = {plain_name(name): spec for name, spec in stored_specs(files[0]).items()}
        ranks = {
            name.removesuffix(ending): spec.shape[0]
            for name, spec in specs.items()
            for ending in _RANKED
            if name.endswith(ending) and spec.shape
        }
        return cls(folder, config, files[0], ranks, tuple(name for name in specs if ".lora_" not in name))

    def read(self) -> dict[str, Tensor]:
        """All tensors by their names in the file. ConfigError: a number is not finite."""
        tensors = dict(read_stored(self.file))
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ConfigError(f"{self.file}: {name} has numbers that are not finite; name other adapters")
        return tensors

    def ours(self) -> dict[str, Tensor]:
        """The tensors of the folder's polyrhythm.safetensors (critic, noise head)."""
        file = self.folder / OURS
        return dict(read_stored(file)) if file.is_file() else {}


def _unmergeable(config: Mapping[str, Any]) -> str:
    """Why adapters with this adapter_config.json cannot be merged, "" if they can."""
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        return f"peft_type = {kind!r}: only LORA is merged here; merge it with peft's own merge_and_unload"
    for key, value in config.items():
        if key not in MERGED_BY | NOT_NEEDED and value:
            return f"{key} = {value!r}: such adapters are not merged here; leave them to peft, which may run them"
    init = _init(config)
    if init not in _KEEP_BASE + _CHANGE_BASE:
        return (
            f"init_lora_weights = {init!r} has changed the base in a way that these files do not tell; save them with "
            "peft's save_pretrained(..., path_initial_model_for_weight_conversion=...), which makes plain adapters"
        )
    return ""


def _init(config: Mapping[str, Any]) -> Any:
    """The adapters' initialisation, in lower case as in peft."""
    init = config.get("init_lora_weights", True)
    return init.lower() if isinstance(init, str) else init


def merge_into(network: nn.Module, adapters: Adapters) -> list[list[str]]:
    """Add the adapters to the network's tensors with peft; return the groups of names that shared a tensor before.
    Afterwards each name has its own tensor, because an adapter changes only one of the tied layers. MissingError: peft
    is not installed. ConfigError: the adapters are of another network."""
    try:
        from peft import LoraConfig, PeftModel, set_peft_model_state_dict
    except ImportError as error:
        raise MissingError(f"merging adapters needs peft ({error}); run: {install_command('vla')}") from error

    tied = untie(network)
    tensors = {name.removeprefix(_PEFT): tensor for name, tensor in adapters.read().items()}
    model = network
    if not hasattr(network, "model") and any(name.startswith(_RELEASE) for name in tensors):
        model = nn.ModuleDict({"model": network})
        tensors = {_RELEASE + name.removeprefix(_RELEASE): tensor for name, tensor in tensors.items()}
    settings = {key: value for key, value in adapters.config.items() if key in MERGED_BY}
    settings["init_lora_weights"] = init if (init := _init(adapters.config)) in _CHANGE_BASE else True
    remedy = f"name the base that they were trained on ({adapters.base or 'their adapter_config.json names none'})"
    try:
        with warnings.catch_warnings(), seeded(0):
            warnings.simplefilter("ignore")  # of tied tensors, which are no longer; others are checked below
            wrapped = PeftModel(model, LoraConfig(**settings, inference_mode=True))
            found = set_peft_model_state_dict(wrapped, {_PEFT + name: tensor for name, tensor in tensors.items()})
            # Parts without adapters in the file, such as a head in a separate file, were not adapted.
            parts = {_part(name) for name in tensors}
            lacking = [name for name in found.missing_keys if ".lora_" in name and _part(plain_name(name)) in parts]
            if odd := [plain_name(name) for name in (*found.unexpected_keys, *lacking)]:
                raise ValueError(f"{few(odd)} are in one of both alone")
            remedy = "leave them to peft, which runs them beside the base"
            wrapped.merge_and_unload()
    except Exception as error:  # peft and torch raise many types
        told = f"they lack {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        reason = " ".join(told.split())[:300]
        raise ConfigError(
            f"{adapters.folder}: peft cannot merge these adapters into this base "
            f"({reason if reason.isprintable() else ascii(reason)}); {remedy}"
        ) from error
    return tied


def _part(name: str) -> str:
    return name.removeprefix(_RELEASE).partition(".")[0]


def merge(adapters: Adapters, base: Checkpoint, of: Architecture, out: Path) -> None:
    """Merge the adapters into the base and write it, in its layout and dtypes, into the new folder `out`. ConfigError:
    the adapters are of another base, or change a tied tensor."""
    network = load_network(of, base, device="cpu")
    for first, *others in merge_into(network, adapters):
        for other in others:
            if not torch.equal(network.get_parameter(first), network.get_parameter(other)):
                raise ConfigError(
                    f"{adapters.folder}: they make {other} unlike {first}, and {of.name} has one tensor for both; "
                    "adapt neither, or both alike"
                )
    state = network.state_dict()
    kept = fit(base, weight_specs(state), of).found
    save_folder(base, of, {NETWORK + name: state[name] for name in kept} | adapters.ours(), out)


def plain_name(name: str) -> str:
    """The base's name, `<module>.lora_A.weight`, for a name of peft's file or of a wrapped module."""
    plain = name.removeprefix(_PEFT)
    for kind in ("lora_A", "lora_B"):
        plain = plain.replace(f".{kind}.default.", f".{kind}.")
    return plain.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")


def is_adapter(name: str) -> bool:
    return plain_name(name).endswith((_A, _B))


def refuse_adapters(source: Path, weights: Mapping[str, Tensor]) -> None:
    """ConfigError: the saved policy has adapters but its network is in no folder. source: the saved policy."""
    if any(is_adapter(name) for name in weights):
        raise ConfigError(
            f"{source}: it has adapters on a network from a seed, which is in no folder; export a run with another "
            "policy.train, or begin from a checkpoint"
        )


def save_adapters(
    state: Mapping[str, Tensor],
    out: Path,
    *,
    alpha: float,
    base: Checkpoint,
    also: Sequence[str] = (),
    prefix: str = "",
    tied: Sequence[Sequence[str]] = (),
    task: str | None = None,
) -> None:
    """Write the adapters of a policy's state_dict into the new folder `out` in peft's layout, with
    polyrhythm.safetensors.

    state: tensors under `network.`, adapters as named by `is_adapter`. also: patterns of fully trained tensors; other
    tensors of the network are the base's and omitted. prefix: of the released model's names before the network's. tied:
    groups of names that are one tensor there. task: the model's kind, if peft has one. ConfigError: no adapters, or
    tensors that peft's layout cannot represent.
    """
    held, ours = split_state(state)
    network = {plain_name(name): x for name, x in held.items()}
    adapters = {name: x for name, x in network.items() if is_adapter(name)}
    modules = sorted(name.removesuffix(_A) for name in adapters if name.endswith(_A))
    if not modules:
        raise ConfigError("the policy has no adapters; train it with policy.train = lora, or save the whole network")
    names_of = {name: names for names in tied for name in names}
    values = {name: x for name, x in network.items() if any(matches(one, also) for one in names_of.get(name, [name]))}
    whole = {name: values[one] for name, one in whole_tensors(values, modules, tied).items()}
    saved = sorted({name.rpartition(".")[0] for name in whole})
    found = adapters | {name: x for module in saved for name, x in _below(module, base)} | whole
    ranks = {prefix + module: network[module + _A].shape[0] for module in modules}
    rank = max(ranks.values())
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base.folder),
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(ranks),
        "rank_pattern": {module: other for module, other in ranks.items() if other != rank},
        "modules_to_save": [prefix + module for module in saved] or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "task_type": task,
    }
    with new_folder(out) as unfinished, name_in_errors(out):
        (unfinished / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        tensors = {_PEFT + prefix + name: x.clone() for name, x in found.items()}  # tied ones do not share memory
        write_tensors(tensors, unfinished / ADAPTER_TENSORS)
        if ours:
            write_tensors(ours, unfinished / OURS)


def _below(module: str, base: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The base's tensors of a module by the network's names, whose prefix the folder may lack."""
    for prefix in LEFT_OUT:
        inner = module.removeprefix(prefix) + "."
        if names := [name for name in base.tensors if name.startswith(inner)]:
            yield from ((f"{module}.{name.removeprefix(inner)}", x) for name, x in base.read(names))
            return
