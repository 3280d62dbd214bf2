"""The folders of the released architectures: export, description from their headers, merging of adapters.

A description reads no tensor and needs no GPU: the network is made on the meta device and compared name by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from polyrhythm.cli.policies import memory_lines
from polyrhythm.cli.show import aligned, size_text
from polyrhythm.config.registry import settings_class
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.pretrained.adapters import Adapters, is_adapter, merge, refuse_adapters, save_adapters
from polyrhythm.plugins.pretrained.adapting import Adaptation, LoraSettings, TrainedPart, adapted_layers
from polyrhythm.plugins.pretrained.building import save_folder, save_new
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.fitting import Architecture, check_fit, fit, misfit, released_size, without_config
from polyrhythm.plugins.pretrained.folder_files import CHOICES, read_json
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.plugins.vla.groot_statistics import OF_EMBODIMENT
from polyrhythm.plugins.vla.inputs import VlaInputs
from polyrhythm.plugins.vla.prompts import WORDS
from polyrhythm.plugins.vla.statistics import BOUNDS, camera_names, openpi_key
from polyrhythm.policies.base import FolderReport, as_module
from polyrhythm.policies.form import Role, load_published, weights_on_meta
from polyrhythm.readable import counted
from polyrhythm.specs.weights import weight_specs

if TYPE_CHECKING:
    from torch import Tensor

    from polyrhythm.plugins.vla.settings import VlaSettings

_TRAINED: tuple[TrainedPart, ...] = ("all", "expert", "lora", "head")
#: Up to this horizon all predicted actions are suggested for execution, of longer ones this many.
_LONGEST, _CHUNK = 10, 5
#: Policies with a setting `horizon`, for folders that do not tell it.
_HORIZON_IS_SET = frozenset(("pi0", "pi05"))
#: AdamW keeps two moments per trained number.
_MOMENTS = 2


def architecture(kind: str) -> Architecture:
    """The architecture of a policy type."""
    found: Architecture = settings_class("policy", kind).architecture  # type: ignore[attr-defined]
    return found


class VlaFolders:
    """Folders of all architectures here (`policies.base.FolderFormat`)."""

    def export(
        self, settings: VlaSettings, weights: Mapping[str, Tensor], out: Path, *, base: str, source: Path, env: Any
    ) -> str:
        """Export in the layout of `base`, or as its adapters; without a base as a new folder."""
        if not base:  # drawn from a seed; tensors that its file lacks are drawn again
            refuse_adapters(source, weights)
            spec, seed = env
            if spec is None:
                raise ConfigError(
                    f"{source}: the file lacks the environment's form; resume the run once, which adds it"
                )
            policy = as_module(settings.build(spec, seed=seed, device="cpu", role="train"))
            load_published(policy, weights)
            inputs, network = policy.get_submodule("inputs"), policy.get_submodule("network")
            assert isinstance(inputs, VlaInputs)
            choices = {"tokenizer": WORDS, "robot": BOUNDS, "cameras": [slot for slot, _ in inputs.plan.cameras]}
            save_new(settings.architecture, network.size, policy.state_dict(), out, choices)
            return "network"
        opened = Checkpoint.open(base)
        opened.require(settings.type)
        if any(is_adapter(name) for name in weights):
            lora = settings.lora
            save_adapters(weights, out, alpha=lora.alpha, base=opened, also=lora.also, prefix=opened.prefix)
            return "adapters"
        save_folder(opened, settings.architecture, weights, out)
        return "network"

    def recognises(self, folder: Path) -> bool:
        return bool(Checkpoint.open(folder).architecture)

    def inspect(self, folder: Path) -> FolderReport:
        opened = Checkpoint.open(folder)
        kind = opened.architecture
        opened.require(kind)
        of = architecture(kind)
        size = released_size(of, opened)
        with weights_on_meta():
            network = of.network(size)
        found = fit(opened, weight_specs(network.state_dict()), of)
        robots, cameras = robot_keys(opened), camera_names(opened)
        trainable, memory = _memory(of, size)
        dtypes: Counter[str] = Counter()
        for spec in opened.tensors.values():
            dtypes[spec.dtype] += prod(spec.shape)
        statistics = [str(path.relative_to(opened.folder)) for path in opened.statistics]
        told = {
            "folder": str(opened.folder),
            "architecture": kind,
            "files": len({place.file for place in opened.places.values()}),
            "file_bytes": sum(spec.nbytes for spec in opened.tensors.values()),
            "parameters": opened.parameters,
            "dtypes": dict(dtypes.most_common()),
            "prefix": opened.prefix,
            "horizon": size.horizon,
            "horizon_assumed": not opened.config,
            "action_dim": size.action_dim,
            "robots": robots,
            "cameras": cameras,
            "statistics": statistics + ["buffers among the tensors"] * bool(opened.extra),
            "tokenizer": str((opened.config.get(CHOICES) or {}).get("tokenizer") or opened.tokenizer or ""),
            "side": sorted({name.partition(".")[0] for name in opened.side}),
            "ours": list(opened.ours),
            "missing": found.missing,
            "unexpected": found.unexpected,
            "reshaped": {name: (ours.shape, there.shape) for name, (ours, there) in found.reshaped.items()},
            "misfit": "" if found.is_whole else misfit(found, of) + without_config(opened),
            "trainable": trainable,
            "memory": memory,
            "recipe": recipe_lines(opened, robots, cameras, size.horizon) if found.is_whole else "",
            "fits": found.is_whole,
        }
        return FolderReport(told, "\n".join(report_lines(told)), found.is_whole)

    def merge(self, adapters: Path, base: Path, out: Path) -> None:
        opened = Checkpoint.open(base)
        opened.require(opened.architecture)
        of = architecture(opened.architecture)
        with weights_on_meta():
            network = of.network(released_size(of, opened))
        check_fit(of, opened, network)
        merge(Adapters.open(adapters), opened, of, out)


def report_lines(told: Mapping[str, Any]) -> list[str]:
    """The description of a folder as text."""
    dtypes = ", ".join(f"{count / told['parameters']:.0%} {dtype}" for dtype, count in told["dtypes"].items())
    assumed = " (assumed: no config.json)" if told["horizon_assumed"] else ""
    no_robots = "none: no normalisation statistics were found"
    if told["statistics"]:
        no_robots = "one without a key: leave policy.robot out"
    size = f"{size_text(told['file_bytes'])} in {counted(told['files'], 'file')}"
    rows = {
        "architecture": told["architecture"],
        "tensors": f"{told['parameters']:,} numbers ({dtypes}), {size}",
        "actions": f"{told['horizon']}{assumed} predicted, of {told['action_dim']} entries",
        "robots": ", ".join(told["robots"]) or no_robots,
        "cameras": ", ".join(told["cameras"]) or "not told by the folder",
        "statistics": ", ".join(told["statistics"]) or "none",
        "tokenizer": told["tokenizer"] or "none: name one as policy.tokenizer",
    }
    if told["side"]:
        rows["side files"] = ", ".join(told["side"])
    if told["ours"]:
        rows["ours"] = f"{len(told['ours'])} tensors of critic and heads in polyrhythm.safetensors"
    rows["fit"] = told["misfit"] or f"whole: every tensor of {told['architecture']} is there, and no other"
    rows["trainable"] = ", ".join(f"{train} {count:,}" for train, count in told["trainable"].items())
    recipe = told["recipe"] or "no lines for a recipe: training refuses a folder that does not fit"
    return [aligned(rows.items()), "", *memory_lines(told["memory"]), "", recipe]


def robot_keys(opened: Checkpoint) -> tuple[str, ...]:
    """Keys of the normalisation statistics: openpi's asset ids, OpenVLA's data sets, GR00T's embodiments."""
    keys: list[str] = []
    for path in opened.statistics:
        if path.name == "norm_stats.json":
            keys.append(openpi_key(path, opened.folder))
        elif path.name in ("dataset_statistics.json", "metadata.json"):
            keys.extend(read_json(path))
    named = opened.config.get("norm_stats")
    keys.extend(named if isinstance(named, Mapping) else ())
    return tuple(dict.fromkeys(key for key in keys if key))


