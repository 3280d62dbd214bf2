"""A trainer's updates and a generator's pass by the account of torch's allocator, beside what the plan says of them.

    python -m tests.plugins.memory_estimate.measured RECIPE [section.key=value ...]

On a CUDA device, if there is one, the account is `torch.cuda.max_memory_allocated`; on the CPU it is made of the events
of its allocator in torch's profiler, to which the samples that numpy packs are added.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from polyrhythm.config.load import load_config
from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.array_specs import answer_specs, shown
from polyrhythm.pipeline.build import env_settings, policy_settings
from polyrhythm.pipeline.placed import place
from polyrhythm.plugins.memory_estimate.activations import Activations, estimate_activations
from polyrhythm.plugins.memory_estimate.needs import LENT, list_parts, longest_sample, pass_rows
from polyrhythm.policies.base import Policy, as_module, extended
from polyrhythm.policies.form import PolicyForm
from polyrhythm.policies.traits import policy_traits
from polyrhythm.runtime.devices import devices_here
from polyrhythm.runtime.memory.prefixes import Prefixes, PrefixSeat, row_specs
from polyrhythm.specs import EnvSpec, Trajectory
from polyrhythm.training.learner import Learner
from polyrhythm.training.steps import finish

CPU = torch.device("cpu")
#: Updates of one optimizer step, in two micro-batches or more.
SMALL = (
    "training.mini_batch_samples=2",
    "training.minibatch_steps=0",
    "training.micro_batch_steps=10",
    "training.epochs=1",
    "training.critic_warmup_updates=0",
)
#: Parts of a plan that neither an update nor a pass has here: of what stations send each other, and of a save.
_ELSEWHERE = (LENT, "published weights", "staging", "state while it is written", "pinned batches and chunks")


class Found(NamedTuple):
    """Bytes of a station: as planned, and as torch's allocator counted them."""

    planned: int
    held: int


class Run(NamedTuple):
    config: RunConfig
    spec: EnvSpec
    settings: Any
    form: PolicyForm
    device: torch.device

    @classmethod
    def of(cls, recipe: str, overrides: list[str], device: torch.device) -> Run:
        config = load_config(recipe, overrides)
        spec, settings = env_settings(config).spec(), policy_settings(config)
        return cls(config, spec, settings, settings.form(spec), device)

    @property
    def rows(self) -> int:
        """Rows of the generator's largest pass."""
        return pass_rows(self.config, self.spec, on_device=self.device.type == "cuda")

    def build(self, role: Any) -> Policy:
        policy: Policy = self.settings.build(self.spec, seed=0, device=str(self.device), role=role)
        as_module(policy).eval()
        return policy

    def planned(self, station: str) -> dict[str, int]:
        """Purpose -> bytes on the device, without `_ELSEWHERE`."""
        cuda = self.device.type == "cuda"
        found = estimate_activations(self.settings, self.spec, self.form)
        assert isinstance(found, Activations), found
        placed = place(self.config, devices=devices_here(int(cuda)))
        parts = list_parts(self.config, self.spec, self.form, placed, activations=found)
        where = "cuda:0" if cuda else "cpu"
        own = [part for part in parts if (part.station, part.device) == (station, where)]
        return {part.purpose: part.nbytes for part in own if part.purpose not in _ELSEWHERE}


def observations(run: Run, rows: int) -> dict[str, np.ndarray]:
    """Random observations; instruction 0, and rows of tokens as long as they may be."""
    rng, found = np.random.default_rng(0), {}
    for name, array in shown(run.spec).items():
        shape = (rows, *array.shape)
        if array.dtype == "uint8":
            found[name] = rng.integers(0, 256, shape, dtype=np.uint8)
        elif array.dtype.startswith("float"):
            found[name] = rng.random(shape).astype(array.dtype)
        else:
            found[name] = np.full(
                shape, run.spec.observation["tokens"].shape[0] if name == "length" else 0, array.dtype
            )
    return found


def samples(run: Run) -> list[Trajectory]:
    """The samples of an update, each as long as the longest; actions, log-probs and values are the policy's own."""
    policy, steps = run.build("act"), longest_sample(run.config, run.spec, run.form)
    found = []
    for index in range(run.config.training.batch_size):
        obs = observations(run, steps + 1)
        answers = _answers(run, policy, {name: x[:-1] for name, x in obs.items()})
        shape = (steps, run.form.chunk)
        found.append(
            Trajectory(
                obs=obs,
                actions=answers["actions"],
                logprob=answers["logprob"],
                value=answers["value"],
                forward_inputs={name: answers[f"input.{name}"] for name in run.form.answers},
                rewards=np.full(shape, index % 2, dtype=np.float32),
                valid=np.ones(shape, dtype=np.bool_),
                version=np.zeros(steps, dtype=np.int64),
                terminated=False,
                truncated=True,
                success=False,
                env_steps=steps * run.form.chunk,
                ticket=index,
                group=index // run.config.groups.size,
                task=0,
                newer=np.zeros(shape, dtype=np.int32) if policy_traits(policy).streams else None,
            )
        )
    return found


