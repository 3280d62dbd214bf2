"""What is trained of a language model: all of it, or adapters; and layers that are computed again in the backward pass.

The mechanism (`plugins.pretrained.adapting`) is applied to the model of transformers, so names of tensors are those of
its folder.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from polyrhythm.plugins.pretrained.adapting import Adaptation, LoraSettings
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.policies.form import Role


def adapt(model: nn.Module, train: str, lora: LoraSettings, role: Role, seed: int) -> None:
    """Set what is trained and published of the model, and add its adapters; their values are drawn from `seed`.

    Without `lora.targets` all linear layers but that of the logits get one. ValueError: there is no such layer.
    """
    output = model.get_output_embeddings()  # type: ignore[operator]
    inner = tuple(
        f"{path}.weight" for path, part in model.named_modules() if isinstance(part, nn.Linear) and part is not output
    )
    how = Adaptation(train, {"lora": inner}, Precision(torch.float32), lora=lora)  # type: ignore[arg-type]
    how.prepare(model, role)
    how.finish(model, role, seed)


def recompute_layers(model: nn.Module) -> None:
    """Let each decoder layer keep its input alone, and compute the rest again in the backward pass. That of
    transformers works in training mode only, in which dropout would change log-probs. ValueError: it has none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"policy.gradient_checkpointing = true: {type(model).__name__} has no layers that can be computed again; "
            "set it to false"
        )
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    return checkpoint(forward, *inputs, use_reentrant=False, **options)
