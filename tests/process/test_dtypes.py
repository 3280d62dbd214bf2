"""A generator in bfloat16 beside a trainer in float32: what it answers, and with which weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from contextlib import closing

import numpy as np
import pytest
import torch
from tests.process.half import HalfSettings
from tests.process.runs import LOCKSTEP, config

from polyrhythm.errors import RunHalted
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.observers.base import ALL_RECORDS, Observer
from polyrhythm.pipeline.persistence.checkpoints import STATES
from polyrhythm.policies.form import load_published
from polyrhythm.scheduler import records
from polyrhythm.specs import Trajectory
from polyrhythm.training.checkpoint import load_state

HALF = {"type": "tests.process.half:HalfSettings", "hidden": 16}
VERSIONS = 3
#: The one bucket of the run's passes.
PASS_ROWS = 16


class Witness(Observer):
    """Copies every finished sample, and every version while it can be read."""

    hears = ALL_RECORDS

    def __init__(self, pipeline) -> None:
        self._pipeline = pipeline
        self.samples: list[Trajectory] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        version, weights = self._pipeline.weights.read()
        self.weights.setdefault(version, {name: tensor.clone() for name, tensor in weights.items()})
        if isinstance(event, records.SampleFinished):
            self.samples.append(copy.deepcopy(self._pipeline.launcher.payloads.arena.trajectory(int(event.payload_id))))


def logprobs(policy, sample):
    """What the policy says of the actions that the sample's steps took, in passes of as many rows as the run's."""
    count = len(sample.version)
    found = []
    for first in range(0, count, PASS_ROWS):
        rows = np.minimum(np.arange(first, first + PASS_ROWS), count - 1)
        obs = {name: torch.from_numpy(array[rows]) for name, array in sample.obs.items()}
        inputs = {name: torch.from_numpy(array[rows]) for name, array in sample.forward_inputs.items()}
        with torch.inference_mode():
            found.append(policy.evaluate(obs, inputs).logprob[: count - first])
    return torch.cat(found)


@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_replies_are_computed_by_the_published_bfloat16_weights(launcher, tmp_path):
    settings = config(LOCKSTEP, launcher=launcher, policy=HALF, training={"versions": VERSIONS})
    spec = settings.env.spec()
    with closing(build_pipeline(RunContext(settings, folder=tmp_path))) as pipeline:
        witness = Witness(pipeline)
        pipeline.loop.add_observers(witness)
        pipeline.loop.train_until(VERSIONS)
        version, published = pipeline.weights.read()
    assert version == VERSIONS
    newest = load_state(max((tmp_path / STATES).glob("trainer-*.pt")))
    assert {tensor.dtype for tensor in newest["policy"].values()} == {torch.float32}
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    for name, tensor in newest["policy"].items():
        assert torch.equal(published[name], tensor.to(torch.bfloat16)), name
    assert any(bool((tensor != tensor.to(torch.bfloat16)).any()) for tensor in newest["policy"].values())

    acting = HalfSettings(hidden=16).build(spec, seed=9, device="cpu", role="act")
    gaps = dict.fromkeys(itertools.product(range(VERSIONS), repeat=2), 0.0)
    for sample, (told, tried) in itertools.product(witness.samples, gaps):
        of_it = torch.from_numpy(sample.version == told)
        if bool(of_it.any()):
            load_published(acting, witness.weights[tried])
            gap = logprobs(acting, sample) - torch.from_numpy(sample.logprob.copy())
            gaps[told, tried] += float(gap[of_it].abs().sum())
    for told in range(VERSIONS):
        others = [gaps[told, tried] for tried in range(VERSIONS) if tried != told]
        assert gaps[told, told] == 0, "the reply's version is the one that computed it, rounded to bfloat16"
        assert min(others) > 0


def test_the_first_weights_of_the_trainer_are_not_rounded(tmp_path):
    settings = config(LOCKSTEP, launcher="inline", policy=HALF)
    first = HalfSettings(hidden=16).build(settings.env.spec(), seed=settings.seed, device="cpu", role="train")
    with closing(build_pipeline(RunContext(settings, folder=tmp_path))) as pipeline:
        assert pipeline.weights.read()[0] == 0
    state = load_state(tmp_path / STATES / "trainer-00000000.pt")["policy"]
    assert all(torch.equal(tensor, state[name]) for name, tensor in first.state_dict().items())


@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_a_module_that_does_not_fit_the_layout_ends_the_start_with_a_sentence(launcher, tmp_path):
    settings = config(LOCKSTEP, launcher=launcher, policy={"type": "tests.process.half:FullSettings", "hidden": 16})
    said = (
        r"policy.type = tests.process.half:FullSettings: build\(role='act'\) has actor.linears.0.weight as float32 "
        r"\[16, 4\], form\(\) publishes bfloat16 \[16, 4\]; make both the same"
    )
    with pytest.raises(RunHalted, match=said):
        build_pipeline(RunContext(settings, folder=tmp_path))
