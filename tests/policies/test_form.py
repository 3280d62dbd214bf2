"""A declared form: made without memory, random numbers or torch's compiler; refused where the module is not so."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from tests.built import built
from tests.pipeline.broken_policies import BrokenSettings
from tests.plugins.trial.test_policy_contract import CASES, CONTINUOUS, FLAT, TASKS

from polyrhythm.conformance import ContractViolation, run_checks
from polyrhythm.plugins.trial import policy_contract as conformance
from polyrhythm.policies.base import as_settings
from polyrhythm.policies.form import describe, published_state
from polyrhythm.policies.gaussian import GaussianSettings
from polyrhythm.specs import EnvSpec, WeightSpec
from polyrhythm.specs.weights import weight_specs

SPEC = EnvSpec(FLAT, CONTINUOUS, TASKS, 50)


@pytest.mark.parametrize("name", CASES)
def test_a_form_has_the_modules_names_shapes_dtypes_and_counts(name):
    case = CASES[name]
    form, policy = case.settings.form(case.spec), built(case.settings, case.spec)
    assert form.published == weight_specs(published_state(policy))
    assert list(form.published) == list(published_state(policy))
    assert {name for name, p in policy.named_parameters() if p.requires_grad} <= form.published.keys()
    assert form.parameters == sum(p.numel() for p in policy.parameters())
    assert form.act_bytes == sum(x.nbytes for x in (*policy.parameters(), *policy.buffers()))
    assert (form.chunk, form.action_dim) == (policy.chunk, policy.action_dim)


def test_describing_leaves_random_numbers_alone():
    before = torch.get_rng_state()
    GaussianSettings().form(SPEC)
    assert torch.equal(torch.get_rng_state(), before)


class Vast(torch.nn.Module):
    """20 billion parameters, initialised in ways of all kinds."""

    def __init__(self, role="train"):
        super().__init__()
        self.chunk, self.action_dim = 4, 7
        self.layers = torch.nn.ModuleList(torch.nn.Linear(25_000, 20_000) for _ in range(40))
        self.layers.requires_grad_(False)
        self.adapter = torch.nn.Parameter(torch.randn(1000, 16) * 0.02 + 1 / torch.ones(16))
        torch.nn.init.trunc_normal_(self.layers[0].weight, std=0.02)
        self.register_buffer("grid", torch.stack((torch.linspace(-1, 1, 5), torch.zeros(5)), dim=-1))
        self.to(torch.bfloat16 if role == "act" else torch.float32)


def test_the_form_of_a_vast_policy_takes_no_memory():
    form = describe(Vast, {})
    assert form.parameters == 40 * (25_000 * 20_000 + 20_000) + 16_000
    assert (form.trainable, form.trainable_bytes) == (16_000, 64_000)
    assert form.train_bytes == 4 * form.parameters + 4 * 10
    assert form.published["layers.7.weight"] == WeightSpec((20_000, 25_000), "bfloat16")
    assert form.published["grid"] == WeightSpec((5, 2), "bfloat16")


def test_forms_of_all_policies_import_no_compiler():
    """Torch's own arithmetic on the meta device imports it, which takes seconds."""
    script = (
        "import sys\nfrom tests.plugins.trial.test_policy_contract import CASES\nbefore = set(sys.modules)\n"
        "for case in CASES.values(): case.settings.form(case.spec)\n"
        "print(sorted(name for name in set(sys.modules) - before if name.startswith(('torch._dynamo', 'torch.fx'))))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


CONSTRUCTED = """\
import sys
import torch
from polyrhythm.policies.form import outlined
made = [
    outlined(make)
    for make in (
        lambda: torch.nn.Parameter(torch.randn(1, 100_000, 76_800) * 0.02),
        lambda: torch.full((1 << 20, 1 << 20), 0.5),
        lambda: torch.normal(0.0, 0.02, size=(1 << 20, 1 << 20)),
        lambda: torch.randint(0, 9, (1 << 20, 1 << 20)),
        lambda: torch.eye(1 << 20),
        lambda: torch.zeros(4) / 3,
    )
]
print({x.device.type for x in made}, [name for name in sys.modules if name in ("torch._dynamo", "torch._inductor")])
"""


def test_what_constructors_compute_takes_no_memory_and_no_compiler():
    done = subprocess.run([sys.executable, "-c", CONSTRUCTED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'meta'} []"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.stack([torch.zeros(2), torch.zeros(2, dtype=torch.float64)]),
        lambda: torch.stack(tensors=[torch.zeros(2, 3)] * 4, dim=-2),
        lambda: torch.stack((torch.zeros(2, 3), torch.ones(2, 3)), -1),
        lambda: 1 / torch.arange(1, 7, 2) * torch.ones(2, 1, dtype=torch.bfloat16),
        lambda: torch.ones(3, dtype=torch.bool) + torch.tensor(2),
        lambda: torch.normal(0.0, 0.02, (4, 4)) * torch.eye(4),
        lambda: torch.normal(mean=torch.zeros(3), std=0.02, generator=None),
        lambda: torch.eye(3, 5, dtype=torch.float64) + torch.randint(0, 9, (5,)),
        lambda: torch.randint(9, size=[2, 3], dtype=torch.int32),
        lambda: torch.arange(0, 1, 0.25) - torch.linspace(0, 1, 4, dtype=torch.float64),
    ],
)
def test_shapes_and_dtypes_of_a_constructors_arithmetic_are_torchs(make):
    class Computed(torch.nn.Module):
        chunk, action_dim = 1, 1

        def __init__(self, _role):
            super().__init__()
            self.register_buffer("x", make())

    assert describe(Computed, {}).published == weight_specs({"x": make()})


