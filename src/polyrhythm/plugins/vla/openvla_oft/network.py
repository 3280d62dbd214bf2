"""OpenVLA-OFT's network: fused vision towers, projector and Llama, with the parameter names of the release.

    begin token │ patches of each image │ [proprioception] │ padding, prompt │ H·A empty slots │ [stop token]

All tokens except padding attend to each other. Each slot is read one token earlier, starting at the prompt's last
token, because an autoregressive model predicts the next token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.plugins.pretrained.fitting import Architecture, fields_of_tensors, read_fields, with_fields
from polyrhythm.plugins.pretrained.precision import computing_dtype
from polyrhythm.plugins.vla.decoder import TEXT_KEYS, Decoder, DecoderSize, draw_unit_variance, gelu_mlp, positions_of
from polyrhythm.plugins.vla.vision import (
    DINOV2_LARGE,
    SIGLIP_SO400M,
    VisionSize,
    VisionTransformer,
    tower_dead_patterns,
)
from polyrhythm.specs import WeightSpec

#: Llama 2 7B, with the norms' epsilon of OpenVLA's configuration.
LLAMA_7B = DecoderSize(4096, 32, 11008, 32, 32, 128, "silu", eps=1e-6, theta=1e4)

#: timm's names of the two towers that the release fuses.
_TOWERS = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids of Llama's tokenizer. The last `bins` of the `rows - padding` real rows represent actions. bos: first token;
    stop: follows the actions in the official layout; empty: last token of every prompt; pad: pads short prompts."""

    rows: int = 32064
    padding: int = 64
    bins: int = 256
    bos: int = 1
    stop: int = 2
    empty: int = 29871
    pad: int = 32000

    @property
    def real(self) -> int:
        """Rows without those that only pad the matrix."""
        return self.rows - self.padding

    @property
    def first_action(self) -> int:
        """The smallest id of an action."""
        return self.real - self.bins


@dataclass(frozen=True, slots=True)
class L1HeadSize:
    hidden: int = 4096
    blocks: int = 2


@dataclass(frozen=True, slots=True)
class OpenVlaOftSize:
    """Size of a network.

    horizon: H, predicted actions; action_dim: A, their entries; proprio: entries of the robot's state, which becomes
    one token, 0 for no such token; l1_head: predicts actions as numbers, None: as tokens; stop_token: the sequence ends
    with the stop token (official layout) or with the actions (RLinf's layout).
    """

    dino: VisionSize = DINOV2_LARGE
    siglip: VisionSize = SIGLIP_SO400M
    llama: DecoderSize = LLAMA_7B
    vocabulary: Vocabulary = Vocabulary()
    horizon: int = 8
    action_dim: int = 7
    proprio: int = 0
    l1_head: L1HeadSize | None = None
    stop_token: bool = True

    @property
    def slots(self) -> int:
        """Number of action tokens: H·A."""
        return self.horizon * self.action_dim


