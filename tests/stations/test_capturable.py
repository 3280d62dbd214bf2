"""What a pass must not do so that it can be a CUDA graph: read a tensor's value, or make one from a host's numbers."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyrhythm.plugins.vla.groot_n1d5.network import GrootSettings
from polyrhythm.plugins.vla.openvla_oft.policy import OpenVlaOftSettings
from polyrhythm.plugins.vla.pi0.settings import Pi0Settings, Pi05Settings
from polyrhythm.policies.categorical import CategoricalSettings
from polyrhythm.policies.gaussian import GaussianSettings
from polyrhythm.policies.tiny_vla.policy import TinyVlaSettings
from polyrhythm.specs import INSTRUCTION, PROGRESS, ActionSpec, ArraySpec, EnvSpec, Task

TASKS = (Task("push", "push the puck"), Task("reach", "reach the goal"))
OBSERVATION = {"image": ArraySpec((16, 16, 3), "uint8"), "proprio": ArraySpec((4,), "float32")}
CONTINUOUS = EnvSpec(OBSERVATION, ActionSpec("continuous", 2, (-1.0, -1.0), (1.0, 2.0)), TASKS, 10)
DISCRETE = EnvSpec(OBSERVATION, ActionSpec("discrete", 1, choices=4), TASKS, 10)

#: Operations that make the host wait for a device, copy to it from memory that the host need not keep, or draw from
#: the global generator.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"}
FROM_HOST = {"lift_fresh", "lift_fresh_copy"}
RANDOM = {"normal_", "uniform_", "rand", "randn", "randint", "bernoulli", "multinomial", "random_", "native_dropout"}


class Operations(TorchDispatchMode):
    """Collects the names of the operations that are done."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put_") and any(x is not None and x.dtype is torch.bool for x in args[1])
        self.names.add("nonzero" if masks else name)
        return func(*args, **(kwargs or {}))


def flow(method):
    return TinyVlaSettings(head={"type": "flow_matching", "method": method}, width=16, layers=1, heads=2)


VISION = {"image": 16, "patch": 8, "vision_width": 16, "vision_layers": 2, "vision_heads": 2}
GEMMA = {"width": 16, "mlp": 32, "layers": 2, "heads": 2, "head_dim": 8, "expert_width": 16, "expert_mlp": 32} | VISION
LLAMA = {"width": 16, "mlp": 32, "layers": 2, "heads": 2} | VISION
GROOT = LLAMA | {"dit_width": 16, "dit_layers": 2, "hidden": 16}

POLICIES = {
    "categorical": (CategoricalSettings(), DISCRETE),
    "gaussian": (GaussianSettings(), CONTINUOUS),
    "gaussian normalised": (GaussianSettings(normalize_observations=True), CONTINUOUS),
    "bins": (TinyVlaSettings(width=16, layers=1, heads=2), CONTINUOUS),
    "ode": (flow({"type": "ode"}), CONTINUOUS),
    "flow_sde": (flow({"type": "flow_sde"}), CONTINUOUS),
    "flow_cps": (flow({"type": "flow_cps"}), CONTINUOUS),
    "flow_noise": (flow({"type": "flow_noise"}), CONTINUOUS),
    "pi0": (Pi0Settings(size=GEMMA), CONTINUOUS),
    "pi05": (Pi05Settings(size=GEMMA), CONTINUOUS),
    "openvla_oft": (OpenVlaOftSettings(size=LLAMA), CONTINUOUS),
    "groot_n1d5": (GrootSettings(size=GROOT), CONTINUOUS),
}


def inputs(rows):
    rng = torch.Generator().manual_seed(0)
    obs = {
        "image": torch.randint(0, 255, (rows, 16, 16, 3), dtype=torch.uint8, generator=rng),
        "proprio": torch.randn(rows, 4, generator=rng),
        INSTRUCTION: torch.zeros(rows, dtype=torch.int64),
        PROGRESS: torch.zeros(rows),
    }
    return obs, torch.arange(rows) % 2 == 0, torch.randint(0, 2**62, (rows,), generator=rng)


def operations_of(run):
    run()
    with torch.no_grad(), Operations() as operations:
        run()
    return operations.names


@pytest.mark.parametrize("name", POLICIES)
def test_a_second_pass_of_a_policy_can_be_captured(name):
    settings, spec = POLICIES[name]
    policy, given = settings.build(spec, seed=0, device="cpu", role="act"), inputs(4)
    names = operations_of(lambda: policy.act(*given))
    assert not names & (WAITING | FROM_HOST | RANDOM)
    assert "addmm" in names


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda: torch.ones(3).sum().item(), "_local_scalar_dense"),
        (lambda: torch.ones(3)[torch.tensor([True, False, True])], "nonzero"),
        (lambda: torch.tensor([1.0, 2.0]), "lift_fresh"),
        (lambda: torch.zeros(3).normal_(), "normal_"),
        (lambda: bool(torch.ones(3).any()), "_local_scalar_dense"),
    ],
)
def test_an_operation_that_prevents_a_capture_is_seen(run, name):
    assert name in operations_of(run) & (WAITING | FROM_HOST | RANDOM)
