"""A Gaussian policy with one defect, by its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch

from polyrhythm.policies.form import describe
from polyrhythm.policies.gaussian import GaussianPolicy, GaussianSettings
from polyrhythm.specs import ArraySpec, WeightSpec


class Broken(GaussianPolicy):
    def __init__(self, settings: BrokenSettings, env_spec: Any) -> None:
        super().__init__(settings, env_spec)
        self.defect, self.calls = settings.defect, 0
        self.register_buffer("seen", torch.zeros(1))
        if self.defect == "no chunk":
            del self.chunk
        if self.defect == "other action_dim":
            self.action_dim += 1
        if self.defect == "tolerance":
            self.tolerance = "small"

    @torch.no_grad()
    def act(self, obs: Any, greedy: Any, noise_key: Any) -> Any:
        self.calls += 1
        if self.defect == "raises":
            return torch.zeros(3) + torch.zeros(4)
        if self.defect == "greedy noise":
            greedy = torch.zeros_like(greedy)
        if self.defect == "greedy of the first row":
            greedy = greedy[:1].expand_as(greedy)
        if self.defect == "key of the first row":
            noise_key = noise_key[:1] + torch.arange(len(noise_key))
        if self.defect == "key ignored":
            noise_key = torch.arange(1).expand_as(noise_key)
        if self.defect == "counts":
            self.seen += 1
        act = super().act(obs, greedy, noise_key)
        changed = CHANGES.get(self.defect)
        return changed(self, act) if changed else act

    def evaluate(self, obs: Any, forward_inputs: Any) -> Any:
        if self.defect == "evaluate raises":
            return forward_inputs["mean"]
        found = super().evaluate(obs, forward_inputs)
        match self.defect:
            case "off by 1":
                return found._replace(logprob=found.logprob + 1.0)
            case "batch statistics":
                return found._replace(logprob=found.logprob + 0.1 * (len(found.value) - 2))
            case "evaluate's value":
                return found._replace(value=found.value + 0.5)
            case "no gradient":
                return found._replace(logprob=found.logprob.detach())
            case "entropy of a row":
                return found._replace(entropy=found.entropy.sum((1, 2)))
            case "evaluate gives a tuple":
                return tuple(found)
        return found

    def value(self, obs: Any) -> Any:
        value = super().value(obs)
        return value * 2 + 1 if self.defect == "value" else value


CHANGES: dict[str, Any] = {
    "tuple": lambda self, act: tuple(act),
    "float64": lambda self, act: act._replace(actions=act.actions.double()),
    "shape": lambda self, act: act._replace(logprob=act.logprob.sum(-1)),
    "value shape": lambda self, act: act._replace(value=act.value[:, None]),
    "gradient": lambda self, act: act._replace(value=_with_gradient(act.value)),
    "nan": lambda self, act: act._replace(logprob=act.logprob.log().sqrt()),
    "bounds": lambda self, act: act._replace(actions=act.actions * 0 + 2.5),
    "inputs": lambda self, act: act._replace(forward_inputs={"raw": act.forward_inputs["raw"][:1].sum()}),
    "global noise": lambda self, act: act._replace(actions=(act.actions * 0 + torch.rand(1)).clamp(-1, 1)),
    "late": lambda self, act: act._replace(logprob=act.logprob + (self.calls > 25)),
}


FORM_CHANGES: dict[str, dict[str, Any]] = {
    "form: answers": {"answers": {"raw": ArraySpec((1, 1), "float64")}},
    "form: value": {"value": "action"},
    "form: chunk": {"chunk": 7},
    "form: parameters": {"parameters": 1},
    "form: published": {"published": {"actor": WeightSpec((2, 2), "bfloat16")}},
}


def _with_gradient(value: Any) -> Any:
    """Also where gradients are switched off."""
    with torch.enable_grad():
        return value.detach().clone().requires_grad_()


class BrokenSettings(GaussianSettings):
    """A Gaussian policy with a defect."""

    type: Literal["tests.pipeline.broken_policies:BrokenSettings"] = "tests.pipeline.broken_policies:BrokenSettings"  # type: ignore[assignment]
    needs: ClassVar = ()
    defect: str = ""

    def form(self, env_spec: Any) -> Any:
        wanted = super().form(env_spec)
        changes = FORM_CHANGES.get(self.defect)
        return replace(describe(lambda _role: Broken(self, env_spec), wanted.answers), **(changes or {}))

    def build(self, env_spec: Any, *, seed: int, device: str, role: Any) -> Any:
        if self.defect == "build raises":
            return [][seed]
        if self.defect == "no module":
            return {"weights": 1}
        torch.manual_seed(seed)
        return Broken(self, env_spec)
