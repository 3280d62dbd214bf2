"""Describes a released folder from its headers: architecture, size, robots, cameras, fit, memory.

Reads no tensor and needs no GPU: the network is made on the meta device and compared name by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyrhythm.plugin import import_address
from polyrhythm.plugins.pretrained.adapting import Adaptation, LoraSettings, TrainedPart, adapted_layers
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.fitting import Architecture, fit, misfit, released_size, without_config
from polyrhythm.plugins.pretrained.folder_files import CHOICES, read_json
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.plugins.vla.groot_statistics import OF_EMBODIMENT
from polyrhythm.plugins.vla.statistics import BOUNDS, openpi_key
from polyrhythm.plugins.vla.tokenizers import WORDS
from polyrhythm.policies.form import Role, weights_on_meta
from polyrhythm.specs.weights import weight_specs

#: Policy type -> `module:attribute` of its `Architecture`.
ARCHITECTURES = {
    "pi0": "polyrhythm.plugins.vla.pi0.network:PI0",
    "pi05": "polyrhythm.plugins.vla.pi0.network:PI05",
    "openvla_oft": "polyrhythm.plugins.vla.openvla_oft.network:OPENVLA_OFT",
    "groot_n1d5": "polyrhythm.plugins.vla.groot_n1d5.network:GROOT_N1D5",
}
_TRAINED: tuple[TrainedPart, ...] = ("all", "expert", "lora", "head")
#: Up to this horizon all predicted actions are suggested for execution, of longer ones this many.
_LONGEST, _CHUNK = 10, 5
#: Policies with a setting `horizon`, for folders that do not tell it.
_HORIZON_IS_SET = frozenset(("pi0", "pi05"))
#: AdamW keeps two moments per trained number.
_MOMENTS = 2


def architecture(name: str) -> Architecture:
    """The architecture of a policy type. KeyError: not one of `ARCHITECTURES`."""
    found = import_address(ARCHITECTURES[name])
    assert isinstance(found, Architecture), f"{ARCHITECTURES[name]} is not an Architecture"
    return found


@dataclass(frozen=True, slots=True)
class Inspection:
    """Description of a folder. Numbers are None if the folder does not declare them.

    robots: keys of the statistics; () also for lerobot's single robot without a key. statistics: their files. files,
    file_bytes: of the tensors. dtypes: dtype -> numbers stored in it. trainable: `train` -> numbers trained. memory:
    station -> bytes by purpose; `generator` while acting, `trainer, train: X` with AdamW, both without activations and
    caches. fits: the folder has exactly the network's tensors; misfit: the differences. side: modules with their own
    files. ours: tensors of polyrhythm.safetensors. horizon_assumed: neither the folder nor a tensor's shape determines
    the horizon. recipe: "" if the folder does not fit.
    """

    folder: str
    architecture: str
    files: int
    file_bytes: int
    parameters: int
    dtypes: Mapping[str, int]
    prefix: str
    horizon: int | None
    horizon_assumed: bool
    action_dim: int | None
    robots: tuple[str, ...]
    cameras: tuple[str, ...]
    statistics: tuple[str, ...]
    tokenizer: str
    side: tuple[str, ...]
    ours: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    misfit: str
    trainable: Mapping[str, int]
    memory: Mapping[str, Mapping[str, int]]
    recipe: str

    @property
    def fits(self) -> bool:
        return not self.misfit

    def plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {**asdict(self), "fits": self.fits}


def inspect(folder: str | Path, *, dtype: str = "bfloat16") -> Inspection:
    """Describe a folder. dtype: of the backbone. ConfigError: it is not a complete checkpoint of a known
    architecture."""
    opened = Checkpoint.open(folder)
    kind = opened.architecture
    opened.require(kind)
    of = architecture(kind)
    size = released_size(of, opened)
    network = _empty(of, size)
    found = fit(opened, weight_specs(network.state_dict()), of)
    robots, cameras = robot_keys(opened), camera_names(opened)
    horizon, action_dim = _number(network, "horizon"), _number(network, "action_dim")
    assumed = horizon is not None and not opened.config
    trainable, memory = _memory(of, size, dtype)
    tokenizer = str((opened.config.get(CHOICES) or {}).get("tokenizer") or opened.tokenizer or "")
    return Inspection(
        folder=str(opened.folder),
        architecture=kind,
        files=len({place.file for place in opened.places.values()}),
        file_bytes=sum(spec.nbytes for spec in opened.tensors.values()),
        parameters=opened.parameters,
        dtypes=_dtypes(opened),
        prefix=opened.prefix,
        horizon=horizon,
        horizon_assumed=assumed,
        action_dim=action_dim,
        robots=robots,
        cameras=cameras,
        statistics=(
            *(str(path.relative_to(opened.folder)) for path in opened.statistics),
            *(["buffers among the tensors"] if opened.extra else []),
        ),
        tokenizer=tokenizer,
        side=tuple(sorted({name.partition(".")[0] for name in opened.side})),
        ours=tuple(opened.ours),
        missing=found.missing,
        unexpected=found.unexpected,
        reshaped={name: (ours.shape, there.shape) for name, (ours, there) in found.reshaped.items()},
        misfit="" if found.is_whole else misfit(found, of) + without_config(opened),
        trainable=trainable,
        memory=memory,
        recipe=recipe_lines(opened, kind, robots, cameras, horizon, assumed=assumed) if found.is_whole else "",
    )


def _number(network: nn.Module, name: str) -> int | None:
    """A dimension from the network's attributes or its size; None if neither has it."""
    found = getattr(network, name, None)
    return found if isinstance(found, int) else getattr(getattr(network, "size", None), name, None)


