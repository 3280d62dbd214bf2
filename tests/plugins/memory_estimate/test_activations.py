"""Estimated bytes of a pass for any rows, probed and traced; beside what torch counts: test_held.py."""

from __future__ import annotations

import random
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.long import long
from tests.plugins.memory_estimate.measured import CPU, Run

from polyrhythm.plugins.memory_estimate.activations import PROBED_BYTES, Activations, PolicyPasses, estimate_activations
from polyrhythm.plugins.memory_estimate.meter import FakeMode, Meter, PassProfile, real_meter
from polyrhythm.policies.form import PolicyForm
from polyrhythm.specs import EnvSpec

POLICIES = ("{type: tiny_vla}", "{type: pi0}", "{type: openvla_oft}", "{type: groot_n1d5}")
SMALL_PI0 = "{type: pi0, size: {layers: 1, vision_layers: 1}}"
LANGUAGE = "{type: causal_lm, layers: 2, width: 32, heads: 2, hidden: 64}"


def parts(policy: str) -> tuple[Any, EnvSpec, PolicyForm]:
    """Settings of the policy in a quickstart's environment, that environment's spec, and the policy's form."""
    run = Run.of("quickstart_lm" if "causal_lm" in policy else "quickstart", [f"policy={policy}"], CPU)
    return run.settings, run.spec, run.form


@cache
def estimated(policy: str, probed_bytes: int = PROBED_BYTES) -> Activations:
    found = estimate_activations(*parts(policy), probed_bytes)
    assert isinstance(found, Activations)
    return found


@pytest.mark.parametrize(
    "policy",
    [
        SMALL_PI0,
        pytest.param("{type: pi0}", marks=long(7, "a probe of pi0")),
        pytest.param("{type: openvla_oft, train: expert}", marks=long(8, "a probe of OpenVLA-OFT")),
    ],
)
def test_a_trace_without_memory_says_what_a_probe_says(policy: str) -> None:
    probed, traced = estimated(policy), estimated(policy, probed_bytes=0)
    for rows in (5, 300):
        assert traced.training(rows) == pytest.approx(probed.training(rows), rel=0.01)
        assert traced.acting(rows) == pytest.approx(probed.acting(rows), rel=0.01)
    assert traced.kept(7) == probed.kept(7)
    assert traced.precomputed(7) == probed.precomputed(7)


@pytest.mark.parametrize(
    "policy",
    [
        *POLICIES[:2],
        *(pytest.param(one, marks=long(3, one)) for one in POLICIES[2:]),
        pytest.param("{type: pi0, gradient_checkpointing: true}", marks=long(3, "gradient checkpointing")),
    ],
)
def test_two_passes_tell_the_bytes_of_any_rows(policy: str) -> None:
    found = estimated(policy)
    for rows in (3, 50):
        assert found.training(rows) == pytest.approx(found.passes.training(rows).peak, rel=1e-3)
        assert found.acting(rows) == pytest.approx(found.passes.acting(rows).peak, rel=1e-3)
    assert found.training(0) == found.acting(0) == 0


def test_checkpointing_and_training_less_take_less() -> None:
    size = "size: {layers: 4, vision_layers: 4}"
    whole = estimated(f"{{type: pi0, {size}}}").training(64)
    assert estimated(f"{{type: pi0, {size}, gradient_checkpointing: true}}").training(64) < whole / 2
    assert estimated(f"{{type: pi0, {size}, train: expert}}").training(64) < whole / 2


def test_keys_and_values_are_a_part_of_a_pass_of_flow_policies() -> None:
    pi0 = estimated("{type: pi0}")
    assert 0 < pi0.kept(8) < pi0.acting(8)
    assert pi0.kept(8) == 8 * pi0.kept(1)
    assert estimated("{type: tiny_vla}").kept(8) == 0


