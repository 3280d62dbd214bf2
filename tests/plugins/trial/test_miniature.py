"""What is tried of published policies before a run, and in which order."""

from __future__ import annotations

import pytest
from tests.pipeline.pictures import LampSettings
from tests.pipeline.runs import config

from polyrhythm.checks import CheckContext
from polyrhythm.config.registry import resolve
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.validation import check
from polyrhythm.pipeline.validation.check import policy_to_try, validate_run


class DarkSettings(LampSettings):
    """Lamps that cannot be built."""

    type: str = "tests.plugins.trial.test_miniature:DarkSettings"

    def build(self, rows: int) -> None:
        raise ValueError(f"no {rows} lamps")


def run_of(policy: dict[str, object], env: str = "tests.pipeline.pictures:LampSettings") -> RunConfig:
    own = {"type": "pi0", "state": "left", "chunk": 2, "dtype": "float32", "method": "flow_noise", "steps": 2}
    size = {"width": 16, "mlp": 32, "layers": 2, "heads": 2, "head_dim": 8, "expert_width": 16, "expert_mlp": 32}
    vision = {"image": 16, "patch": 8, "vision_width": 16, "vision_layers": 2, "vision_heads": 2}
    return config(env={"type": env}, policy=own | {"size": size | vision} | policy)


def test_a_checkpoint_is_refused_before_an_environment_is_built() -> None:
    dark = "tests.plugins.trial.test_miniature:DarkSettings"
    with pytest.raises(ConfigError, match="no 6 lamps"):
        validate_run(run_of({}, dark))
    with pytest.raises(ConfigError, match="/no/such/folder"):
        validate_run(run_of({"checkpoint": "/no/such/folder"}, dark))


def test_a_large_published_policy_is_tried_in_miniature(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of({"train": "expert"})
    spec = LampSettings().spec()
    policy, form = check.check_build(run, spec), check.check_form(run, spec)
    context = CheckContext(run, spec=spec, form=form, policy=policy)
    assert policy_to_try(context)[0] is policy
    monkeypatch.setattr(check, "_TRIED", 0)
    small, its_form = policy_to_try(context)
    assert small is not policy
    assert (small.chunk, small.action_dim, its_form.answers) == (policy.chunk, policy.action_dim, form.answers)
    assert validate_run(run).policy is not small


@pytest.mark.parametrize("kind", ["pi0", "pi05", "openvla_oft", "groot_n1d5"])
def test_a_miniature_needs_nothing_of_the_checkpoint(kind: str) -> None:
    """Meta-World with OpenVLA-OFT takes entries 0, 1, 2 and 6; a network from a seed has no more than the world."""
    of_the_folder = {"checkpoint": "/no", "tokenizer": "/no", "robot": "arm", "cameras": {"top": "image"}}
    numbers = {"entries": [6], "embodiment": 7, "prompt_length": 3, "horizon": 8, "chunk": 2, "relative_entries": 1}
    settings = resolve("policy", {"type": kind, "state": "left", **of_the_folder, **numbers})
    form = settings.miniature().form(LampSettings().spec())
    assert (form.chunk, form.action_dim) == (2, 1)