def _answers(run: Run, policy: Policy, obs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    rows = len(next(iter(obs.values())))
    if policy_traits(policy).counts_tokens:  # the longest messages
        specs = answer_specs(run.form, run.spec)
        zeros = {name: np.zeros((rows, *x.shape), x.dtype) for name, x in specs.items()}
        zeros = {name.replace("forward_inputs.", "input."): x for name, x in zeros.items()}
        zeros["input.message"] += next(token for token in range(9) if token not in run.spec.action.stops)
        return zeros
    pieces = []
    for first in range(0, rows, run.rows):
        own = {name: torch.from_numpy(x[first : first + run.rows]).to(run.device) for name, x in obs.items()}
        count = len(next(iter(own.values())))
        flags = torch.zeros(count, dtype=torch.bool, device=run.device)
        act = policy.act(own, flags, torch.arange(first, first + count, device=run.device))
        named = {"actions": act.actions, "logprob": act.logprob, "value": act.value}
        named |= {f"input.{name}": x for name, x in act.forward_inputs.items()}
        pieces.append({name: x.cpu().numpy() for name, x in named.items()})
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def update(run: Run) -> Found:
    """The trainer with two updates, and what is planned of it."""
    data = samples(run)
    before = _allocated(run.device)
    policy = run.build("train")
    config = run.config
    learner = Learner(policy, config.algorithm, config.training, total_updates=2, seed=0)
    learner.prefixes = _empty_pool(run, policy, data)
    held = _allocated(run.device) - before if run.device.type == "cuda" else _weights(as_module(policy))
    with _growth(run.device) as grown:
        for index in range(2):  # moments and gradients stay from the first one
            finish(learner.update(data, index))
    packed = sum(x.nbytes for one in data for x in _arrays(one)) if run.device.type == "cpu" else 0
    return Found(sum(run.planned("trainer").values()), held + grown[0] + packed)


def _empty_pool(run: Run, policy: Policy, data: list[Trajectory]) -> Prefixes | None:
    """A pool without prefixes, in which case all are computed; None if nothing is lent in this run."""
    if not policy_traits(policy).precomputes or not run.config.training.precomputed_mib:
        return None
    row = {name: torch.from_numpy(x[:1]).to(run.device) for name, x in data[0].obs.items()}
    with torch.no_grad():
        found = extended(policy).precompute(row)
    if not found:
        return None
    device = str(run.device)
    prefixes = Prefixes(
        PrefixSeat(f"measured {id(policy)}", shared=False, device=device, local=device), row_specs(found), int
    )
    prefixes.create(1, 2**30)
    for sample in data:
        sample.entries = np.full(sample.steps, 1)  # the pool has no slot for it
    return prefixes


def act(run: Run) -> Found:
    """A generator with its largest pass, and what is planned of it, but for its buffers."""
    before = _allocated(run.device)
    policy = run.build("act")
    held = _allocated(run.device) - before if run.device.type == "cuda" else _weights(as_module(policy))
    obs = {name: torch.from_numpy(x).to(run.device) for name, x in observations(run, run.rows).items()}
    flags = torch.zeros(run.rows, dtype=torch.bool, device=run.device)
    keys = torch.arange(run.rows, device=run.device)
    with torch.inference_mode(), _growth(run.device) as grown:
        if policy_traits(policy).counts_tokens:
            extended(policy).act_longest(obs)
        else:
            policy.act(obs, flags, keys)
    planned = run.planned("generator-0")
    return Found(sum(size for purpose, size in planned.items() if purpose != "batches"), held + grown[0])


def _arrays(sample: Trajectory) -> Iterator[np.ndarray]:
    yield from sample.obs.values()
    yield from sample.forward_inputs.values()
    yield from (sample.logprob, sample.value, sample.rewards, sample.valid, sample.version)


def _weights(module: nn.Module) -> int:
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(module)}
    return sum(storages.values())


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


@contextmanager
def _growth(device: torch.device) -> Iterator[list[int]]:
    """A list, to which the most bytes are added that torch's allocator gave out at a time inside the context."""
    found: list[int] = []
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        torch.cuda.synchronize(device)
        found.append(torch.cuda.max_memory_allocated(device) - before)
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        yield found
    assert profile.profiler is not None
    events = [x for x in profile.profiler.kineto_results.events() if x.name() == "[memory]"]
    events.sort(key=lambda x: x.start_ns())
    found.append(max(accumulate((x.nbytes() for x in events), initial=0)))


def main() -> None:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    run = Run.of(sys.argv[1], sys.argv[2:], device)
    for name, found in (("update", update(run)), ("act", act(run))):
        ratio = found.held / found.planned
        sys.stdout.write(f"{name}: planned {found.planned:,}, held {found.held:,}, ratio {ratio:.3f}\n")
    sys.stdout.write(f"{run.planned('trainer')}\n{run.planned('generator-0')}\n")


if __name__ == "__main__":
    main()
