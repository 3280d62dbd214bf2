"""Settings that the policies over flow networks share: π0, π0.5 and GR00T N1.5."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Discriminator, Field, Tag

from polyrhythm.policies.base import named, type_or
from polyrhythm.policies.flow_methods import FlowNoiseSettings, FlowSdeSettings, OdeSettings
from polyrhythm.policies.vla.settings import VlaSettings

FlowMethod = Annotated[
    Annotated[OdeSettings, Tag("ode")]
    | Annotated[FlowSdeSettings, Tag("flow_sde")]
    | Annotated[FlowNoiseSettings, Tag("flow_noise")],
    Discriminator(type_or("flow_sde")),
    BeforeValidator(named),
]


class FlowVlaSettings(VlaSettings):
    """Common settings of flow policies."""

    steps: int = Field(4, ge=1)
    """Steps from noise to actions (K)."""
    method: FlowMethod = Field({"type": "flow_sde"}, validate_default=True)
    """Where noise enters, by type: flow_sde (one step per row), flow_noise (all steps, learned), ode (not for RL)."""
    sft_draws: int = Field(1, ge=1)
    """Pairs of time and noise per demonstrated chunk in supervised training, on one prefix pass; releases use 1."""
