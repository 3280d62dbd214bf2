"""The optimizer, learning-rate schedules and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class AdamW:
    """Loshchilov and Hutter's AdamW by torch's fused kernel: bit-equal to `torch.optim.AdamW(fused=True)`, with
    its state in the same layout.

    Torch's class brings torch's compiler into the process at its first use, which takes half of the CPU time in which a
    trainer starts, and 70 MB; nothing here is compiled. groups: `params`, `lr` and `weight_decay` of each.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], *, betas: tuple[float, float]) -> None:
        self.param_groups = [{"betas": betas, "eps": 1e-8, **group} for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._rates = [group["lr"] for group in groups]

    def scale_lr(self, factor: float) -> None:
        """Set every group's learning rate to its initial one times the factor."""
        for group, rate in zip(self.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    @torch.no_grad()
    def step(self, taken: Tensor | None = None) -> None:
        """Update every parameter that has a gradient. taken: scalar float32; 0 leaves everything unchanged, so that the
        device decides whether a step is skipped and the host does not wait for it."""
        for group in self.param_groups:
            alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    alike.setdefault((p.device, p.dtype), []).append((p, p.grad))
            for pairs in alike.values():
                self._step(pairs, group, taken)

    def _step(self, pairs: Sequence[tuple[Tensor, Tensor]], group: dict[str, Any], taken: Tensor | None) -> None:
        """Call the kernel for parameters of one device and dtype, each with its gradient."""
        parameters = [p for p, _ in pairs]
        states = [self.state.get(p) or self._begin(p) for p in parameters]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1 if taken is None else taken)
        torch._fused_adamw_(
            parameters,
            [gradient for _, gradient in pairs],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=None if taken is None else 1 - taken,
        )

    def _begin(self, p: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        self.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        return self.state[p]

    def state_dict(self) -> dict[str, Any]:
        """In the layout of `torch.optim`; tensors are live, not copies."""
        numbers = {p: number for number, p in enumerate(self._parameters())}
        groups = [{**group, "params": [numbers[p] for p in group["params"]]} for group in self.param_groups]
        return {"state": {numbers[p]: dict(state) for p, state in self.state.items()}, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. ValueError: it is of other parameters."""
        parameters, groups = self._parameters(), state["param_groups"]
        sizes = [[len(group["params"]) for group in each] for each in (self.param_groups, groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"the optimizer's state is of groups of {sizes[1]} parameters, these are of {sizes[0]}")
        for number, saved in state["state"].items():
            found, wanted = tuple(saved["exp_avg"].shape), tuple(parameters[number].shape)
            if found != wanted:
                raise ValueError(f"the optimizer's state of parameter {number} is {found}, the parameter {wanted}")
        for own, group in zip(self.param_groups, groups, strict=True):
            own |= {name: group[name] for name in own if name != "params"}
        self.state = {
            parameters[number]: {name: x.to(parameters[number].device, copy=True) for name, x in saved.items()}
            for number, saved in state["state"].items()
        }

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


def adamw(
    module: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    value_lr: float | None = None,
) -> AdamW:
    """AdamW over the trainable parameters, in as few groups as possible; only matrices decay (no biases, norms or
    scales). value_lr: of the parameters of `module.critic` (ValueError: it has none); None for `lr`.
    """
    of_value: set[Tensor] = set()
    if value_lr is not None:
        critic = getattr(module, "critic", None)
        if not isinstance(critic, nn.Module):
            why = "the policy has no module `critic`; leave it out"
            raise ValueError(f"training.optimizer.value_lr = {value_lr}: {why}")
        of_value = set(critic.parameters())
    groups: dict[tuple[bool, bool], list[Tensor]] = {}
    for p in module.parameters():
        if p.requires_grad:
            groups.setdefault((p in of_value, not weight_decay or p.dim() < 2), []).append(p)
    return AdamW(
        [
            {"params": groups[key], "lr": value_lr if key[0] else lr, "weight_decay": 0.0 if key[1] else weight_decay}
            for key in sorted(groups)
        ],
        betas=betas,
    )


class GradientNorm(NamedTuple):
    """total: scalar; each [P]: of the parameters that have a gradient; places [P]: theirs among all parameters."""

    total: Tensor
    each: Tensor
    places: tuple[int, ...]


def clip_gradient(parameters: Iterable[Tensor], largest: float | None) -> GradientNorm:
    """Scale gradients to a global norm of at most `largest` (None: leave them); returns the norm before.

    To the bit what `nn.utils.clip_grad_norm_` does on one device, in a quarter of its time: a tenth of an update of a
    small policy went there.
    """
    given = {place: p.grad for place, p in enumerate(parameters) if p.grad is not None}
    gradients = list(given.values())
    each = torch.stack(torch._foreach_norm(gradients))
    norm: Tensor = torch.linalg.vector_norm(each)
    if largest is not None:
        torch._foreach_mul_(gradients, (largest / (norm + 1e-6)).clamp(max=1.0))
    return GradientNorm(norm, each, tuple(given))


def linear_decay(update: int, updates: int, final_fraction: float) -> float:
    """Factor on the learning rate of update 0..updates-1: 1 at the first, final_fraction at the last and beyond."""
    done = min(update / (updates - 1), 1.0) if updates > 1 else 0.0
    return 1.0 + (final_fraction - 1.0) * done


def warmup_cosine(step: int, steps: int, warmup_steps: int) -> float:
    """Factor on the learning rate of step 0..steps-1: linear up to 1 over the warm-up, then half a cosine to 0.

    Example, 4 steps of which 2 warm up: 0.5, 1, 1, 0.5 (the 0 would come with step 4, which is not done).
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / max(steps - warmup_steps, 1)))
