"""Trajectories of the small adapted policy, for tests of the learner with a part frozen."""

from __future__ import annotations

import copy

import numpy as np
import torch
from tests.plugins.pretrained.adapted import SmallPolicy, SmallSettings
from tests.plugins.pretrained.test_adapting import SPEC
from torch import nn

from polyrhythm.specs import Trajectory


def small(**changes) -> SmallPolicy:
    return SmallSettings.model_validate(changes).build(SPEC, seed=0, device="cpu", role="train")


def collect(policy: SmallPolicy, lengths: tuple[int, ...] = (4, 1, 6, 3)) -> list[Trajectory]:
    """Trajectories that the policy acted; every second one is truncated, so its last observation is evaluated."""
    rng = np.random.default_rng(0)
    found = []
    for i, steps in enumerate(lengths):
        obs = {n: rng.normal(size=(steps + 1, *a.shape)).astype(a.dtype) for n, a in SPEC.observation.items()}
        shown = {name: torch.from_numpy(array[:-1]) for name, array in obs.items()}
        act = policy.act(shown, torch.zeros(steps, dtype=torch.bool), torch.arange(steps) + 100 * i)
        found.append(
            Trajectory(
                obs=obs,
                actions=act.actions.numpy(),
                logprob=act.logprob.numpy(),
                value=act.value.numpy(),
                forward_inputs={name: x.numpy() for name, x in act.forward_inputs.items()},
                rewards=(act.actions.numpy() == 0).mean(-1).astype(np.float32),
                valid=np.ones((steps, 1), dtype=np.bool_),
                version=np.zeros(steps, dtype=np.int64),
                terminated=i % 2 == 0,
                truncated=i % 2 == 1,
                success=False,
                env_steps=steps,
                ticket=i,
                group=i,
                task=0,
            )
        )
    return found


class Plain(nn.Module):
    """The small policy with nothing but what all policies have."""

    act, evaluate, value = SmallPolicy.act, SmallPolicy.evaluate, SmallPolicy.value
    prefix, heads = SmallPolicy.prefix, SmallPolicy.heads


def plain(policy):
    """A copy of the policy as a `Plain` one, with parameters of the same names."""
    other = Plain()
    other.__dict__.update(copy.deepcopy(policy).__dict__)
    return other
