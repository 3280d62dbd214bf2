"""Eagle, GR00T's vision-language backbone, as the release nests it: SigLIP, a linear connector, Qwen3 without its
upper layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyrhythm.plugins.vla.groot_n1d5.size import GrootSize
from polyrhythm.plugins.vla.layers.attention import causal_mask, positions_of
from polyrhythm.plugins.vla.layers.decoder import Decoder
from polyrhythm.plugins.vla.layers.siglip import SiglipMlp, SiglipSize, SiglipVisionModel


class PoolingHead(nn.Module):
    """SigLIP's attention pooling: in every released checkpoint, used by nothing."""

    def __init__(self, size: SiglipSize) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.zeros(1, 1, size.width))
        self.attention = nn.MultiheadAttention(size.width, size.heads, batch_first=True)
        self.layernorm = nn.LayerNorm(size.width, size.eps)
        self.mlp = SiglipMlp(size)


class VisionModel(nn.Module):
    """Holds `vision_model`, the tower and its unused head."""

    def __init__(self, size: SiglipSize) -> None:
        super().__init__()
        self.vision_model = SiglipVisionModel(size)
        self.vision_model.head = PoolingHead(size)


class LanguageModel(nn.Module):
    """`model`, the decoder, and `lm_head`, which is the word embedding: the release stores it under this name."""

    def __init__(self, size: GrootSize) -> None:
        super().__init__()
        self.model = Decoder(size.llm)
        self.lm_head = nn.Embedding(size.vocabulary, size.llm.width)


class EagleModel(nn.Module):
    """Tower, connector `mlp1` and language model."""

    def __init__(self, size: GrootSize) -> None:
        super().__init__()
        self.image_token = size.image_token
        self.vision_model = VisionModel(size.vision)
        self.mlp1 = nn.Sequential(nn.Linear(size.vision.width, size.llm.width))
        self.language_model = LanguageModel(size)

    def image_features(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Images [B,3,side,side] in -1..1 -> [B,tokens,width]."""
        features: Tensor = self.mlp1(self.vision_model.vision_model(images, dtype))
        return features.to(dtype)

    def embed(self, images: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """images [B,N,3,side,side], tokens [B,L] with N x tokens placeholders a row -> [B,L,width]: the words, and the
        images' features in the places of the placeholders, in order."""
        seen = self.image_features(images.flatten(0, 1), dtype).unflatten(0, images.shape[:2]).flatten(1, 2)
        place = tokens == self.image_token
        number = (place.long().cumsum(dim=1) - 1).clamp(min=0).unsqueeze(2).expand(-1, -1, seen.shape[2])
        words = self.language_model.lm_head(tokens).to(dtype)
        return torch.where(place.unsqueeze(2), seen.gather(1, number), words)

    def forward(self, embedded: Tensor, present: Tensor) -> Tensor:
        """embedded, present [B,L] -> hidden states after the last norm [B,L,width].

        Padding sees nothing: its attention is zero, as from flash attention. Positions count the words that are there,
        so that padding in front changes nothing.
        """
        positions = positions_of(present).clamp(min=0)
        hidden, _ = self.language_model.model(embedded, positions, causal_mask(present))
        assert isinstance(hidden, Tensor)
        return hidden


class Backbone(nn.Module):
    """Holds `eagle_model`."""

    def __init__(self, size: GrootSize) -> None:
        super().__init__()
        self.eagle_model = EagleModel(size)
