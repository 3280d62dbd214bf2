"""A policy as the trainer builds it on the CPU, for tests of policies."""

from __future__ import annotations

from typing import Any

from polyrhythm.specs import EnvSpec


def built(settings: Any, spec: EnvSpec, seed: int = 0) -> Any:
    """The policy of these settings, with the weights of the seed."""
    return settings.build(spec, seed=seed, device="cpu", role="train")
