"""Bytes that a policy's passes hold besides its weights: measured on a few rows, or traced without memory.

    probed    a small policy is built on the CPU and run on rows of zeros
    traced    the policy's outline runs on tensors without memory, for any size and row length
    unknown   the policy is large and has no outline, or failed

Two passes of a few rows determine the bytes for any number of rows (`meter.PassProfile`). Training is the forward and
backward pass of a micro-batch without parameter gradients, which are counted with the weights; it includes autocast's
copies of weights. The pass of a frozen part, which an update makes before, counts where it takes more. Bytes are those
of the CPU's kernels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from polyrhythm.pipeline.array_specs import shown
from polyrhythm.plugins.memory_estimate.meter import FakeMode, Meter, PassProfile, gradients_dropped, real_meter
from polyrhythm.policies.base import (
    OptionalSettings,
    Policy,
    PolicySettings,
    as_module,
    extended,
    extended_settings,
)
from polyrhythm.policies.constants import nothing_kept
from polyrhythm.policies.form import PolicyForm, Role, outlined
from polyrhythm.policies.traits import policy_traits, settings_traits
from polyrhythm.specs import ArraySpec, EnvSpec

#: Bytes of the largest policy that is probed.
PROBED_BYTES = 64 * 2**20
#: Rows of the two passes.
_FEW, _MORE = 4, 8


@dataclass(slots=True)
class Activations:
    """The passes of one policy, each run on first use. how: the method, in words.

    passes: run for real. acts_like: estimates of a policy that acts identically, whose acting passes are reused.
    """

    how: str
    passes: PolicyPasses
    acts_like: Activations | None = None
    _found: dict[str, PassProfile] = field(default_factory=dict)

    def training(self, rows: int) -> int:
        """Bytes of the forward and backward pass of a micro-batch, or of a frozen part's pass over as many rows."""
        most = self._profile("training", self.passes.training).peak(rows)
        if not self.passes.precomputed:
            return most
        return max(most, self._profile("precomputing", self.passes.precomputing).peak(rows))

    def acting(self, rows: int) -> int:
        """Bytes of `act`."""
        if self.acts_like is not None:
            return self.acts_like.acting(rows)
        return self._profile("acting", self.passes.acting).peak(rows)

    def kept(self, rows: int) -> int:
        """Bytes of the prefix that a pass keeps for all its denoise steps."""
        if self.acts_like is not None:
            return self.acts_like.kept(rows)
        return rows * self.passes.kept

    def precomputed(self, rows: int) -> int:
        """Bytes of the outputs of a frozen part that the trainer keeps."""
        return rows * self.passes.precomputed

    def _profile(self, name: str, run: Callable[[int], Meter]) -> PassProfile:
        if name not in self._found:
            self._found[name] = PassProfile((_FEW, run(_FEW)), (_MORE, run(_MORE)))
        return self._found[name]


