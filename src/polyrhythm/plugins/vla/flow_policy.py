"""Policy over any flow network: π0, π0.5 and GR00T N1.5.

    images, words ─ prefix (once) ─┬─ features, state, progress ─▶ critic ─▶ value
                                   └─ keys and values ─▶ velocity at each of K steps ─▶ actions

The flow's state has the network's shape [B,H,A]; log-prob, entropy and actions are cut to the C actions and the entries
that the environment executes. Times, velocities, log-probs and values are float32 whatever the network's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from polyrhythm.plugins.pretrained.adapting import ADAPTED, AdaptedPolicy
from polyrhythm.plugins.pretrained.precision import Precision
from polyrhythm.plugins.vla.decoder import KeysValues
from polyrhythm.plugins.vla.inputs import VlaInputs
from polyrhythm.plugins.vla.settings import VlaSettings
from polyrhythm.policies import noise
from polyrhythm.policies.base import Act, Evaluation, Observations, section_or
from polyrhythm.policies.flow_matching import FlowMethod, FlowNoise, Kept, Network, between, check_steps, start_noise
from polyrhythm.policies.form import ValueKind
from polyrhythm.policies.mlp import Mlp
from polyrhythm.specs import PROGRESS, ArraySpec, EnvSpec

#: How the names of a stored prefix and of the inputs beside it begin, within observations (`FlowPolicy.precompute`).
STORED, STORED_INPUT = "prefix.", "prefix_input."


class Prefix(NamedTuple):
    """Result of the pass over images and language that all denoise steps reuse; rows first in every tensor.

    keys_values: of each layer that a denoise step attends to; present [B,P] bool: the valid tokens; features [B,W]
    float32: a summary for the value.
    """

    keys_values: tuple[KeysValues, ...]
    present: Tensor
    features: Tensor


class FlowNetwork(nn.Module):
    """A flow network, with the parameter names of its release.

    horizon: H, number of predicted actions; action_dim: A, entries of an action including padding; feature_width:
    entries of the prefix features; action_width: entries of the features that `velocity` returns; step_inputs: names of
    the inputs that `velocity` reads.
    """

    horizon: int
    action_dim: int
    feature_width: int
    action_width: int
    step_inputs: tuple[str, ...]

    def initialise(self) -> None:
        """Draw all parameters from torch's generator, for a network without a checkpoint."""
        raise NotImplementedError

    def prefix_parameters(self) -> Iterable[Tensor]:
        raise NotImplementedError

    def frozen_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:  # noqa: ARG002
        """If a part of the prefix pass is frozen: arrays that replace `inputs` and from which `prefix` computes the
        rest; else {}."""
        return {}

    def prefix(self, inputs: Mapping[str, Tensor], *, features: bool = True) -> Prefix:
        """The pass over images and language, once per chunk step. inputs: the arrays of `VlaInputs`, rows first.
        features: False if no value is needed; the returned features are then [B,0]."""
        raise NotImplementedError

    def step_constants(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inputs of `velocity`, with what all steps of a pass share computed once."""
        return inputs

    def velocity(self, prefix: Prefix, inputs: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Velocity, noise − data [B,H,A] float32, and the features [B,H,W] float32 behind it, of x [B,H,A] float32
        at times t [B] from 1 (noise) to 0 (data)."""
        raise NotImplementedError


def stored(prefix: Prefix) -> dict[str, Tensor]:
    """The prefix as named arrays, rows first."""
    arrays = {f"{STORED}present": prefix.present, f"{STORED}features": prefix.features}
    for index, (keys, values) in enumerate(prefix.keys_values):
        arrays |= {f"{STORED}keys.{index}": keys, f"{STORED}values.{index}": values}
    return arrays


def restored(arrays: Mapping[str, Tensor]) -> Prefix | None:
    """The prefix stored in these arrays; None if there is none."""
    if f"{STORED}present" not in arrays:
        return None
    layers = sum(name.startswith(f"{STORED}keys.") for name in arrays)
    return Prefix(
        tuple((arrays[f"{STORED}keys.{i}"], arrays[f"{STORED}values.{i}"]) for i in range(layers)),
        arrays[f"{STORED}present"],
        arrays[f"{STORED}features"],
    )


def repeated(prefix: Prefix, times: int) -> Prefix:
    """Repeat every row `times` times, copies adjacent."""
    if times == 1:
        return prefix
    keys_values = tuple((k.repeat_interleave(times, 0), v.repeat_interleave(times, 0)) for k, v in prefix.keys_values)
    return Prefix(keys_values, *(torch.repeat_interleave(x, times, 0) for x in prefix[1:]))


#: The release's times of supervised training: t = 0.001 + 0.999·Beta(1.5, 1).
_EARLIEST, _BETA = 0.001, 1.5
_TIMES, _NOISE = 0, 1
#: Entries of a trained tensor that decide the supervised draws.
_KEY_ENTRIES = 4096
_CRITIC_UNITS, _NOISE_UNITS = 256, 128


class FlowCritic(nn.Module):
    """Value [B], or [B,actions] if `actions` is given, of the prefix features [B,W], the state [B,S] and the
    progress [B]; all float32."""

    def __init__(self, features: int, state: int, actions: int | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.mlp = Mlp(features + state + 1, actions or 1, _CRITIC_UNITS, 2, "silu", output_gain=0.1)
        self._per_action = actions is not None

    def forward(self, features: Tensor, state: Tensor, progress: Tensor) -> Tensor:
        seen = torch.cat((self.norm(features.float()), state.float(), progress.float().unsqueeze(1)), dim=1)
        value: Tensor = self.mlp(seen)
        return value if self._per_action else value.squeeze(1)


class FlowInputs(Protocol):
    """Inputs and outputs of a flow policy; `VlaInputs` documents them."""

    chunk: int
    action_dim: int
    state_dim: int

    def __call__(self, obs: Mapping[str, Tensor]) -> Mapping[str, Tensor]: ...

    def executed(self, x: Tensor) -> Tensor: ...

    def actions(self, x: Tensor, obs: Mapping[str, Tensor]) -> Tensor: ...

    def normalised_actions(self, actions: Tensor, obs: Mapping[str, Tensor]) -> Tensor: ...


class FlowChoices(Protocol):
    """Settings that a flow policy reads; `FlowVlaSettings` documents them."""

    @property
    def method(self) -> FlowMethod: ...

    @property
    def steps(self) -> int: ...

    @property
    def sft_draws(self) -> int: ...

    @property
    def value_detach(self) -> bool: ...

    @property
    def value_level(self) -> ValueKind: ...


FLOW_TRAITS = replace(
    ADAPTED,
    critic=True,
    precomputes=True,
    acts_from_precomputed=True,
    beside_precomputed=(PROGRESS,),
    keeps_prefix=True,
)


class FlowPolicy(AdaptedPolicy):
    """Policy around a flow network. forward_inputs: those of the flow method (`flow_matching`), in the network's shape
    [H,A].

    A greedy row integrates the ODE, as released policies do, from noise that is a function of the episode's progress:
    the network was never trained at the mean of the noise, zero.

    noise_head, only with flow_noise: maps the features of each action to the strength of its noise.
    """

    network: FlowNetwork

    def __init__(self, network: FlowNetwork, inputs: FlowInputs, settings: FlowChoices, precision: Precision) -> None:
        super().__init__()
        self.traits = replace(FLOW_TRAITS, dtype=precision.name)
        self.network, self.inputs, self.precision = network, inputs, precision
        self.method, self.steps, self.sft_draws = settings.method, settings.steps, settings.sft_draws
        self.chunk, self.action_dim, self.value_detach = inputs.chunk, inputs.action_dim, settings.value_detach
        self.exact, self.tolerance = False, 1e-4 if precision.is_single else 0.2
        #: (H, A) of the network: the shape of the flow's state.
        self.shape = network.horizon, network.action_dim
        actions = self.chunk if settings.value_level == "action" else None
        self.critic = FlowCritic(network.feature_width, inputs.state_dim, actions)
        self.learned = self.method if isinstance(self.method, FlowNoise) else None
        self.noise_head: nn.Module | None = None
        if self.learned is not None:
            self.noise_head = Mlp(network.action_width, network.action_dim, _NOISE_UNITS, 1, "tanh", output_gain=0.01)

    @torch.no_grad()
    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        given, prefix = self._encode(obs)
        recorded = _Recorded(self._step(given, prefix))
        start_key = torch.where(greedy, noise.content_keys(obs[PROGRESS].unsqueeze(1)), noise_key)
        data, kept = self.method.sample(recorded, self.steps, start_noise(self.shape, start_key), greedy, noise_key)
        logprob, _ = self.method.evaluate(recorded.again(kept), self.steps, kept)
        actions = self.inputs.actions(self.inputs.executed(data), obs)
        return Act(actions, self.inputs.executed(logprob), self._value(obs, given, prefix), kept)

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        given, prefix = self._encode(obs)
        logprob, entropy = self.method.evaluate(self._step(given, prefix), self.steps, forward_inputs)
        value = self._value(obs, given, prefix)
        return Evaluation(self.inputs.executed(logprob), value, self.inputs.executed(entropy))

    def value(self, obs: Observations) -> Tensor:
        return self._value(obs, *self._encode(obs))

    @torch.no_grad()
    def precompute(self, obs: Observations) -> dict[str, Tensor]:
        """Arrays computed by frozen parts, which replace the images in the observations: the whole prefix with the
        inputs read beside it, or the network's `frozen_inputs`; {} if nothing is frozen. `act`, `evaluate`,
        `value` and `sft_loss` use them."""
        if any(p.requires_grad for p in self.network.prefix_parameters()):
            seen = self.inputs(obs)
            with self.precision.computing(self._device):
                return {f"{STORED_INPUT}{name}": x for name, x in self.network.frozen_inputs(seen).items()}
        given, prefix = self._encode(obs)
        names = {"state", *self.network.step_inputs}
        return stored(prefix) | {f"{STORED_INPUT}{name}": given[name] for name in sorted(names)}

    @torch.no_grad()
    def prefix_arrays(self, obs: Observations) -> dict[str, Tensor]:
        """The arrays that a pass keeps for all its denoise steps, mostly keys and values; rows first."""
        return stored(self._encode(obs)[1])

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        """The release's loss: mean squared error of the velocity over the chunk's actions, padded entries included, at
        times 0.001 + 0.999·Beta(1.5, 1); plus the loss of the learned noise, which does not reach the network.

        Times and noise are functions of the actions and of a trained tensor, so each optimizer step draws anew without
        any state. Actions predicted beyond the chunk equal the last one and do not count.
        """
        given, prefix = self._encode(obs, features=False)
        data = self._padded(self.inputs.normalised_actions(actions, obs).float())
        t, draws = self.supervised_draws(actions)
        x, target = between(data.repeat_interleave(self.sft_draws, 0), draws, t.view(-1, 1, 1))
        beside = {name: given[name].repeat_interleave(self.sft_draws, 0) for name in self.network.step_inputs}
        v, features = self._velocity(beside, repeated(prefix, self.sft_draws), x, t)
        error = (v - target)[:, : self.chunk]
        loss: Tensor = error.square().mean()
        if self.learned is None or self.noise_head is None:
            return loss
        raw = self.noise_head(features.detach())[:, : self.chunk]
        t = t.view(-1, 1, 1)
        return loss + self.learned.misfit(self.steps, error.detach() * t, t, raw)

    def _encode(self, obs: Observations, *, features: bool = True) -> tuple[Mapping[str, Tensor], Prefix]:
        """The network's inputs and the prefix; both from `precompute` if obs contains it."""
        found = {n.removeprefix(STORED_INPUT): x for n, x in obs.items() if n.startswith(STORED_INPUT)}
        given: Mapping[str, Tensor] = found or self.inputs(obs)
        prefix = restored(obs)
        if prefix is not None:
            return given, prefix
        with self.precision.computing(self._device):
            return given, self.network.prefix(given, features=features)

    def _velocity(self, given: Mapping[str, Tensor], prefix: Prefix, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        with self.precision.computing(self._device):
            v, features = self.network.velocity(prefix, given, x, t)
        return v.float(), features.float()

    def _step(self, given: Mapping[str, Tensor], prefix: Prefix) -> Network:
        with self.precision.computing(self._device):
            given = self.network.step_constants(given)

        def network(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
            v, features = self._velocity(given, prefix, x, t)
            return v, None if self.noise_head is None else self.noise_head(features)

        return network

    def _value(self, obs: Observations, given: Mapping[str, Tensor], prefix: Prefix) -> Tensor:
        features = prefix.features.detach() if self.value_detach else prefix.features
        value: Tensor = self.critic(features, given["state"], obs[PROGRESS])
        return value

    def _padded(self, data: Tensor) -> Tensor:
        """Inverse of `executed`: [B,C,A] -> [B,H,A padded], zero elsewhere, the last action repeated to the horizon."""
        horizon, entries = self.shape
        places = self.inputs.executed(torch.arange(horizon * entries, device=data.device).view(1, horizon, entries))
        padded = data.new_zeros(len(data), horizon * entries)
        padded[:, places.flatten()] = data.flatten(1)
        padded = padded.view(-1, horizon, entries)
        last = padded[:, self.chunk - 1 : self.chunk].expand(-1, horizon - self.chunk, -1)
        return torch.cat((padded[:, : self.chunk], last), dim=1)

    def supervised_draws(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Times [B·n] and noise [B·n,H,A] of n draws for each chunk, row by row; times are stratified into n equal
        parts."""
        key, count = noise.content_keys(actions), self.sft_draws
        source = next((p for p in reversed(list(self.network.parameters())) if p.requires_grad), None)
        if source is not None:
            key = key ^ noise.content_keys(source.detach().reshape(1, -1)[:, :_KEY_ENTRIES])
        phase = noise.uniform(key, 1, _TIMES)
        uniform = (torch.arange(count, device=key.device) + phase) / count
        t = _EARLIEST + (1.0 - _EARLIEST) * uniform ** (1.0 / _BETA)  # the inverse of Beta(1.5, 1)'s distribution
        horizon, entries = self.shape
        drawn = noise.normal(key, count * horizon * entries, _NOISE)
        return t.flatten(), drawn.view(-1, horizon, entries)

    @property
    def _device(self) -> torch.device:
        return self.critic.norm.weight.device


class _Recorded:
    """Records a network's outputs, so that the log-prob of a new sample needs no further pass."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.answers: list[tuple[Tensor, Tensor | None]] = []

    def __call__(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        self.answers.append(self.network(x, t))
        return self.answers[-1]

    def again(self, kept: Kept) -> Network:
        """A network for `Method.evaluate` that replays the outputs for `kept`: of each row's chosen step, or step by
        step."""
        if "step" in kept:
            rows = torch.arange(len(kept["step"]), device=kept["step"].device)
            chosen = torch.stack([v for v, _ in self.answers], dim=1)[rows, kept["step"]]
            return lambda _x, _t: (chosen, None)
        answers = iter(self.answers)
        return lambda _x, _t: next(answers)


class FlowVlaSettings(VlaSettings):
    """Common settings of flow policies: π0, π0.5 and GR00T N1.5."""

    policy_traits: ClassVar = FLOW_TRAITS

    steps: int = Field(4, ge=1)
    """Steps from noise to actions (K)."""
    method: Annotated[FlowMethod, Field(discriminator="type"), section_or("flow_sde")] = Field(
        {"type": "flow_sde"}, validate_default=True
    )
    """Where noise enters: flow_sde, flow_cps (one step per row), flow_noise (all steps, learned), ode (not for RL)."""
    sft_draws: int = Field(1, ge=1)
    """Pairs of time and noise per demonstrated chunk in supervised training, on one prefix pass; releases use 1."""

    @model_validator(mode="after")
    def _method_has_a_noisy_step(self) -> Self:
        check_steps(self.method, self.steps)
        return self

    def policy(self, network: nn.Module, inputs: VlaInputs, precision: Precision) -> FlowPolicy:
        assert isinstance(network, FlowNetwork)
        return FlowPolicy(network, inputs, self, precision)

    def answers(self, env_spec: EnvSpec, size: Any) -> Mapping[str, ArraySpec]:  # noqa: ARG002 - in the network's shape
        return self.method.answers(self.steps, (size.horizon, size.action_dim))