def _dtypes(opened: Checkpoint) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for spec in opened.tensors.values():
        counts[spec.dtype] += prod(spec.shape)
    return dict(counts.most_common())


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


def camera_names(opened: Checkpoint) -> tuple[str, ...]:
    """Camera names in config.json or GR00T's metadata; () if there are none."""
    config = opened.config
    saved = (config.get(CHOICES) or {}).get("cameras")
    named, features = saved or config.get("image_keys"), config.get("input_features")
    if named and isinstance(named, list):
        return tuple(map(str, named))
    features = features if isinstance(features, Mapping) else {}
    if visual := [
        name for name, feature in features.items() if isinstance(feature, Mapping) and feature.get("type") == "VISUAL"
    ]:
        return tuple(visual)
    for path in opened.statistics:
        if path.name == "metadata.json":
            tags = [tag for tag in read_json(path).values() if isinstance(tag, dict)]
            return tuple(dict.fromkeys(name for tag in tags for name in (tag.get("modalities") or {}).get("video", ())))
    return ()


def recipe_lines(
    opened: Checkpoint,
    kind: str,
    robots: Iterable[str],
    cameras: Iterable[str],
    horizon: int | None,
    *,
    assumed: bool = False,
) -> str:
    """The section `policy` of a recipe for the folder, as YAML. assumed: the horizon is a guess."""
    robots, cameras = tuple(robots), tuple(cameras)
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
    if assumed and kind in _HORIZON_IS_SET:
        lines.append(f"  horizon: {horizon}  # fill in: assumed; the actions that it was fine-tuned to predict")
    if horizon:
        chunk = horizon if horizon <= _LONGEST else _CHUNK
        lines.append(f"  chunk: {chunk}  # actions that are executed, at most {horizon}")
    if cameras:
        lines.append("  cameras:  # the environment's image of each; leave out those that it does not have")
        lines.extend(f"    {camera}: IMAGE" for camera in cameras)
    return "\n".join([*lines, "  train: expert  # or all, lora, head"])


def _memory(of: Architecture, size: Any, dtype: str) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """Numbers trained by `train`, and bytes by station and purpose."""
    acting = _adapted(of, size, "all", dtype, "act")
    memory = {"generator": {"weights": _nbytes(acting.parameters())}}
    trainable: dict[str, int] = {}
    for train in _TRAINED:
        if train not in ("all", *of.parts):
            continue
        network = _adapted(of, size, train, dtype, "train")
        trained = [p for p in network.parameters() if p.requires_grad]
        count, nbytes = sum(p.numel() for p in trained), _nbytes(trained)
        weights = _nbytes(network.parameters())
        if train == "lora":
            adapters = _adapter_numbers(network, of)
            count, nbytes, weights = count + adapters, nbytes + 4 * adapters, weights + 4 * adapters
        trainable[train] = count
        memory[f"trainer, train: {train}"] = {"weights": weights, "gradients": nbytes, "optimizer": _MOMENTS * nbytes}
    return trainable, memory


def _empty(of: Architecture, size: Any) -> nn.Module:
    with weights_on_meta():
        network = of.network(size)
    assert isinstance(network, nn.Module)
    return network


def _adapted(of: Architecture, size: Any, train: TrainedPart, dtype: str, role: Role) -> nn.Module:
    network = _empty(of, size)
    Adaptation(train, of.parts, Precision(getattr(torch, dtype), float32=of.float32), of.dead).prepare(network, role)
    return network


def _adapter_numbers(network: nn.Module, of: Architecture) -> int:
    """Numbers in the adapters of the default rank."""
    lora = LoraSettings()
    layers = (network.get_submodule(path) for path in adapted_layers(network, lora, of.parts, of.dead))
    return sum(lora.rank * (layer.in_features + layer.out_features) for layer in layers)  # type: ignore[operator, misc]


def _nbytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(p.nbytes for p in parameters)
