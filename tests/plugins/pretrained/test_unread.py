"""A policy that is read part by part is the policy that is built at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plugins.vla.test_pi0_settings import SPEC

from polyrhythm.config.registry import resolve
from polyrhythm.policies.base import as_module
from polyrhythm.policies.constants import plain_tensors

GOLDEN = Path(__file__).parents[1] / "vla" / "golden"
PI0 = {"type": "pi0", "checkpoint": str(GOLDEN / "pi0")}
CASES: dict[str, dict[str, Any]] = {
    "all": PI0,
    "expert, float32": {**PI0, "train": "expert", "dtype": "float32"},
    "lora": {**PI0, "train": "lora"},
    "pi05": {"type": "pi05", "checkpoint": str(GOLDEN / "pi05"), "method": "flow_noise"},
    "openvla_oft": {"type": "openvla_oft", "checkpoint": str(GOLDEN / "openvla_oft")},
    "groot_n1d5": {
        "type": "groot_n1d5",
        "checkpoint": str(GOLDEN / "gr00t_n1_5"),
        "embodiment": 0,
        "cameras": dict.fromkeys(("ego_view", "wrist", "third"), "image"),
    },
    "without a checkpoint": {"type": "pi0"},
}


def everything(policy) -> dict[str, torch.Tensor]:
    module = as_module(policy)
    return dict([*module.named_parameters(), *module.named_buffers()])


@pytest.mark.parametrize("case", CASES)
def test_a_policy_in_parts_is_that_of_build(case: str) -> None:
    settings: Any = resolve("policy", {"tokenizer": "words", "robot": "bounds", **CASES[case]})
    whole = everything(settings.build(SPEC, seed=3, device="cpu", role="train"))
    policy = settings.build_in_parts(SPEC, seed=3, role="train")
    blocks = next(m for m in policy.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1)
    unread = sum(x.nbytes for x in everything(policy).values() if x.is_meta)
    assert unread == 0 if "checkpoint" not in CASES[case] else unread > 0.1 * sum(x.nbytes for x in whole.values())
    policy.load_part(blocks[0], "cpu")
    assert not any(x.is_meta for x in everything(blocks[0]).values())
    assert not unread or any(x.is_meta for x in blocks[1].parameters())
    assert plain_tensors(policy) == {}, "they would stay on the host"
    policy.load_part(policy, "cpu")
    found = everything(policy)
    assert list(found) == list(whole)
    for name, x in found.items():
        assert x.dtype == whole[name].dtype, name
        assert x.requires_grad == whole[name].requires_grad, name
        assert torch.equal(x, whole[name]), name