class Multiplier(torch.nn.Module):
    chunk, action_dim = 1, 1

    def __init__(self, _role):
        super().__init__()
        self.register_buffer("x", torch.ones(3) * np.ones(3, np.float32))


class Reader(torch.nn.Module):
    chunk, action_dim = 1, 1

    def __init__(self, role):
        super().__init__()
        self.size = int(torch.ones(3).sum().item())


@pytest.mark.parametrize("module", [Reader, Multiplier])
def test_a_constructor_that_reads_values_is_told_so(module):
    with pytest.raises(ValueError, match=r"form\(\): the policy's constructor reads values of tensors \(.*; comp"):
        describe(module, {})


@pytest.mark.parametrize(
    ("defect", "problem"),
    [
        ("form: answers", r"form\(\).answers\['raw'\] is ArraySpec\(shape=\(1, 1\), dtype='float64'\), act\(\) gives"),
        ("form: value", r"form\(\).value is 'action', act\(\) gives one per chunk"),
        ("form: chunk", r"form\(\).chunk is 7, the policy has 1"),
        ("form: published", r"form\(\).published\['actor'\] is bfloat16 \[2, 2\], build\(role='act'\) has none"),
        ("form: parameters", r"form\(\).parameters is 1, the policy has \d+,\d+"),
    ],
)
def test_a_form_that_is_not_the_modules_is_a_finding(defect, problem):
    settings = BrokenSettings(defect=defect)
    checks = conformance.policy_checks(settings, CASES["gaussian"].observations(), SPEC)
    (found,) = [finding for finding in run_checks({"form": checks["form"]}) if finding.state == "failed"]
    with pytest.raises(ContractViolation, match=problem):
        raise ContractViolation(found.detail, found.fix)


class Old(BaseModel):
    """Written for an earlier version."""

    type: str = "mine:Old"

    def build(self, env_spec, seed):
        return built(GaussianSettings(), env_spec, seed)


class Half(Old):
    """It has a form, and the build of an earlier version."""

    def form(self, env_spec):
        return GaussianSettings().form(env_spec)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            Old(),
            r"policy.type = mine:Old: its settings have no form\(\); write form\(self, env_spec\) -> ",
        ),
        (
            Half(),
            r"policy.type = mine:Old: its build\(\) does not take device, role; write form.*own-policies.md",
        ),
    ],
)
def test_policies_for_the_contract_of_an_earlier_version_are_told_what_to_write(section, said):
    with pytest.raises(ValueError, match=said):
        as_settings(section)