class FusedBackbone(nn.Module):
    """DINOv2 and SigLIP side by side; the features of a patch are concatenated."""

    def __init__(self, size: OpenVlaOftSize) -> None:
        super().__init__()
        self.featurizer = VisionTransformer(size.dino)
        self.fused_featurizer = VisionTransformer(size.siglip)

    def forward(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """[B,6·n,H,W], per image three channels for DINOv2 and three for SigLIP -> [B,n·tokens,width]."""
        dino, siglip = images.unflatten(1, (-1, 2, 3)).unbind(2)
        count = dino.shape[1]
        features: Tensor = torch.cat(
            (self.featurizer(dino.flatten(0, 1), dtype), self.fused_featurizer(siglip.flatten(0, 1), dtype)), dim=-1
        )
        found: Tensor = features.unflatten(0, (-1, count))
        return found.flatten(1, 2)


class OftLanguageModel(nn.Module):
    """Llama with a separate output matrix."""

    def __init__(self, size: OpenVlaOftSize) -> None:
        super().__init__()
        self.model = Decoder(size.llama)
        self.model.add_module("embed_tokens", nn.Embedding(size.vocabulary.rows, size.llama.width))
        self.lm_head = nn.Linear(size.llama.width, size.vocabulary.rows, bias=False)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] -> embeddings [...,width]."""
        found: Tensor = self.model.get_submodule("embed_tokens")(ids)
        return found


class ResidualBlock(nn.Module):
    """x + relu(linear(norm(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.ffn(x)
        return found


class ResidualMlp(nn.Module):
    def __init__(self, inputs: int, outputs: int, size: L1HeadSize) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, size.hidden)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(size.hidden) for _ in range(size.blocks))
        self.layer_norm2 = nn.LayerNorm(size.hidden)
        self.fc2 = nn.Linear(size.hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        found: Tensor = self.fc2(self.layer_norm2(x))
        return found


class L1Head(nn.Module):
    """Predicts normalised actions from the joint hidden states of each action's slots."""

    def __init__(self, width: int, action_dim: int, size: L1HeadSize) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.model = ResidualMlp(width * action_dim, action_dim, size)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B,H·A,width] -> [B,H,A], about -1..1, unclipped."""
        found: Tensor = self.model(hidden.unflatten(1, (-1, self.action_dim)).flatten(2))
        return found


class OpenVlaOft(nn.Module):
    """The network. inputs: pixel_values [B,6·n,H,W]; input_ids int64 [B,T] and attention_mask bool [B,T] of a prompt
    that consists of begin token, padding and text; proprio float32 [B,entries] if the network reads it.

    Its optional parts, `proprio_projector` and `action_head`, are released in separate files.
    """

    def __init__(self, size: OpenVlaOftSize) -> None:
        super().__init__()
        self.size, width = size, size.llama.width
        self.vision_backbone = FusedBackbone(size)
        vision = size.dino.width + size.siglip.width
        self.projector = gelu_mlp(vision, 4 * vision, width, width)
        self.language_model = OftLanguageModel(size)
        if size.proprio:
            self.proprio_projector = gelu_mlp(size.proprio, width, width)
        if size.l1_head is not None:
            self.action_head = L1Head(width, size.action_dim, size.l1_head)

    def initialise(self) -> None:
        """Draw all parameters: unit variance through every linear map and of every embedding, scores near zero."""
        for module in self.modules():
            draw_unit_variance(module, embedding=1.0)
        nn.init.normal_(self.language_model.lm_head.weight, std=0.02)
        if self.size.l1_head is not None:
            nn.init.normal_(self.action_head.model.fc2.weight, std=0.02)

    def features(self, pixel_values: Tensor) -> Tensor:
        """Images [B,6·n,H,W] -> features of their patches by both towers [B,n·tokens,vision width]."""
        found: Tensor = self.vision_backbone(pixel_values, self._dtype)
        return found

    def patches(self, features: Tensor) -> Tensor:
        """Features of patches -> embeddings for the language model [B,n·tokens,width]."""
        found: Tensor = self.projector(features.to(self._dtype))
        return found

    def sequence(self, patches: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Embeddings [B,L,width] of the sequence at the top of this file, and its valid tokens, bool [B,L]."""
        dtype, size = self._dtype, self.size
        ids, present = inputs["input_ids"], inputs["attention_mask"].bool()
        text = self.language_model.embed(ids).to(dtype)
        seen = [patches.to(dtype)]
        if size.proprio:
            seen.append(self.proprio_projector(inputs["proprio"].to(dtype)).to(dtype).unsqueeze(1))
        after = [text.new_zeros(len(text), size.slots, text.shape[-1])]
        if size.stop_token:
            stop = torch.full_like(ids[:, :1], size.vocabulary.stop)
            after.append(self.language_model.embed(stop).to(dtype))
        embeddings = torch.cat((text[:, :1], *seen, text[:, 1:], *after), dim=1)
        exist = [present.new_ones(len(text), sum(part.shape[1] for part in parts)) for parts in (seen, after)]
        return embeddings, torch.cat((present[:, :1], exist[0], present[:, 1:], exist[1]), dim=1)

    def hidden(self, patches: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Final hidden states that predict the slots [B,H·A,width]; the first is the prompt's last token's."""
        x, present = self.sequence(patches, inputs)
        mask = present[:, None, None, :]
        end = x.shape[1] - 1 - self.size.stop_token
        read = slice(end - self.size.slots, end)
        return self.language_model.model.hidden_of(read, x, positions_of(present), mask)

    def token_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [B,H·A,width] -> scores of the action rows, by id [B,H,A,bins]."""
        rows = slice(self.size.vocabulary.first_action, self.size.vocabulary.real)
        head: nn.Module = self.language_model.lm_head
        # An adapted layer wraps the linear one, so it must be called; its weight alone lacks the adapter.
        linear = functional.linear(hidden, head.weight[rows]) if isinstance(head, nn.Linear) else None
        scores: Tensor = head(hidden)[..., rows] if linear is None else linear
        found: Tensor = scores.unflatten(1, (self.size.horizon, self.size.action_dim))
        return found

    def l1_actions(self, hidden: Tensor) -> Tensor:
        """Hidden states [B,H·A,width] -> the L1 head's actions [B,H,A] float32, about -1..1, unclipped."""
        found: Tensor = self.action_head(hidden)
        return found.float()

    @property
    def _dtype(self) -> torch.dtype:
        return computing_dtype(next(self.projector.parameters()))


def dead_patterns(size: OpenVlaOftSize) -> tuple[str, ...]:
    """`fnmatch` patterns of tensors that do not affect any output; with the L1 head these include the token scores."""
    towers = {"featurizer": size.dino, "fused_featurizer": size.siglip}
    vision = [f"vision_backbone.{name}.{dead}" for name, tower in towers.items() for dead in tower_dead_patterns(tower)]
    return (*vision, "language_model.lm_head.*") if size.l1_head is not None else tuple(vision)


#: The size in config.json; `tiny_` sections are in small folders for tests.
_KEYS = {
    **{f"llama.{field}": f"text_config.{key}" for field, key in TEXT_KEYS.items()},
    "llama.layers": "text_config.num_hidden_layers",
    "vocabulary.rows": "text_config.vocab_size",
    "vocabulary.padding": "pad_to_multiple_of",
    "vocabulary.bins": "n_action_bins",
    "vocabulary.bos": "tiny_tokens.bos",
    "vocabulary.stop": "tiny_tokens.stop",
    "vocabulary.empty": "tiny_tokens.empty_token",
    "vocabulary.pad": "tiny_tokens.pad|pad_token_id",
    "horizon": "num_action_chunks",
    "action_dim": "action_dim",
}
_TINY_TOWER = {"width": "embed_dim", "layers": "depth", "heads": "num_heads"}


def size_from_config(config: Mapping[str, Any], tensors: Mapping[str, WeightSpec] | None = None) -> OpenVlaOftSize:
    """Size of a folder's network: by config.json, else the release's; proprioception and L1 head are there if their
    tensors are, which lie in separate files. ValueError: the folder has other vision towers."""
    towers = config.get("timm_model_ids", _TOWERS)
    if list(towers) != _TOWERS or not config.get("use_fused_vision_backbone", True):
        raise ValueError(
            f"policy.checkpoint: config.json has timm_model_ids = {towers}, openvla_oft needs {_TOWERS} fused: "
            "choose a checkpoint of OpenVLA with the dinosiglip-vit-so-224px backbone"
        )
    values = read_fields(config, _KEYS)
    images = config.get("image_sizes", [224, 224])
    for index, tower in enumerate(("dino", "siglip")):
        values[f"{tower}.image"] = images[index]
        if tiny := config.get("tiny_vision", {}).get(tower):
            values |= {f"{tower}.{field}": tiny[key] for field, key in _TINY_TOWER.items()}
            values[f"{tower}.mlp"] = int(tiny["embed_dim"] * tiny.get("mlp_ratio", 4.0))
    width, heads = values.get("llama.width", LLAMA_7B.width), values.get("llama.heads", LLAMA_7B.heads)
    values = {"llama.kv_heads": heads, "llama.head_dim": width // heads} | values
    parts = {"action_dim": ("action_head.model.fc2.weight", 0), "proprio": ("proprio_projector.fc1.weight", 1)}
    found = fields_of_tensors(tensors or {}, parts)
    head = l1_head_from_config(config) if "action_dim" in found else None
    size: OpenVlaOftSize = with_fields(OpenVlaOftSize(l1_head=head), values | found)
    return size


def l1_head_from_config(config: Mapping[str, Any]) -> L1HeadSize:
    """Size of the L1 head, from config.json or else the release's."""
    found = read_fields(config, {"hidden": "action_head.hidden_dim", "blocks": "action_head.num_blocks"})
    return replace(L1HeadSize(), **found)


OPENVLA_OFT = Architecture(
    name="openvla_oft",
    size=size_from_config,
    network=OpenVlaOft,
    optional=("action_head.*", "proprio_projector.*"),
    unused=("value_head.*",),
    parts={
        "expert": ("language_model.*", "proprio_projector.*", "action_head.*"),
        "head": ("language_model.lm_head.weight", "action_head.*"),
        "lora": ("language_model.model.layers.*_proj.weight", "projector.*.weight"),
    },
    dead=dead_patterns(OpenVlaOftSize()),
)
