"""Writes bench/results/frozen_prefix.md: an update with π0's frozen prefix computed in every epoch, once per sample by
the trainer, and once by the generator, which lends it.

    python bench/scripts/frozen_prefix.py [--device cuda] [--size released] [--repeats 5] [--out FILE]

The policy is π0 as `bench policies` has it (tiny: a million parameters), with `train: expert` and the method, epochs,
objective and minibatches of a run: 2 epochs are those of `metaworld_pi0`. All ways begin with the same weights and
samples, and take turns; times are medians of whole updates, in seconds of CPU for the CPU and of the clock for a GPU.
"""

from __future__ import annotations

import argparse
import datetime as dt
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.config.sections.learning import TrainingSettings
from polyrhythm.plugins.vla.flow_policy import FlowPolicy
from polyrhythm.policies.base import extended
from polyrhythm.runtime.memory.prefixes import Prefixes, PrefixSeat, row_specs
from polyrhythm.specs import INSTRUCTION, PROGRESS, Trajectory
from polyrhythm.specs.hashing import row_digests
from polyrhythm.stations.passes import Lending, act_by_precomputed
from polyrhythm.training.learner import Learner
from polyrhythm.training.steps import finish
from polyrhythm_bench.cases.policies import settings_of, spec_of
from polyrhythm_bench.harness.roofline import seconds as seconds_of

WAYS = ("in every epoch", "once, by the trainer", "lent by the generator")
SAMPLES, STEPS, EPOCHS = 8, 16, (1, 2, 4)


def build(size: str, device: str) -> FlowPolicy:
    settings = settings_of("pi0", size).model_copy(update={"train": "expert"})
    policy = settings.build(spec_of("pi0", size), seed=0, device=device, role="train")
    assert isinstance(policy, FlowPolicy)
    return policy


