"""Size of an OpenVLA-OFT network: the release's by default, others from a folder's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from polyrhythm.plugins.vla.layers.decoder import DecoderSize
from polyrhythm.plugins.vla.layers.timm_vit import DINOV2_LARGE, SIGLIP_SO400M, VitSize

#: Llama 2 7B, with the norms' epsilon of OpenVLA's configuration.
LLAMA_7B = DecoderSize(4096, 32, 11008, 32, 32, 128, "silu", eps=1e-6, theta=1e4)

#: timm's names of the two towers that the release fuses.
_TOWERS = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids of Llama's tokenizer. The last `bins` of the `rows - padding` real rows represent actions.

    bos: first token; stop: follows the actions in the official layout; empty: last token of every prompt; pad: pads
    short prompts.
    """

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

    dino: VitSize = DINOV2_LARGE
    siglip: VitSize = SIGLIP_SO400M
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


def size_from_config(config: Mapping[str, Any]) -> OpenVlaOftSize:
    """Size declared by a checkpoint's config.json, without proprioception and L1 head, whose weights are in separate
    files. Absent keys have the released values. ValueError: the folder has other vision towers."""
    towers = config.get("timm_model_ids", _TOWERS)
    if list(towers) != _TOWERS or not config.get("use_fused_vision_backbone", True):
        raise ValueError(
            f"policy.checkpoint: config.json has timm_model_ids = {towers}, openvla_oft needs {_TOWERS} fused: "
            "choose a checkpoint of OpenVLA with the dinosiglip-vit-so-224px backbone"
        )
    images = config.get("image_sizes", [224, 224])
    tiny = config.get("tiny_vision", {})
    default = OpenVlaOftSize()
    return OpenVlaOftSize(
        dino=replace(_tower(default.dino, tiny.get("dino", {})), image=images[0]),
        siglip=replace(_tower(default.siglip, tiny.get("siglip", {})), image=images[1]),
        llama=_llama(config.get("text_config", {})),
        vocabulary=_vocabulary(config),
        horizon=config.get("num_action_chunks", default.horizon),
        action_dim=config.get("action_dim", default.action_dim),
    )


def l1_head_from_config(config: Mapping[str, Any]) -> L1HeadSize:
    """Size of the L1 head, from config.json or else the release's."""
    found, default = config.get("action_head", {}), L1HeadSize()
    return L1HeadSize(found.get("hidden_dim", default.hidden), found.get("num_blocks", default.blocks))


def _tower(default: VitSize, found: Mapping[str, Any]) -> VitSize:
    if not found:
        return default
    width = found["embed_dim"]
    return replace(
        default,
        width=width,
        layers=found["depth"],
        heads=found["num_heads"],
        mlp=int(width * found.get("mlp_ratio", 4.0)),
    )


def _llama(found: Mapping[str, Any]) -> DecoderSize:
    default = LLAMA_7B
    width, heads = found.get("hidden_size", default.width), found.get("num_attention_heads", default.heads)
    return replace(
        default,
        width=width,
        layers=found.get("num_hidden_layers", default.layers),
        mlp=found.get("intermediate_size", default.mlp),
        heads=heads,
        kv_heads=found.get("num_key_value_heads", heads),
        head_dim=found.get("head_dim") or width // heads,
        eps=found.get("rms_norm_eps", default.eps),
        theta=found.get("rope_theta", default.theta),
    )


def _vocabulary(config: Mapping[str, Any]) -> Vocabulary:
    default, ids = Vocabulary(), config.get("tiny_tokens", {})
    return Vocabulary(
        rows=config.get("text_config", {}).get("vocab_size", default.rows),
        padding=config.get("pad_to_multiple_of", default.padding),
        bins=config.get("n_action_bins", default.bins),
        bos=ids.get("bos", default.bos),
        stop=ids.get("stop", default.stop),
        empty=ids.get("empty_token", default.empty),
        pad=ids.get("pad", config.get("pad_token_id", default.pad)),
    )
