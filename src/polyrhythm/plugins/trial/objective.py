"""Tries the policy on real observations, and a custom loss and advantage on random entries, before the start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.algorithms import levels
from polyrhythm.algorithms.advantages import AdvantageInput, Advantages
from polyrhythm.algorithms.losses import LossInput, LossOutput
from polyrhythm.config.base import InvalidSetting
from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.config.sections.objectives import OwnFunction
from polyrhythm.conformance import ContractViolation, raised
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.trial.policy_calls import check_answers, check_published
from polyrhythm.plugins.trial.policy_contract import try_policy
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import PolicyForm
from polyrhythm.specs import INSTRUCTION, PROGRESS, EnvSpec
from polyrhythm.training.objective import advantage_estimate, policy_loss

#: Chunk steps of the two trial trajectories; the last chunk is cut short.
_STEPS = (3, 2)
#: Names of the learner's own metrics.
_TAKEN = {
    "ratio",
    "approx_kl",
    "proximal_approx_kl",
    "behav_approx_kl",
    "interpolation_error",
    "mismatch_weight",
    "reference_kl",
    "mismatch_kl",
    "policy_loss",
    "entropy_loss",
    "grad_norm",
    "early_stopped",
    "lr",
    "average_version",
    "current_version",
    "correction_weight",
    "correction_clip_fraction",
    "rejected_fraction",
    "zero_advantage_fraction",
}


def try_on(
    observations: Mapping[str, NDArray[Any]],
    kind: str,
    policy: Policy,
    form: PolicyForm,
    spec: EnvSpec,
    *,
    learns: bool,
) -> None:
    """Raise ConfigError unless the policy fulfils its contract on these rows and matches its form.

    kind: type of the policy; learns: from rewards.
    """
    obs = as_shown(observations, spec)
    try:
        try_policy(policy, obs, spec, learns=learns)
        check_answers(form, policy, obs)
        check_published(form, as_module(policy), "train")
    except ContractViolation as violation:
        raise ConfigError(f"policy.type = {kind}: {violation}") from violation


def as_shown(observations: Mapping[str, NDArray[Any]], spec: EnvSpec) -> dict[str, Tensor]:
    """The rows as policy input: instructions spread from the first to the last, progress 0."""
    rows = len(next(iter(observations.values())))
    shown = {name: torch.from_numpy(array) for name, array in observations.items()}
    instructions = torch.linspace(0, len(spec.tasks) - 1, rows).long()
    return {**shown, INSTRUCTION: instructions, PROGRESS: torch.zeros(rows)}


def dry_run_objective(algorithm: AlgorithmSettings, policy: Policy | PolicyForm) -> None:
    """Raise ConfigError if a custom loss or advantage violates its contract for the policy's chunk and action size."""
    valid = torch.ones(sum(_STEPS), policy.chunk, dtype=torch.bool)
    valid[-1, 1:] = False
    if isinstance(algorithm.loss, OwnFunction):
        _try_loss(algorithm, algorithm.loss, valid, policy.action_dim)
    if isinstance(algorithm.advantage, OwnFunction):
        _try_advantage(algorithm, algorithm.advantage, valid)


