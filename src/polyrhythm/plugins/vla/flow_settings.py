"""Shared settings of policies over flow networks: π0, π0.5 and GR00T N1.5."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Discriminator, Field, model_validator
from torch import nn

from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.fitting import Architecture
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.plugins.vla.flow_policy import FLOW_TRAITS, FlowPolicy
from polyrhythm.plugins.vla.inputs import VlaInputs, plan_inputs
from polyrhythm.plugins.vla.settings import Blueprint, InputForm, VlaSettings
from polyrhythm.policies.base import named, type_or
from polyrhythm.policies.flow_matching import FlowMethod, check_steps
from polyrhythm.policies.form import PolicyForm
from polyrhythm.specs import EnvSpec


class FlowVlaSettings(VlaSettings):
    """Common settings of flow policies. An architecture's own add `type` and `size`, and say what its network is:
    `network_size`, `input_form`, `fitted_architecture`."""

    policy_traits: ClassVar = FLOW_TRAITS

    horizon: int = Field(0, ge=0)
    """Actions that are predicted (H); 0: the checkpoint's, without one as many as are executed."""
    steps: int = Field(4, ge=1)
    """Steps from noise to actions (K)."""
    method: Annotated[FlowMethod, Discriminator(type_or("flow_sde")), BeforeValidator(named)] = Field(
        {"type": "flow_sde"}, validate_default=True
    )
    """Where noise enters: flow_sde, flow_cps (one step per row), flow_noise (all steps, learned), ode (not for RL)."""
    sft_draws: int = Field(1, ge=1)
    """Pairs of time and noise per demonstrated chunk in supervised training, on one prefix pass; releases use 1."""

    @model_validator(mode="after")
    def _method_has_a_noisy_step(self) -> Self:
        check_steps(self.method, self.steps)
        return self

    def network_size(self, env_spec: EnvSpec, source: Checkpoint | None) -> Any:
        """Size of the network for this environment, from the checkpoint, the release, or `size`. ConfigError: the
        checkpoint has another architecture, or its size is unknown."""
        raise NotImplementedError

    def input_form(self, size: Any, source: Checkpoint | None) -> InputForm:
        """Inputs and outputs of a network of this size."""
        raise NotImplementedError

    def fitted_architecture(self, size: Any) -> Architecture:
        """The architecture, with the dead tensors of a network of this size."""
        raise NotImplementedError

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        plan = self._blueprint(env_spec)
        return plan.form(self.method.answers(self.steps, (plan.size.horizon, plan.size.action_dim)))

    def _blueprint(self, env_spec: EnvSpec) -> Blueprint[FlowPolicy]:
        source = Checkpoint.open(self.checkpoint) if self.checkpoint else None
        size = self.network_size(env_spec, source)
        plan = plan_inputs(self, env_spec, self.input_form(size, source), source)

        def around(network: nn.Module, precision: Precision) -> FlowPolicy:
            return FlowPolicy(
                network,
                VlaInputs(plan),
                self.method,
                self.steps,
                precision,
                value_detach=self.value_detach,
                value_level=self.value_level,
                sft_draws=self.sft_draws,
            )

        return Blueprint(self, self.fitted_architecture(size), size, source, around)
