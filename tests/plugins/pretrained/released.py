"""A released folder in small: a network with what the published ones have, and its files on a disk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from polyrhythm.plugins.pretrained.fitting import Architecture


@dataclass(frozen=True)
class ToySize:
    """Widths of the toy."""

    width: int = 8
    words: int = 16
    layers: int = 2


class Block(nn.Module):
    """A linear map and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)


def _one_name(_network: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: object) -> None:
    """The tied tensor is in the state_dict once."""
    del state[f"{prefix}words.weight"]


class ToyNetwork(nn.Module):
    """Tied words, blocks, a drawn matrix of its own, and constants in and out of the state_dict."""

    def __init__(self, size: ToySize) -> None:
        super().__init__()
        self.size, self.horizon, self.action_dim = size, 4, 3
        self.words = nn.Embedding(size.words, size.width)
        self.lm_head = nn.Linear(size.width, size.words, bias=False)
        self.words.weight = self.lm_head.weight
        self.register_state_dict_post_hook(_one_name)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.own = nn.Parameter(torch.randn(2, size.width))
        self.state_proj = nn.Linear(3, size.width)
        self.spare = nn.Linear(size.width, 2)
        self.large = nn.Parameter(torch.zeros(size.layers, 256, 256))  # as category-specific matrices are
        self.register_buffer("steps", torch.zeros(3))
        frequencies = 10.0 ** -(torch.arange(0, size.width, 2).float() / size.width)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.periods = torch.linspace(0.1, 1.0, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[B,width] -> [B,words]."""
        for block in self.blocks:
            x = x + block.norm(block.q_proj(x))
        return self.lm_head(x)


def toy_size(config, tensors):
    words, width = tensors["lm_head.weight"].shape if "lm_head.weight" in tensors else tensors["words.weight"].shape
    return ToySize(width, words, config["layers"])


TOY = Architecture(
    name="pi0",
    size=toy_size,
    network=ToyNetwork,
    aliases={"words.weight": "lm_head.weight"},
    optional=("spare.*",),
    unused=("vision_head.*",),
    parts={"expert": ("state_proj.*", "own")},
    float32=("*norm*",),
)


def held_in(dtype: torch.dtype):
    """Prepares a network to be in this dtype, its norms in float32."""

    def prepare(network: nn.Module) -> None:
        for name, p in network.named_parameters():
            p.data = p.data.to(torch.float32 if "norm" in name else dtype)

    return prepare


def random_state(size: ToySize = ToySize(), seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A state_dict of the toy with random values everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return {name: torch.randn(x.shape).to(dtype) for name, x in ToyNetwork(size).state_dict().items()}


def write_folder(
    folder: Path, state: dict[str, Tensor], *, prefix: str = "", shards: int = 1, config: dict | None = None
) -> Path:
    """The state as a released folder, in shards if more than one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"layers": 2} if config is None else config))
    stored = {prefix + name: tensor.contiguous() for name, tensor in state.items()}
    if shards == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05}-of-{shards:05}.safetensors"
        part = {name: stored[name] for name in list(stored)[index::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index_file = {"metadata": {"total_size": sum(x.nbytes for x in state.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))
    return folder


def write_hollow_folder(folder: Path, shapes: Mapping[str, Sequence[int]], *, shards: int) -> Path:
    """A folder of bfloat16 tensors whose files have headers and a length, but no content on the disk."""
    names, weight_map = list(shapes), {}
    for index in range(shards):
        file = folder / f"model-{index + 1:05}-of-{shards:05}.safetensors"
        header, end = {}, 0
        for name in names[index::shards]:
            begin, end = end, end + 2 * prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [begin, end]}
        content = json.dumps(header).encode()
        with file.open("wb") as stream:
            stream.write(len(content).to_bytes(8, "little") + content)
            stream.truncate(8 + len(content) + end)
        weight_map |= dict.fromkeys(header, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def without_numbers(names: Iterable[str]) -> set[str]:
    """Names of tensors with all numbers of layers alike: those of a network do not depend on its size."""
    return {re.sub(r"\.\d+(?=\.)", ".N", name) for name in names}