def observations(size: str) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Random observations of each sample, [steps + 1, ...]."""
    rng, spec, found = np.random.default_rng(0), spec_of("pi0", size), []
    for _ in range(SAMPLES):
        obs: dict[str, np.ndarray[Any, Any]] = {}
        for name, array in spec.observation.items():
            drawn = rng.normal(size=(STEPS + 1, *array.shape)) * (50 if array.dtype == "uint8" else 1)
            obs[name] = (drawn % 256 if array.dtype == "uint8" else drawn).astype(array.dtype)
        obs[INSTRUCTION] = np.full(STEPS + 1, len(found) % 2, np.int64)
        obs[PROGRESS] = np.linspace(0, 1, STEPS + 1, dtype=np.float32)
        found.append(obs)
    return found


def act(
    policy: FlowPolicy, obs: dict[str, np.ndarray[Any, Any]], number: int, lending: Lending | None = None
) -> Trajectory:
    """A sample as the generator answers it, in one pass."""
    device = policy.critic.norm.weight.device
    shown = {name: torch.from_numpy(array[:-1]).to(device) for name, array in obs.items()}
    inputs = (
        shown,
        torch.zeros(STEPS, dtype=torch.bool, device=device),
        torch.arange(STEPS, device=device) + 99 * number,
    )
    if lending is None:
        done = policy.act(*inputs)
    else:
        done, found = act_by_precomputed(policy, inputs)
        lending.pool.claim(lending.entries)
        lending.pool.write(lending.places(device), found)
        lending.pool.stamp(lending.entries, row_digests({name: array[:-1] for name, array in obs.items()}))
    rng = np.random.default_rng(number)

    def host(x: Tensor) -> np.ndarray[Any, Any]:
        return x.cpu().numpy()

    return Trajectory(
        obs=obs,
        actions=host(done.actions),
        logprob=host(done.logprob),
        value=host(done.value),
        forward_inputs={name: host(x) for name, x in done.forward_inputs.items()},
        rewards=rng.normal(size=(STEPS, policy.chunk)).astype(np.float32),
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


def prefixes_of(policy: FlowPolicy, shown: dict[str, np.ndarray[Any, Any]], device: str) -> Prefixes:
    """A pool with room for all samples."""
    row = {name: torch.from_numpy(array[:1]).to(device) for name, array in shown.items()}
    specs = row_specs(extended(policy).precompute(row))
    prefixes = Prefixes(PrefixSeat("frozen_prefix", shared=False, device=device, local=device), specs, lambda: 1)
    prefixes.create(SAMPLES * STEPS, 2**40)
    return prefixes


def measure(
    size: str, device: str, epochs: int, repeats: int, data: list[Trajectory], prefixes: Prefixes
) -> tuple[list[list[float]], float]:
    """Seconds of each way's updates, and the largest difference of a weight between the last two ways after them."""
    settings = {"versions": 1, "mini_batch_samples": SAMPLES, "minibatch_steps": 32, "micro_batch_steps": 16}
    training = TrainingSettings.model_validate({**settings, "epochs": epochs, "max_kl": None})
    algorithm, learners = AlgorithmSettings.model_validate({}), []
    for way in WAYS:
        policy = build(size, device)
        if way == WAYS[0]:
            policy.traits = replace(policy.traits, precomputes=False)
        learner = Learner(policy, algorithm, training, total_updates=99, seed=0)
        learner.prefixes = prefixes if way == WAYS[2] else None
        learners.append(learner)
    seconds: list[list[float]] = [[] for _ in WAYS]
    for repeat in range(repeats + 1):
        for own, learner in zip(seconds, learners, strict=True):
            took = seconds_of(partial(finish, learner.update(data, repeat)), torch.device(device))
            if repeat:  # the first warms up
                own.append(took)
    second, third = (dict(learner.policy.state_dict()) for learner in learners[1:])
    return seconds, max(float((second[name] - x).abs().max()) for name, x in third.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "frozen_prefix.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    policy, shown = build(given.size, given.device), observations(given.size)
    prefixes = prefixes_of(policy, shown[0], given.device)
    pool = prefixes.find()
    assert pool is not None
    passes: list[list[float]] = [[], []]
    for repeat in range(given.repeats + 1):
        for number, obs in enumerate(shown):
            lending = Lending(pool, np.arange(STEPS), np.arange(STEPS) * SAMPLES + number)
            for own, use in zip(passes, (None, lending), strict=True):
                took = seconds_of(partial(act, policy, obs, number, use), torch.device(given.device))
                if repeat:
                    own.append(took)
    data = [act(policy, obs, number) for number, obs in enumerate(shown)]
    rows, gaps = [], []
    for epochs in EPOCHS:
        found, gap = measure(given.size, given.device, epochs, given.repeats, data, prefixes)
        every, once, lent = map(statistics.median, found)
        spread = f"{min(found[2]):.2f} to {max(found[2]):.2f}"
        rows.append(f"| {epochs} | {every:.2f} | {once:.2f} | {lent:.2f} ({spread}) | **{once / lent:.2f}×** |")
        gaps.append(gap)
        print(rows[-1], flush=True)
    plain_s, lent_s = map(statistics.median, passes)
    flags = f"--device {given.device} --size {given.size} --repeats {given.repeats}"
    millions = sum(p.numel() for p in policy.network.parameters()) / 1e6
    trained = sum(p.numel() for p in policy.network.parameters() if p.requires_grad) / 1e6
    clock = "seconds of CPU, one thread" if given.device == "cpu" else torch.cuda.get_device_name()
    size, kept = f"{millions:.1f}M parameters, of which the expert's {trained:.1f}M", pool.nbytes / pool.slots / 2**10
    given.out.write_text(
        f"""# A frozen prefix, computed once

`python bench/scripts/frozen_prefix.py {flags}`, {dt.datetime.now().astimezone().date()}; torch {torch.__version__}.
Times: {clock}.

π0, {size} are trained. An update: {SAMPLES * STEPS} chunk steps, 32
per optimizer step, 16 per pass; medians of {given.repeats} updates of each way, in turns. Kept per
chunk step: {kept:.0f} KiB.

| epochs | {" [s] | ".join(WAYS)} [s] (least to most) | gain beside the trainer's |
|---|---|---|---|---|
{chr(10).join(rows)}

Largest difference of a weight between the last two ways after {given.repeats + 1} updates: {max(gaps):.1g}.
A generator's pass of {STEPS} rows takes {1e3 * lent_s:.1f} ms with lending, {1e3 * plain_s:.1f} ms without.
""",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
