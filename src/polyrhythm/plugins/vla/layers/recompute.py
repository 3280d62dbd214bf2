"""Runs a layer so that the backward pass computes its activations again, in place of keeping them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def run_layer(layer: nn.Module, *arguments: object, recompute: bool) -> Any:
    """`layer(*arguments)`. recompute: keep only the arguments for the backward pass, if there will be one."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(layer, *arguments, use_reentrant=False)
    return layer(*arguments)
