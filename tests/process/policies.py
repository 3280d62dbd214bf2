"""Policies that take their time, have a lot to say, or say what is no number."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel

from polyrhythm.policies.categorical import CategoricalSettings
from polyrhythm.policies.form import PolicyForm
from polyrhythm.policies.gaussian import GaussianSettings
from polyrhythm.specs import ArraySpec


class SlowSettings(CategoricalSettings):
    """A categorical policy whose every evaluation for the loss takes `seconds`; not that of up to eight rows, which are
    the trial and the estimate of memory before the start, and not the first `quick` others. The file `marker`, if one
    is named, is there from the first one on that takes so long."""

    type: Literal["tests.process.policies:SlowSettings"] = "tests.process.policies:SlowSettings"  # type: ignore[assignment]
    seconds: float = 1.0
    quick: int = 0
    marker: str = ""

    def build(self, env_spec: Any, *, seed: int, device: str, role: Any) -> Any:
        policy = super().build(env_spec, seed=seed, device=device, role=role)
        evaluate, evaluations = policy.evaluate, itertools.count()

        def slowly(obs: Any, forward_inputs: Any) -> Any:
            if len(next(iter(obs.values()))) > 8 and next(evaluations) >= self.quick:
                if self.marker:
                    Path(self.marker).touch()
                time.sleep(self.seconds)
            return evaluate(obs, forward_inputs)

        policy.evaluate = slowly  # type: ignore[method-assign]
        return policy


class HangingSettings(CategoricalSettings):
    """A categorical policy whose evaluation for the loss hangs on rank 1, once: then the file `marker` is there."""

    type: Literal["tests.process.policies:HangingSettings"] = "tests.process.policies:HangingSettings"  # type: ignore[assignment]
    marker: str

    def build(self, env_spec: Any, *, seed: int, device: str, role: Any) -> Any:
        policy = super().build(env_spec, seed=seed, device=device, role=role)
        evaluate = policy.evaluate

        def hangs(obs: Any, forward_inputs: Any) -> Any:
            if dist.is_initialized() and dist.get_rank() == 1 and not Path(self.marker).exists():
                Path(self.marker).touch()
                threading.Event().wait()
            return evaluate(obs, forward_inputs)

        policy.evaluate = hangs  # type: ignore[method-assign]
        return policy


class EndingSettings(CategoricalSettings):
    """A categorical policy that ends rank 1, once, then the file `marker` is there: as it is built (phase `build`, by
    an error), or the second time that its weights are read within this function (`save`, or `prepare` of a
    publication, by SIGKILL)."""

    type: Literal["tests.process.policies:EndingSettings"] = "tests.process.policies:EndingSettings"  # type: ignore[assignment]
    marker: str
    phase: str

    def build(self, env_spec: Any, *, seed: int, device: str, role: Any) -> Any:
        policy = super().build(env_spec, seed=seed, device=device, role=role)
        if not dist.is_initialized() or dist.get_rank() != 1 or Path(self.marker).exists():
            return policy
        if self.phase == "build":
            Path(self.marker).touch()
            raise RuntimeError("this rank has no room")
        state_dict, times = policy.state_dict, 0

        def ends(*arguments: Any, **words: Any) -> Any:
            nonlocal times
            times += any(frame.f_code.co_name == self.phase for frame, _ in traceback.walk_stack(None))
            if times > 1:
                Path(self.marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return state_dict(*arguments, **words)

        policy.state_dict = ends
        return policy


class SlowlyPublishedSettings(CategoricalSettings):
    """A categorical policy whose weights take `seconds` to be told."""

    type: Literal["tests.process.policies:SlowlyPublishedSettings"] = "tests.process.policies:SlowlyPublishedSettings"  # type: ignore[assignment]
    seconds: float = 0.3

    def build(self, env_spec: Any, *, seed: int, device: str, role: Any) -> Any:
        return _slowed(super().build(env_spec, seed=seed, device=device, role=role), "state_dict", self.seconds)


def _slowed(policy: Any, method: str, seconds: float) -> Any:
    """The policy, whose method sleeps before it is itself."""
    own = getattr(policy, method)

    def slowly(*arguments: Any, **words: Any) -> Any:
        time.sleep(seconds)
        return own(*arguments, **words)

    setattr(policy, method, slowly)
    return policy


class DisagreeingSettings(CategoricalSettings):
    """A categorical policy whose log-probs for the loss are 1 lower than those that it acted with."""

    type: Literal["tests.process.policies:DisagreeingSettings"] = "tests.process.policies:DisagreeingSettings"  # type: ignore[assignment]

    def build(self, env_spec: Any, *, seed: int, device: str, role: Any) -> Any:
        policy = super().build(env_spec, seed=seed, device=device, role=role)
        evaluate = policy.evaluate

        def lower(obs: Any, forward_inputs: Any) -> Any:
            found = evaluate(obs, forward_inputs)
            return type(found)(found.logprob - 1.0, *found[1:])

        policy.evaluate = lower  # type: ignore[method-assign]
        return policy


class HeavySettings(CategoricalSettings):
    """A categorical policy whose answer for each row has a megabyte of forward inputs."""

    type: Literal["tests.process.policies:HeavySettings"] = "tests.process.policies:HeavySettings"  # type: ignore[assignment]

    def form(self, env_spec: Any) -> PolicyForm:
        form = super().form(env_spec)
        return replace(form, answers={**form.answers, "ballast": ArraySpec((250_000,), "float32")})

    def build(self, env_spec: Any, *, seed: int, device: str, role: Any) -> Any:
        policy = super().build(env_spec, seed=seed, device=device, role=role)
        act = policy.act

        def heavily(*arguments: Any) -> Any:
            answer = act(*arguments)
            ballast = torch.zeros(len(answer.value), 250_000)
            return answer._replace(forward_inputs={**answer.forward_inputs, "ballast": ballast})

        policy.act = heavily  # type: ignore[method-assign]
        return policy


class Slips(BaseModel):
    """A policy that answers NaN in `field` to one of `every` noise keys; with 1, always. extra: its answers to more
    than one row have a dimension more in `field` instead."""

    field: str = "logprob"
    every: int = 40
    extra: bool = False

    def build(self, env_spec: Any, *, seed: int, device: str, role: Any) -> Any:
        policy = super().build(env_spec, seed=seed, device=device, role=role)  # type: ignore[misc]
        act = policy.act

        def slips(obs: Any, greedy: Any, noise_key: Any) -> Any:
            answer = act(obs, greedy, noise_key)
            value = getattr(answer, self.field).clone()
            if self.extra:
                return answer._replace(**{self.field: value[..., None] if len(value) > 1 else value})
            value[(noise_key % self.every == 0) & (noise_key != 0)] = torch.nan  # 0: asked for the form of its answers
            return answer._replace(**{self.field: value})

        policy.act = slips
        return policy


class SlipperySettings(Slips, CategoricalSettings):
    type: Literal["tests.process.policies:SlipperySettings"] = "tests.process.policies:SlipperySettings"


class SlipperyGaussianSettings(Slips, GaussianSettings):
    type: Literal["tests.process.policies:SlipperyGaussianSettings"] = "tests.process.policies:SlipperyGaussianSettings"
