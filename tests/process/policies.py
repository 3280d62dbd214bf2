"""A policy that takes its time."""

from __future__ import annotations

import time
from typing import Any, Literal

from polyrhythm.policies.categorical import CategoricalSettings


class SlowSettings(CategoricalSettings):
    """A categorical policy whose every evaluation for the loss takes `seconds`."""

    type: Literal["tests.process.policies:SlowSettings"] = "tests.process.policies:SlowSettings"  # type: ignore[assignment]
    seconds: float = 1.0

    def build(self, env_spec: Any, seed: int) -> Any:
        policy = super().build(env_spec, seed)
        evaluate = policy.evaluate

        def slowly(*arguments: Any) -> Any:
            time.sleep(self.seconds)
            return evaluate(*arguments)

        policy.evaluate = slowly  # type: ignore[method-assign]
        return policy