def recipe_lines(opened: Checkpoint, robots: Sequence[str], cameras: Sequence[str], horizon: int) -> str:
    """The section `policy` of a recipe for the folder, as YAML; without a config.json the horizon is a guess."""
    kind = opened.architecture
    lines = ["policy:", f"  type: {kind}", f"  checkpoint: {opened.folder}"]
    if len(robots) > 1:
        lines.append(f"  robot: {robots[0]}  # one of {', '.join(robots)}")
    elif robots:
        lines.append(f"  robot: {robots[0]}")
    elif not (opened.statistics or opened.extra or opened.config.get(CHOICES)):
        lines.append(f"  robot: {BOUNDS}  # no statistics were found: actions between the environment's bounds")
    if kind == "groot_n1d5" and robots and robots[0] not in OF_EMBODIMENT:
        lines.append("  data_config: NAME  # fill in: that of the fine-tuning (libero, libero_mean_std, min_max, ...)")
    if not (opened.tokenizer or opened.config.get(CHOICES)):
        lines.append(f"  tokenizer: FOLDER  # fill in: the one that it was released with; {WORDS}: hashed, for a trial")
    if not opened.config and kind in _HORIZON_IS_SET:
        lines.append(f"  horizon: {horizon}  # fill in: assumed; the actions that it was fine-tuned to predict")
    chunk = horizon if horizon <= _LONGEST else _CHUNK
    lines.append(f"  chunk: {chunk}  # actions that are executed, at most {horizon}")
    if cameras:
        lines.append("  cameras:  # the environment's image of each; leave out those that it does not have")
        lines.extend(f"    {camera}: IMAGE" for camera in cameras)
    return "\n".join([*lines, "  train: expert  # or all, lora, head"])


def _memory(of: Architecture, size: Any) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Numbers trained by `train`, and bytes by station and purpose, with a backbone in bfloat16: of the weights while
    acting, and with AdamW while training, without activations and caches."""

    def adapted(train: TrainedPart, role: Role) -> nn.Module:
        with weights_on_meta():
            network: nn.Module = of.network(size)
        precision = Precision(torch.bfloat16, float32=of.float32)
        Adaptation(train, of.parts, precision, of.dead).prepare(network, role)
        return network

    memory = {"generator": {"weights": sum(p.nbytes for p in adapted("all", "act").parameters())}}
    trainable: dict[str, int] = {}
    for train in _TRAINED:
        if train not in ("all", *of.parts):
            continue
        network = adapted(train, "train")
        trained = [p for p in network.parameters() if p.requires_grad]
        count, nbytes = sum(p.numel() for p in trained), sum(p.nbytes for p in trained)
        weights = sum(p.nbytes for p in network.parameters())
        if train == "lora":
            lora = LoraSettings()
            layers = (network.get_submodule(path) for path in adapted_layers(network, lora, of.parts, of.dead))
            adapters = sum(lora.rank * (layer.in_features + layer.out_features) for layer in layers)  # type: ignore[operator, misc]
            count, nbytes, weights = count + adapters, nbytes + 4 * adapters, weights + 4 * adapters
        trainable[train] = count
        memory[f"trainer, train: {train}"] = {"weights": weights, "gradients": nbytes, "optimizer": _MOMENTS * nbytes}
    return trainable, memory
