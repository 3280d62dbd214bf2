"""An update with a policy's frozen prefix computed in every epoch, once per sample by the trainer, and once by the
generator, which lends it: part of `bench policies`, and `bench/scripts/frozen_prefix.py`.

The method, epochs, objective and mini-batches are those of a run. One learner makes all updates: each begins with the
same weights and samples, and the ways take turns.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.config.sections.learning import TrainingSettings
from polyrhythm.policies.base import Act, Policy, as_module, extended
from polyrhythm.policies.traits import policy_traits
from polyrhythm.runtime.memory.prefixes import Prefixes, PrefixPool, PrefixSeat, row_specs
from polyrhythm.specs import INSTRUCTION, PROGRESS, EnvSpec, Trajectory
from polyrhythm.specs.hashing import row_digests
from polyrhythm.stations.passes import Lending, act_by_precomputed
from polyrhythm.training.learner import Learner
from polyrhythm.training.steps import finish
from polyrhythm_bench.harness.roofline import seconds

WAYS = ("every", "once", "lent")
SAMPLES, STEPS, EPOCHS = 8, 16, 2
#: Chunk steps of an optimizer step, and of a pass.
MINI, MICRO = 32, 16

Rows = dict[str, np.ndarray[Any, Any]]


class _Lent(NamedTuple):
    """Samples of an update, the pool that has their prefixes, and milliseconds of a generator's pass that lends and of
    one that does not."""

    samples: list[Trajectory]
    prefixes: Prefixes
    pool: PrefixPool
    lending_ms: float
    plain_ms: float


def measure(policy: Policy, spec: EnvSpec, device: torch.device, repeats: int, epochs: int = EPOCHS) -> dict[str, Any]:
    """Seconds of an update each way (`every_s`, `once_s`, `lent_s`: medians), `gain` of lending over the trainer's,
    `passes_s` of the forward and backward passes alone, which every way makes, `largest_difference` of a weight,
    `kept_kib` of a chunk step, and `lending_ms` and `plain_ms` of a generator's pass.

    policy: as in the trainer, with a frozen prefix. Its weights are those before when this returns.
    """
    lent = _lend(policy, spec, device, repeats)
    kept = lent.pool.nbytes / lent.pool.slots / 2**10
    about = {"epochs": epochs, "kept_kib": kept, "lending_ms": lent.lending_ms, "plain_ms": lent.plain_ms}
    return {**_updates(policy, device, repeats, epochs, lent), **about}


def _lend(policy: Policy, spec: EnvSpec, device: torch.device, repeats: int) -> _Lent:
    """Samples as a generator answers them, which lends their prefixes."""
    shown = _observations(spec)
    times: tuple[list[float], list[float]] = ([], [])
    row = {name: torch.from_numpy(array[:1]).to(device) for name, array in shown[0].items()}
    specs = row_specs(extended(policy).precompute(row))
    prefixes = Prefixes(PrefixSeat("bench", shared=False, device=str(device), local=str(device)), specs, lambda: 1)
    prefixes.create(SAMPLES * STEPS, 2**40)
    pool = prefixes.find()
    assert pool is not None
    samples = []
    for number, obs in enumerate(shown):
        lending = Lending(pool, np.arange(STEPS), np.arange(STEPS) * SAMPLES + number)
        for _ in range(repeats if number == 0 else 1):
            for own, use in zip(times, (lending, None), strict=True):
                own.append(seconds(partial(_act, policy, obs, number, device, use), device))
        samples.append(_sample(policy, obs, number, _act(policy, obs, number, device, None)))
    lending_ms, plain_ms = (1e3 * statistics.median(own) for own in times)
    return _Lent(samples, prefixes, pool, lending_ms, plain_ms)


def _updates(policy: Policy, device: torch.device, repeats: int, epochs: int, lent: _Lent) -> dict[str, Any]:
    given = {"versions": 1, "mini_batch_samples": SAMPLES, "minibatch_steps": MINI, "micro_batch_steps": MICRO}
    training = TrainingSettings.model_validate({**given, "epochs": epochs, "max_kl": None})
    learner = Learner(policy, AlgorithmSettings.model_validate({}), training, total_updates=99, seed=0)
    first, traits = copy.deepcopy(learner.state_dict()), policy_traits(policy)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    ends: dict[str, Mapping[str, Tensor]] = {}
    for repeat in range(repeats + 1):
        for way in WAYS:
            policy.traits = replace(traits, precomputes=way != "every")  # type: ignore[attr-defined]
            learner.prefixes = lent.prefixes if way == "lent" else None
            took = seconds(partial(finish, learner.update(lent.samples, 0)), device)
            if repeat:  # the first warms up
                times[way].append(took)
            else:
                ends[way] = {name: x.clone() for name, x in learner.published().items()}
            learner.load_state_dict(copy.deepcopy(first))
    policy.traits = traits  # type: ignore[attr-defined]
    found: dict[str, Any] = {f"{way}_s": statistics.median(own) for way, own in times.items()}
    found |= {"gain": found["once_s"] / found["lent_s"], "least_lent_s": min(times["lent"])}
    gaps = [(ends["once"][name] - x).abs().max() for name, x in ends["lent"].items()]
    found["largest_difference"] = float(max(gaps))
    return {**found, "passes_s": _passes_s(policy, device, repeats, epochs, lent)}


def _passes_s(policy: Policy, device: torch.device, repeats: int, epochs: int, lent: _Lent) -> float:
    """Seconds of an update's passes over prefixes that lie ready: one forward for the targets, and in each epoch one
    forward and backward of all chunk steps."""
    obs: dict[str, Tensor] = {name: x[:MICRO] for name, x in lent.pool.arrays.items()}
    obs[PROGRESS] = torch.linspace(0, 1, MICRO, device=device)
    kept = {name: torch.from_numpy(x).to(device) for name, x in lent.samples[0].forward_inputs.items()}
    module = as_module(policy)

    def forward() -> None:
        with torch.no_grad():
            policy.evaluate(obs, kept)

    def both() -> None:
        found = policy.evaluate(obs, kept)
        (found.logprob.sum() + found.value.sum() + found.entropy.sum()).backward()
        module.zero_grad(set_to_none=True)

    forward_s, both_s = (statistics.median(seconds(run, device) for _ in range(8 * repeats)) for run in (forward, both))
    return SAMPLES * STEPS // MICRO * (forward_s + epochs * both_s)


def _observations(spec: EnvSpec) -> list[Rows]:
    """Random observations of each sample, [steps + 1, ...]."""
    rng, found = np.random.default_rng(0), []
    for number in range(SAMPLES):
        obs: Rows = {}
        for name, array in spec.observation.items():
            drawn = rng.normal(size=(STEPS + 1, *array.shape)) * (50 if array.dtype == "uint8" else 1)
            obs[name] = (drawn % 256 if array.dtype == "uint8" else drawn).astype(array.dtype)
        obs[INSTRUCTION] = np.full(STEPS + 1, number % len(spec.tasks), np.int64)
        obs[PROGRESS] = np.linspace(0, 1, STEPS + 1, dtype=np.float32)
        found.append(obs)
    return found


def _act(policy: Policy, obs: Rows, number: int, device: torch.device, lending: Lending | None) -> Act:
    """A generator's pass over all chunk steps of a sample."""
    shown = {name: torch.from_numpy(array[:-1]).to(device) for name, array in obs.items()}
    greedy = torch.zeros(STEPS, dtype=torch.bool, device=device)
    inputs = shown, greedy, torch.arange(STEPS, device=device) + 99 * number
    if lending is None:
        return policy.act(*inputs)
    done, found = act_by_precomputed(policy, inputs)
    lending.pool.claim(lending.entries)
    lending.pool.write(lending.places(device), found)
    lending.pool.stamp(lending.entries, row_digests({name: array[:-1] for name, array in obs.items()}))
    return done