def test_rows_of_tokens_count_as_the_longest_ones() -> None:
    settings, spec, form = parts(LANGUAGE)
    found = estimated(LANGUAGE)
    assert found.how == "traced without memory"
    states = 2 * 2 * 32 * 4  # keys and values of two layers
    assert form.row_cache == (36 + 128) * states
    assert form.row_tokens == 36 + 128 - 1
    assert found.acting(8) > 8 * form.row_cache
    made = settings.build(spec, seed=0, device="cpu", role="train")
    pass_of = PolicyPasses(lambda _: made, spec, form, nullcontext, real_meter)
    assert found.training(6) == pytest.approx(pass_of.training(6).peak, rel=0.02)


def test_only_a_frozen_part_is_precomputed() -> None:
    assert estimated("{type: pi0}").precomputed(4) == 0
    expert = estimated("{type: pi0, train: expert}")
    assert expert.precomputed(4) >= expert.kept(4) > 0


@long(5, "a trace of the released pi0")
def test_the_released_size_is_traced_in_bounded_memory() -> None:
    settings, spec, form = parts("{type: pi0, size: released, train: head}")
    found = estimate_activations(settings, spec, form)
    assert isinstance(found, Activations)
    assert found.how == "traced without memory"
    assert form.train_bytes > 6e9
    before = _resident()
    assert 1e8 < found.acting(4) < 1e9
    assert _resident() - before < 1e9


def test_a_large_policy_without_an_outline_is_not_built() -> None:
    found = estimate_activations(*parts("{type: tiny_vla}"), probed_bytes=1000)
    assert isinstance(found, str)
    assert "outline" in found


def test_a_probe_leaves_random_state_and_kept_constants_alone() -> None:
    settings, spec, _ = parts(SMALL_PI0)
    states = (torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    for found in (estimated(SMALL_PI0), estimated(SMALL_PI0, probed_bytes=0)):
        found.training(4)
        found.acting(4)
    after = (torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(states[0], after[0])
    assert states[1:] == after[1:]
    # Constants that a trace made on its tensors without memory must not be met here.
    policy = settings.build(spec, seed=0, device="cpu", role="act")
    obs = {name: torch.zeros((2, *x.shape), dtype=getattr(torch, x.dtype)) for name, x in _shown(spec).items()}
    assert policy.act(obs, torch.zeros(2, dtype=torch.bool), torch.arange(2)).logprob.isfinite().all()


def test_the_meter_counts_memory_once_while_it_is_held() -> None:
    given = torch.zeros(100)
    with real_meter([given]) as meter:
        a = given + 1
        b = a.view(10, 10)
        c = a.add_(1)
        del a, b, c
        given[:50] * 2
    assert meter.changes == [400, -400, 200, -200]
    assert meter.peak == 400


def test_memory_that_is_freed_later_does_not_count() -> None:
    with FakeMode().meter([]) as meter:
        kept = torch.zeros(10**12)
    del kept
    assert meter.peak == 4 * 10**12
    assert meter.changes == [4 * 10**12]


def test_the_peak_of_other_rows_may_be_at_another_operation() -> None:
    def of(rows: int) -> Meter:
        meter = Meter([])
        meter.changes, meter.causes = [1000, -1000, 10 * rows, -10 * rows], ["fixed", None, "by row", None]
        return meter

    profile = PassProfile((4, of(4)), (8, of(8)))
    assert [profile.peak(rows) for rows in (0, 1, 99, 101, 1000)] == [0, 1000, 1000, 1010, 10_000]


def test_a_stretch_with_more_operations_for_more_rows_counts_by_its_peak() -> None:
    def of(rows: int) -> Meter:
        meter = Meter([])
        meter.changes = [100, *[5, -5] * (rows // 4), 10 * rows, -10 * rows]
        meter.causes = ["weights", *["piece", None] * (rows // 4), "whole", None]
        return meter

    profile = PassProfile((4, of(4)), (8, of(8)))
    assert profile.peak(100) == 1100


def _shown(spec: object) -> dict:
    from polyrhythm.pipeline.array_specs import shown

    return dict(shown(spec))  # type: ignore[arg-type]


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)