def _try_loss(algorithm: AlgorithmSettings, own: OwnFunction, valid: Tensor, action_dim: int) -> None:
    what = f"algorithm.loss.type = {own.type}"
    loss = _loaded("algorithm.loss", lambda: policy_loss(algorithm))
    mask = levels.mask(valid, algorithm.logprob_level, action_dim)
    logprob, proximal, behavior, advantage = (torch.where(mask, x, 0.0) for x in _noise(4, mask))
    entries = LossInput(logprob.requires_grad_(), proximal.clone(), behavior.clone(), advantage.clone(), mask)
    output = _called(what, loss, entries)
    if not isinstance(output, LossOutput):
        raise ConfigError(f"{what}: it returned {_name(output)}; return the loss per entry, or losses.LossOutput")
    _refuse_unlike(f"{what}: its loss", output.loss, mask)
    metrics = output.metrics
    if not isinstance(metrics, dict) or not all(isinstance(n, str) and n.isidentifier() for n in metrics):
        raise ConfigError(f"{what}: its metrics are {metrics!r:.60}; give a dict, name -> tensor")
    for name, metric in metrics.items():
        _refuse_unlike(f"{what}: its metric {name}", metric, mask)
        if metric.requires_grad:
            raise ConfigError(f"{what}: its metric {name} has a gradient; detach it")
        if name in _TAKEN:
            raise ConfigError(f"{what}: its metric {name} has the name of one of ours; rename it")
    if not output.loss.requires_grad:
        raise ConfigError(f"{what}: its loss does not depend on entries.logprob; nothing would be learned")
    _check_pure(what, output.loss, _called(what, loss, entries).loss, entries[1:4], (proximal, behavior, advantage))
    again = _called(what, loss, entries._replace(proximal=behavior))
    if not own.uses_proximal and not torch.equal(output.loss, again.loss):
        raise ConfigError(f"{what}: it reads entries.proximal; set algorithm.loss.uses_proximal true")


def _try_advantage(algorithm: AlgorithmSettings, own: OwnFunction, valid: Tensor) -> None:
    what = f"algorithm.advantage.type = {own.type}"
    estimate = _loaded("algorithm.advantage", lambda: advantage_estimate(algorithm))
    mask = levels.reward_mask(valid, algorithm.reward_level)
    rewards, penalty, values, log_ratio = (torch.where(mask, x, 0.0) for x in _noise(4, mask))
    trajectory = torch.repeat_interleave(torch.arange(len(_STEPS)), torch.tensor(_STEPS))
    ends, group = torch.zeros(len(_STEPS)), torch.zeros(len(_STEPS), dtype=torch.int64)
    copies = (rewards.clone(), penalty.clone(), values.clone())
    samples = AdvantageInput(*copies, mask, log_ratio, trajectory, ends, group)
    given = _called(what, estimate, samples)
    if not isinstance(given, Advantages):
        raise ConfigError(f"{what}: it returned {_name(given)}; return the advantages, or advantages.Advantages")
    _refuse_unlike(f"{what}: its advantages", given.advantages, mask)
    _refuse_unlike(f"{what}: its returns", given.returns, mask)
    once_more = _called(what, estimate, samples).advantages
    _check_pure(what, given.advantages, once_more, samples[:3], (rewards, penalty, values))
    again = _called(what, estimate, samples._replace(log_ratio=torch.zeros_like(log_ratio)))
    if not own.uses_proximal and not torch.equal(given.advantages, again.advantages):
        raise ConfigError(f"{what}: it reads samples.log_ratio; set algorithm.advantage.uses_proximal true")


def _loaded(section: str, load: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    try:
        return load()
    except InvalidSetting as refusal:
        raise ConfigError(f"{section}.{refusal}") from refusal


def _noise(count: int, like: Tensor) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [0.3 * torch.randn(like.shape, generator=rng) for _ in range(count)]


def _called(what: str, function: Callable[..., Any], argument: object) -> Any:
    try:
        return function(argument)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: it {raised(error)}; fix it there") from error


def _check_pure(what: str, first: Tensor, second: Tensor, given: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """ConfigError: the function is not deterministic, or changes its inputs."""
    if not all(torch.equal(a, b) for a, b in zip(given, before, strict=True)):
        raise ConfigError(f"{what}: it modifies its input; work on a copy")
    if not torch.equal(first, second):
        raise ConfigError(f"{what}: not deterministic: equal inputs, different outputs; use only its input")


def _refuse_unlike(what: str, given: object, mask: Tensor) -> None:
    if not isinstance(given, Tensor) or given.shape != mask.shape:
        raise ConfigError(f"{what} is {_name(given)}; expected a tensor {list(mask.shape)}, one number per entry")
    if not given.is_floating_point():
        raise ConfigError(f"{what} is of {given.dtype}; expected floating-point numbers")
    if not given.isfinite().all():
        raise ConfigError(f"{what} has NaN or infinity for ordinary entries; check the formula")


def _name(given: object) -> str:
    return f"a tensor {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