def _sample(policy: Policy, obs: Rows, number: int, act: Act) -> Trajectory:
    return Trajectory(
        obs=obs,
        actions=act.actions.cpu().numpy(),
        logprob=act.logprob.cpu().numpy(),
        value=act.value.cpu().numpy(),
        forward_inputs={name: x.cpu().numpy() for name, x in act.forward_inputs.items()},
        rewards=np.random.default_rng(number).normal(size=(STEPS, policy.chunk)).astype(np.float32),
        valid=np.ones((STEPS, policy.chunk), np.bool_),
        version=np.zeros(STEPS, np.int64),
        terminated=True,
        truncated=False,
        success=False,
        env_steps=STEPS,
        ticket=number,
        group=number,
        task=0,
        entries=np.arange(STEPS) * SAMPLES + number,
    )


_HEAD = """| epochs | in every epoch, s | once, by the trainer, s | lent by the generator, s | gain | passes alone, s |
|---|---|---|---|---|---|"""


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """One row for each result of `measure`. Gain: of lending, beside the trainer's."""
    rows = [
        f"| {x['epochs']} | {x['every_s']:.3g} | {x['once_s']:.3g} | {x['lent_s']:.3g} | **{x['gain']:.2f}×** "
        f"| {x['passes_s']:.3g} |"
        for x in found
    ]
    return "\n".join([_HEAD, *rows])
