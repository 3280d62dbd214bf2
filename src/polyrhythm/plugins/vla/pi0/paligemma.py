"""PaliGemma and the action expert as the release nests them: these modules only hold others under released names."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from polyrhythm.plugins.vla.layers.decoder import Decoder
from polyrhythm.plugins.vla.layers.siglip import SiglipVisionModel
from polyrhythm.plugins.vla.pi0.size import Pi0Size


class VisionTower(nn.Module):
    """Holds `vision_model`."""

    def __init__(self, size: Pi0Size) -> None:
        super().__init__()
        self.vision_model = SiglipVisionModel(size.vision)


class Projector(nn.Module):
    """Holds `linear`, from image features to the language model's width."""

    def __init__(self, size: Pi0Size) -> None:
        super().__init__()
        self.linear = nn.Linear(size.vision.width, size.vlm.width)


class PaliGemmaModel(nn.Module):
    """Vision tower, projector and language model."""

    def __init__(self, size: Pi0Size) -> None:
        super().__init__()
        self.vision_tower = VisionTower(size)
        self.multi_modal_projector = Projector(size)
        self.language_model = Decoder(size.vlm)


class PaliGemma(nn.Module):
    """The model and `lm_head`, which is the word embedding: the release stores it under this name alone."""

    def __init__(self, size: Pi0Size) -> None:
        super().__init__()
        self.model = PaliGemmaModel(size)
        self.lm_head = nn.Embedding(size.vocabulary, size.vlm.width)

    def image_features(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Images [B,3,side,side] in -1..1 -> [B,tokens,width] in `dtype`, not scaled."""
        seen = self.model.vision_tower.vision_model(images, dtype)
        features: Tensor = self.model.multi_modal_projector.linear(seen)
        return features.to(dtype)

    def word_features(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Ids [B,L] -> embeddings times √width [B,L,width] in `dtype`."""
        features: Tensor = self.lm_head(tokens).to(dtype) * math.sqrt(self.lm_head.embedding_dim)
        return features


class GemmaExpert(nn.Module):
    """The action expert, and an output layer that nothing uses but every released checkpoint has."""

    def __init__(self, size: Pi0Size) -> None:
        super().__init__()
        self.model = Decoder(size.expert)
        self.lm_head = nn.Linear(size.expert.width, size.expert_vocabulary, bias=False)


class PaliGemmaWithExpert(nn.Module):
    """Holds both."""

    def __init__(self, size: Pi0Size) -> None:
        super().__init__()
        self.paligemma = PaliGemma(size)
        self.gemma_expert = GemmaExpert(size)
