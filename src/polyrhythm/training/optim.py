"""The optimizer, learning-rate schedules and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from polyrhythm.policies.traits import policy_traits
from polyrhythm.training.ranks import ONE_RANK, Ranks

if TYPE_CHECKING:
    from polyrhythm.config.sections.learning import OptimizerSettings, ParameterGroup

#: Name pattern of the parameters that `value_lr` is for.
_CRITIC = "critic.*"
_MOMENTS = ("exp_avg", "exp_avg_sq")
#: Bytes of parameters whose moments are on the device at a time where they are kept on the host.
PIECE_BYTES = 256 * 2**20


class AdamW:
    """AdamW (Loshchilov and Hutter) by torch's fused kernel: bit-equal to `torch.optim.AdamW(fused=True)`, with the
    same state layout.

    Torch's class imports torch's compiler at its first use, which takes half of a trainer's CPU time at start, and 70
    MB; nothing here is compiled. groups: `params`, `lr` and `weight_decay` of each. ranks: whose parts of sharded
    parameters it steps. offload: the moments are in host memory (pinned if the parameters are on a GPU) and on the
    parameters' device only during a step, `PIECE_BYTES` bytes of parameters at a time; bit-equal results.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        betas: tuple[float, float],
        offload: bool = False,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.offload, self._ranks = offload, ranks
        self.param_groups = [{"betas": betas, "eps": 1e-8, **group} for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._rates = [group["lr"] for group in groups]

    def scale_lr(self, factor: float) -> None:
        """Set every group's learning rate to its initial one times the factor."""
        for group, rate in zip(self.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor

    def steps(self) -> int:
        """Steps taken, of the parameter with the most; waits for the device."""
        return max((int(state["step"]) for state in self.state.values()), default=0)

    def zero_grad(self) -> None:
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
            for pairs in alike.values():  # p may be sharded over ranks: then each rank steps its own part
                for piece in self._pieces(pairs) if self.offload else [pairs]:
                    self._step(piece, group, taken)

    def _step(self, pairs: Sequence[tuple[Tensor, Tensor]], group: dict[str, Any], taken: Tensor | None) -> None:
        """Call the kernel for parameters of one device and dtype, each with its gradient."""
        states = [self.state.get(p) or self._begin(p) for p, _ in pairs]
        steps = [state["step"] for state in states]
        means, squares = (self._fetched([state[name] for state in states], pairs) for name in _MOMENTS)
        torch._foreach_add_(steps, 1 if taken is None else taken)
        torch._fused_adamw_(
            self._ranks.parts([p for p, _ in pairs]),
            self._ranks.parts([gradient for _, gradient in pairs]),
            means,
            squares,
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
        if self.offload:
            for state, mean, square in zip(states, means, squares, strict=True):
                state["exp_avg"].copy_(mean, non_blocking=True)
                state["exp_avg_sq"].copy_(square, non_blocking=True)

    def _fetched(self, moments: list[Tensor], pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The moments on their parameters' device: copies if moments are kept on the host."""
        if not self.offload:
            return moments
        return [x.to(p.device, non_blocking=True, copy=True) for x, (p, _) in zip(moments, pairs, strict=True)]

    def _begin(self, p: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        self.state[p] = {"step": step} | {name: self._kept(torch.zeros_like(self._ranks.part(p))) for name in _MOMENTS}
        return self.state[p]

    def _kept(self, moment: Tensor) -> Tensor:
        """Copy of the moment where moments are kept; the moment itself without offload."""
        if not self.offload:
            return moment
        kept = torch.empty_like(moment, device="cpu", pin_memory=moment.is_cuda)
        return kept.copy_(moment)

    def state_dict(self) -> dict[str, Any]:
        """In the layout of `torch.optim`; tensors are live, not copies, and moments sharded as their parameters are."""
        if self.offload and torch.cuda.is_available():
            torch.cuda.synchronize()  # copies to the host that are under way
        numbers = {p: number for number, p in enumerate(self._parameters())}
        groups = [{**group, "params": [numbers[p] for p in group["params"]]} for group in self.param_groups]
        states = {
            numbers[p]: {name: self._ranks.join(x, p) if name in _MOMENTS else x for name, x in state.items()}
            for p, state in self.state.items()
        }
        return {"state": states, "param_groups": groups}

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
        self.state = {}
        for number, saved in state["state"].items():
            p = parameters[number]
            moments = {name: self._ranks.part(saved[name], p) for name in _MOMENTS}
            own = {name: x.to(p.device, copy=True) for name, x in moments.items()}
            own["step"] = saved["step"].to(p.device, copy=True)
            self.state[p] = own | {name: self._kept(own[name]) for name in _MOMENTS}

    def moments_like(self) -> dict[int, dict[str, Tensor]]:
        """Parameter number → moment name → the parameter with the moment's shape and sharding."""
        return {number: dict.fromkeys(_MOMENTS, p) for number, p in enumerate(self._parameters())}

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _pieces(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """The pairs in order, in lists of at most `PIECE_BYTES` bytes of parameters (or one parameter)."""
        piece: list[tuple[Tensor, Tensor]] = []
        size = 0
        for p, gradient in pairs:
            nbytes = self._ranks.part(p).nbytes
            if piece and size + nbytes > PIECE_BYTES:
                yield piece
                piece, size = [], 0
            piece.append((p, gradient))
            size += nbytes
        yield piece


def adamw(module: nn.Module, settings: OptimizerSettings, ranks: Ranks = ONE_RANK) -> AdamW:
    """AdamW over the trainable parameters, in as few groups as possible; only matrices decay (no biases, norms or
    scales). settings.groups: other rates by name pattern, the first that matches; value_lr: a last such group for
    `critic.*`. ValueError: a pattern matches no trainable parameter.
    """
    lr, weight_decay, value_lr, groups = settings.lr, settings.weight_decay, settings.value_lr, settings.groups
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    check_patterns(list(trainable), groups, value_lr, has_critic=policy_traits(module).critic)
    rates = [(lr, weight_decay), (value_lr, weight_decay)]
    rates += [
        (lr if g.lr is None else g.lr, weight_decay if g.weight_decay is None else g.weight_decay) for g in groups
    ]
    found: dict[tuple[int, bool], list[Tensor]] = {}
    for name, p in trainable.items():
        own = next((i for i, g in enumerate(groups, 2) if any(fnmatchcase(name, pattern) for pattern in g.match)), None)
        index = own or int(value_lr is not None and fnmatchcase(name, _CRITIC))
        found.setdefault((index, not rates[index][1] or p.dim() < 2), []).append(p)
    made = [
        {"params": found[key], "lr": rates[key[0]][0], "weight_decay": 0.0 if key[1] else rates[key[0]][1]}
        for key in sorted(found)
    ]
    return AdamW(made, betas=settings.betas, offload=settings.offload, ranks=ranks)


def check_patterns(
    names: Sequence[str], groups: Sequence[ParameterGroup], value_lr: float | None, *, has_critic: bool
) -> None:
    """ValueError: a pattern matches no name of a trainable parameter, or value_lr is set without a critic."""
    if value_lr is not None and not has_critic:
        why = "the policy has no module `critic`; leave it out"
        raise ValueError(f"training.optimizer.value_lr = {value_lr}: {why}")
    for index, group in enumerate(groups):
        for pattern in group.match:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"training.optimizer.groups.{index}.match = {pattern}: matches none of the {len(names)} trainable "
                    f"parameters; they are named like {names[0]}"
                )


class GradientNorm(NamedTuple):
    """total: scalar; each [P]: norms of the parameters that have a gradient; places [P]: their indices
    among all parameters."""

    total: Tensor
    each: Tensor
    places: tuple[int, ...]


def clip_gradient(parameters: Iterable[Tensor], largest: float | None, ranks: Ranks = ONE_RANK) -> GradientNorm:
    """Scale gradients to a global norm of at most `largest` (None: leave them); returns the norm before.

    Bit-equal to `nn.utils.clip_grad_norm_` on one device, in a quarter of its time, which was a tenth of an update of a
    small policy.
    """
    given = {place: p.grad for place, p in enumerate(parameters) if p.grad is not None}
    gradients = ranks.parts(list(given.values()))
    each = ranks.norms(torch.stack(torch._foreach_norm(gradients)))
    norm: Tensor = torch.linalg.vector_norm(each)
    if largest is not None:
        torch._foreach_mul_(gradients, (largest / (norm + 1e-6)).clamp(max=1.0))
    return GradientNorm(norm, each, tuple(given))


def scale_gradient(parameters: Iterable[Tensor], factor: float, ranks: Ranks) -> None:
    torch._foreach_mul_(ranks.parts([p.grad for p in parameters if p.grad is not None]), factor)


def linear_decay(update: int, updates: int, final_fraction: float) -> float:
    """Factor on the learning rate of update 0..updates-1: 1 at the first, final_fraction at the last and beyond."""
    done = min(update / (updates - 1), 1.0) if updates > 1 else 0.0
    return 1.0 + (final_fraction - 1.0) * done


def linear_warmup(update: int, warmup_updates: int) -> float:
    """Factor on the learning rate of update 0 and those after it: with 2 updates of warm-up ½, 1, 1, …"""
    return min((update + 1) / warmup_updates, 1.0) if warmup_updates else 1.0


def warmup_cosine(step: int, steps: int, warmup_steps: int) -> float:
    """Factor on the learning rate of step 0..steps-1: linear up to 1 over the warm-up, then half a cosine to 0.

    Example, 4 steps of which 2 warm up: 0.5, 1, 1, 0.5 (the 0 would come with step 4, which is not done).
    """
    if step < warmup_steps:
        return linear_warmup(step, warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / max(steps - warmup_steps, 1)))
