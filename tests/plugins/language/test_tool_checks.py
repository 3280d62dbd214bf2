"""Calls of the Python tool that would not fit a step's limit are refused, with numbers that fit."""

from __future__ import annotations

import re
from typing import Any

import pytest

from polyrhythm.checks import CheckContext
from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.build import env_settings
from polyrhythm.plugins.language import check_calls


def run(rows: int = 64, launcher: str = "local", step_s: float = 60.0, env_batches: int = 1, **env: Any) -> RunConfig:
    return validate(
        {
            "name": "test",
            "launcher": launcher,
            "env": {"type": "chains", "tool": "python", "max_turns": 4, "max_prompt_tokens": 200, **env},
            "policy": {"type": "causal_lm", "layers": 1, "width": 16},
            "rollout": {"rows": rows, "env_batches": env_batches, "simulators": 2},
            "supervision": {"step_s": step_s},
            "training": {"versions": 1, "mini_batch_samples": 8},
            "algorithm": {"advantage": "reinforce_plus_plus", "value": {"coef": 0.0}},
        }
    )


def check(config: RunConfig) -> None:
    check_calls(CheckContext(config, spec=env_settings(config).spec()))


@pytest.mark.parametrize(("rows", "env_batches"), [(64, 1), (16, 4)])
def test_numbers_that_fit_are_named(rows: int, env_batches: int) -> None:
    with pytest.raises(ConfigError, match=r"env\.sandbox\.wall_s = 5: the calls of a simulator's 64 rows") as refused:
        check(run(rows, env_batches=env_batches))
    said = str(refused.value)
    assert "4 at a time, may take 80 s, but supervision.step_s = 60" in said
    found = re.search(r"at_a_time to (\d+), or the rows of a simulator to (\d+), or supervision.step_s to (\S+)", said)
    assert found is not None
    at_a_time, most, step_s = found.groups()
    check(run(rows, env_batches=env_batches, sandbox={"at_a_time": int(at_a_time)}))
    check(run(int(most) // env_batches, env_batches=env_batches))
    check(run(rows, env_batches=env_batches, step_s=float(step_s)))
    with pytest.raises(ConfigError):
        check(run(rows, env_batches=env_batches, sandbox={"at_a_time": int(at_a_time) - 1}))
    with pytest.raises(ConfigError):
        check(run(int(most) + 4))


def test_one_call_that_is_too_long_is_refused_whatever_the_rows() -> None:
    with pytest.raises(ConfigError, match=r"may take 60 s.*; set supervision\.step_s to 61 or more$"):
        check(run(rows=1, sandbox={"wall_s": 60.0}))


@pytest.mark.parametrize("changes", [{"launcher": "inline"}, {"tool": True}, {"tool": False, "max_turns": 1}])
def test_what_has_no_such_calls_or_no_limit_is_not_refused(changes: dict[str, Any]) -> None:
    check(run(**changes))
