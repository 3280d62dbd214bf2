"""A policy that breaks its contract is refused before the start, in one sentence with the user's line."""

from __future__ import annotations

import pytest
import torch
from tests.pipeline.runs import config

from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.validation.check import validate_run

KIND = "tests.pipeline.broken_policies:BrokenSettings"
ENV = {"type": "latency", "step_time": "constant:0ms", "episode_steps": 8, "action_dim": 2}
HERE = r"\(.*broken_policies.py, line \d+\)"

DEFECTS = {
    "build raises": rf"its build\(\) raised IndexError: list index out of range {HERE}; fix it there",
    "no module": r"build gave a dict; return a torch.nn.Module",
    "no chunk": r"the policy has no attribute chunk; set self.chunk in __init__",
    "other action_dim": r"action_dim is 3, the environment's actions have 2 entries; set it to that",
    "tolerance": r"tolerance is 'small'; set it to the largest error",
    "raises": rf"act raised RuntimeError: The size of tensor a .* {HERE}; fix it there",
    "evaluate raises": rf"evaluate raised KeyError: 'mean' {HERE}; fix it there",
    "tuple": r"act returned a tuple; return Act\(",
    "evaluate gives a tuple": r"evaluate returned a tuple; return Evaluation\(",
    "float64": r"act\(\).actions is of torch.float64; return torch.float32: .to\(torch.float32\)",
    "shape": r"act\(\).logprob is a tensor \[2, 1\]; return a tensor \[2, 1, 2\]",
    "value shape": r"evaluate\(\).value is a tensor \[2\]; return a tensor \[2, 1\]",
    "entropy of a row": r"evaluate\(\).entropy is a tensor \[2\]; return a tensor \[2, 1, 2\]",
    "gradient": r"act\(\) attaches a gradient to value; decorate act with @torch.no_grad",
    "nan": r"act\(\).logprob has NaN or infinity; look for",
    "bounds": r"act\(\).actions has 2.5, the environment allows \[-1.0, -1.0\] to \[1.0, 1.0\]; scale or clip",
    "inputs": r"act\(\).forward_inputs\['raw'\] is a tensor \[\] for 2 rows; give a tensor \[2,...\], row by row",
    "off by 1": r"evaluate\(obs, act\(\).forward_inputs\).logprob differs from act\(\).logprob by up to 1 .*; comp",
    "batch statistics": r"evaluate\(\).logprob of some rows alone differs from that in the batch by .*; a row",
    "evaluate's value": r"evaluate\(\).value differs from act\(\).value by up to 0.5 .*; compute it from",
    "value": r"value\(obs\) differs from act\(\).value by up to .*; compute it from the observation alone",
    "no gradient": r"its log-probs do not depend on its parameters, so it cannot learn",
    "global noise": r"act\(\).actions of the same keys differs from the first time's by .*; draw",
    "key of the first row": r"act\(\).actions of a row among other rows differs from its own before by .*; draw",
    "key ignored": r"act\(\) gives the same actions for 64 other keys; draw them with noise_key",
    "greedy noise": r"act\(greedy\).actions with other keys differs from the same by .*; where",
    "greedy of the first row": r"act\(\).actions with some rows greedy differs from those of each row.*; decide",
    "counts": r"act, evaluate or value changes seen of the policy; in eval mode they must leave its state alone",
}


def broken(defect: str, **changes):
    return config(env=ENV, policy={"type": KIND, "defect": defect}, **changes)


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_defect_of_a_policy_is_one_sentence(defect):
    with pytest.raises(ConfigError, match=f"^policy.type = {KIND}: {DEFECTS[defect]}") as refusal:
        validate_run(broken(defect))
    assert "\n" not in str(refusal.value)


def test_the_same_policy_without_a_defect_passes_and_is_left_as_it_was():
    torch.manual_seed(5)
    untouched = torch.rand(3)
    torch.manual_seed(5)
    policy = validate_run(config(env=ENV, policy="gaussian")).policy
    assert torch.equal(torch.rand(3), untouched)
    assert policy.training
    again = validate_run(broken("")).policy
    assert [*policy.state_dict()] == [name for name in again.state_dict() if name != "seen"]


def test_a_policy_without_rewards_to_learn_from_needs_no_gradient():
    validate_run(broken("no gradient", training={"versions": 0}))
    validate_run(broken("no gradient"), trainer=False)