class PolicyPasses:
    """Runs the passes of a policy. make: builds it by role; metered: the counting context around a pass."""

    def __init__(
        self,
        make: Callable[[Role], Policy],
        spec: EnvSpec,
        form: PolicyForm,
        inside: Callable[[], AbstractContextManager[object]],
        metered: Callable[[list[Tensor]], AbstractContextManager[Meter]],
    ) -> None:
        self._make, self._spec, self._form = make, spec, form
        self._inside, self._metered = inside, metered
        self._policies: dict[Role, Policy] = {}

    def policy(self, role: Role) -> Policy:
        if role not in self._policies:
            self._policies[role] = self._make(role)
            as_module(self._policies[role]).eval()
        return self._policies[role]

    def training(self, rows: int) -> Meter:
        """The outputs of a frozen part are given."""
        policy = self.policy("train")
        obs, answers = self._zeros(shown(self._spec), rows), self._zeros(self._form.answers, rows)
        if policy_traits(policy).precomputes:
            with self._inside():
                obs |= extended(policy).precompute(obs)
        module = as_module(policy)
        given = [*module.parameters(), *module.buffers(), *obs.values(), *answers.values()]
        with gradients_dropped(module), self._metered(given) as meter:
            longest = policy_traits(policy).counts_tokens
            found = (extended(policy).evaluate_longest if longest else policy.evaluate)(obs, answers)
            total = found.logprob.sum() + found.value.sum() + found.entropy.sum()
            if total.requires_grad:
                total.backward()
        return meter

    def precomputing(self, rows: int) -> Meter:
        """The pass of a frozen part."""
        policy, obs = self.policy("train"), self._zeros(shown(self._spec), rows)
        module = as_module(policy)
        with self._metered([*module.parameters(), *module.buffers(), *obs.values()]) as meter:
            extended(policy).precompute(obs)
        return meter

    def acting(self, rows: int) -> Meter:
        policy = self.policy("act")
        obs = self._zeros(shown(self._spec), rows)
        flags = self._zeros({"greedy": ArraySpec((), "bool"), "key": ArraySpec((), "int64")}, rows)
        module = as_module(policy)
        given = [*module.parameters(), *module.buffers(), *obs.values(), *flags.values()]
        with self._metered(given) as meter:
            if policy_traits(policy).counts_tokens:
                extended(policy).act_longest(obs)
            else:
                policy.act(obs, flags["greedy"], flags["key"])
        return meter

    @cached_property
    def kept(self) -> int:
        """Bytes per row of the prefix that a pass keeps."""
        policy = self.policy("act")
        return self._size_of(extended(policy).prefix_arrays if policy_traits(policy).keeps_prefix else None)

    @cached_property
    def precomputed(self) -> int:
        """Bytes per row of `precompute`'s output."""
        policy = self.policy("train")
        return self._size_of(extended(policy).precompute if policy_traits(policy).precomputes else None)

    def _size_of(self, function: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None) -> int:
        if function is None:
            return 0
        obs = self._zeros(shown(self._spec), 1)
        with self._inside():
            return sum(x.nbytes for x in function(obs).values())

    def _zeros(self, arrays: Mapping[str, ArraySpec], rows: int) -> dict[str, Tensor]:
        with self._inside():
            return {
                name: torch.zeros((rows, *array.shape), dtype=getattr(torch, array.dtype))
                for name, array in arrays.items()
            }


def estimate_activations(
    settings: PolicySettings, spec: EnvSpec, form: PolicyForm, probed_bytes: int = PROBED_BYTES
) -> Activations | str:
    """The passes of the policy, or a sentence on why they are unknown. Passes run when a number is requested.

    probed_bytes: of the largest policy that is built and run; larger ones are traced. Methods of the result raise any
    error of the policy.
    """
    outlines = settings_traits(settings).outlines
    if form.train_bytes <= probed_bytes and not (form.row_tokens and outlines):
        return _probed(settings, spec, form)
    if outlines:
        return _traced(extended_settings(settings), spec, form)
    size = f"{form.train_bytes / 1e6:,.0f} MB"
    return f"its settings have no outline(env_spec, *, role), and {size} are too large to be built for a probe"


def _probed(settings: PolicySettings, spec: EnvSpec, form: PolicyForm) -> Activations:
    def make(role: Role) -> Policy:
        with _random_state_kept():
            return settings.build(spec, seed=0, device="cpu", role=role)

    @contextmanager
    def metered(given: list[Tensor]) -> Iterator[Meter]:
        with _random_state_kept(), nothing_kept(), real_meter(given) as meter:
            yield meter

    return Activations("probed on the CPU", PolicyPasses(make, spec, form, nullcontext, metered))


@contextmanager
def _random_state_kept() -> Iterator[None]:
    python, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


def _traced(settings: OptionalSettings, spec: EnvSpec, form: PolicyForm) -> Activations:
    mode = FakeMode()

    def make(role: Role) -> Policy:
        policy = outlined(lambda: settings.outline(spec, role=role))
        mode.take(as_module(policy))
        return policy

    @contextmanager
    def inside() -> Iterator[None]:
        with nothing_kept(), mode:
            yield

    @contextmanager
    def metered(given: list[Tensor]) -> Iterator[Meter]:
        with nothing_kept(), mode.meter(given) as meter:
            yield meter

    return Activations("traced without memory", PolicyPasses(make, spec, form, inside, metered))
