"""What only the parts know is refused before anything starts: one sentence, no folder."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from tests.pipeline.runs import config
from tests.stations.counting import Counting

from polyrhythm.cli.main import main
from polyrhythm.errors import ConfigError, RunHalted, StartError
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.trial.advice import batching_findings
from polyrhythm.policies.form import describe
from polyrhythm.policies.gaussian import GaussianPolicy, GaussianSettings
from polyrhythm.specs import ArraySpec

LATENCY = {"env": {"type": "latency"}, "policy": {"type": "gaussian"}}


class WholeSettings(BaseModel):
    """The counting environment, which here resets only as a whole."""

    type: Literal["tests.pipeline.test_check:WholeSettings"] = "tests.pipeline.test_check:WholeSettings"

    def spec(self):
        return Counting(1, reset_rows=False).spec

    def build(self, rows):
        return Counting(rows, reset_rows=False)


def no_key(request):
    return request.urgency


def no_order(request):
    return None


def in_shares(env_batch, generators):
    return [(Fraction("no"), "any")]


def second_is_cut(env_batch, generators):
    if env_batch.name.endswith(".1"):
        return [(1, "any"), (env_batch.rows - 1, "any")]
    return [(env_batch.rows, "any")]


class NoCritic(GaussianPolicy):
    """What only the value uses is a module of another name."""

    def __init__(self, settings, env_spec):
        super().__init__(settings, env_spec)
        self.value_net = self.critic
        del self.critic
        self.critic = self.value_net.forward


class NoCriticSettings(GaussianSettings):
    """The policy above."""

    type: Literal["tests.pipeline.test_check:NoCriticSettings"] = "tests.pipeline.test_check:NoCriticSettings"

    def form(self, env_spec):
        return describe(lambda _role: NoCritic(self, env_spec), super().form(env_spec).answers)

    def build(self, env_spec, *, seed, device, role):
        return NoCritic(self, env_spec)


class PerAction(GaussianPolicy):
    """Its value is one per action."""

    def act(self, obs, greedy, noise_key):
        return super().act(obs, greedy, noise_key)._replace(value=self.value(obs).detach())

    def evaluate(self, obs, forward_inputs):
        return super().evaluate(obs, forward_inputs)._replace(value=self.value(obs))

    def value(self, obs):
        return super().value(obs).unsqueeze(1).expand(-1, self.chunk)


class PerActionSettings(GaussianSettings):
    """The policy above."""

    type: Literal["tests.pipeline.test_check:PerActionSettings"] = "tests.pipeline.test_check:PerActionSettings"

    def form(self, env_spec):
        return replace(super().form(env_spec), value="action")

    def build(self, env_spec, *, seed, device, role):
        return PerAction(self, env_spec)


class Mute(BaseModel):
    """Neither an environment nor a policy."""

    type: Literal["tests.pipeline.test_check:Mute"] = "tests.pipeline.test_check:Mute"


class LackingSettings(WholeSettings):
    """It needs a package that nobody has."""

    needs: ClassVar = ("robot_hands",)
    type: Literal["tests.pipeline.test_check:LackingSettings"] = "tests.pipeline.test_check:LackingSettings"


class UnpluggedSettings(WholeSettings):
    """It has a check of its own."""

    type: Literal["tests.pipeline.test_check:UnpluggedSettings"] = "tests.pipeline.test_check:UnpluggedSettings"

    def check(self):
        raise ConfigError("the robot is not plugged in; plug it in")


class Pictures(Counting):
    """All pictures are black."""

    def __init__(self, rows):
        super().__init__(rows)
        shown = {"image": ArraySpec((16, 16, 3), "uint8"), "proprio": ArraySpec((3,), "float32")}
        self.spec = replace(self.spec, observation=shown)

    def observe(self, rows, out):
        out["image"][:], out["proprio"][:] = 0, self.state[np.asarray(rows)]


class PicturesSettings(BaseModel):
    """It shows what a tiny VLA looks at."""

    type: Literal["tests.pipeline.test_check:PicturesSettings"] = "tests.pipeline.test_check:PicturesSettings"

    def spec(self):
        return Pictures(1).spec

    def build(self, rows):
        return Pictures(rows)


PICTURES = {"type": "tests.pipeline.test_check:PicturesSettings"}
WHOLE = {"type": "tests.pipeline.test_check:WholeSettings"}
MUTE = {"type": "tests.pipeline.test_check:Mute"}
IMITATE = {"demonstrations": {}, "supervised": {}}
REFUSED = [
    ({"env": "gymnasium:CartPol-v1"}, r"env.id = CartPol-v1: .*the nearest is CartPole-v"),
    (
        {"env": {"type": "tests.pipeline.test_check:LackingSettings"}},
        r"env.type = .*Lacking.*: the package robot_hands is not installed; run: .* -m pip install robot_hands",
    ),
    ({"env": {"type": "tests.pipeline.test_check:UnpluggedSettings"}}, r"the robot is not plugged in; plug it in"),
    ({"env": MUTE}, r"env.type = .*Mute: its settings need spec"),
    (
        {"policy": MUTE},
        r"policy.type = .*Mute: its settings have no form\(\) and build\(\); write form\(self, env_spec\)",
    ),
    ({"policy": {"type": "gaussian"}}, r"policy.type = 'gaussian' .*use policy.type = 'categorical'"),
    ({"policy": {"type": "tiny_vla"}}, r"policy.type = .*tiny_vla"),
    ({"rollout": {"sharding": "os:nothing"}}, r"rollout.sharding = os:nothing: .*name an importable"),
    ({**LATENCY, "rollout": {"sharding": "even:2"}}, r"rollout.sharding = even:2: .*set rollout.sharding to whole"),
    ({**LATENCY, "rollout": {"segment_steps": 4}}, r"rollout.segment_steps = 4: .*set segment_steps to 0"),
    (
        {"env": WHOLE, "policy": {"type": "gaussian"}, "rollout": {"segment_steps": 4}},
        r"rollout.segment_steps = 4: the environment resets only whole batches",
    ),
    (
        {"rollout": {"queue_key": "os:nothing"}},
        r"rollout: queue_key 'os:nothing' cannot be loaded .*name an importable",
    ),
    (
        {"rollout": {"queue_key": "tests.pipeline.test_check:no_key"}},
        r"rollout: queue_key '.*no_key' raised AttributeError: .* \(.*test_check.py, line \d+\); fix it there",
    ),
    (
        {"rollout": {"queue_key": "tests.pipeline.test_check:no_order"}},
        r"rollout: queue_key '.*no_order' returned None; return a number, a string, or a tuple of these",
    ),
    (
        {"rollout": {"queue_key": "tests.pipeline.broken:key"}},
        r"rollout: queue_key '.*broken:key' cannot be loaded \(RuntimeError: there is no robot\); name an importable",
    ),
    (
        {"rollout": {"sharding": "tests.pipeline.test_check:second_is_cut", "env_batches": 2, "join": "all"}},
        r"rollout.sharding = .*second_is_cut: .*set rollout.sharding to whole",
    ),
    (
        {"rollout": {"sharding": "tests.pipeline.test_check:no_order"}},
        r"rollout.sharding = .*no_order: it raised TypeError: no_order\(\) takes 1 .*given; fix it there",
    ),
    (
        {"rollout": {"sharding": "tests.pipeline.test_check:in_shares"}},
        r"rollout.sharding = .*in_shares: it raised ValueError: .*'no' \(.*test_check.py, line \d+\); fix it there",
    ),
    (
        {
            "rollout": {"sharding": "tests.pipeline.test_check:second_is_cut"},
            "batching": {"type": "dynamic", "max_rows": 2},
        },
        r"batching.max_rows = 2: a request is never split and .*second_is_cut makes a slot of 6 rows; raise this",
    ),
    (
        {**LATENCY, "rollout": {"sharding": "even:2", "join": "none"}},
        r"rollout.join = none: .*set rollout.join to all",
    ),
    (
        {"rollout": {"sharding": "even:2", "join": "all"}},
        r"rollout.sharding = even:2: .*set rollout.sharding to whole",
    ),
    (
        {"rollout": {"buckets": [2, 4]}},
        r"rollout.buckets = \[2, 4\]: a batch may have 6 rows.*; add 8, or use powers",
    ),
    (
        {"algorithm": {"reward_level": "action"}},
        r"algorithm.reward_level = action: .*set algorithm.reward_level to chunk",
    ),
    (
        {"env": PICTURES, "policy": {"type": "pi0", "value_level": "action"}},
        r"algorithm.reward_level = chunk: .*set algorithm.reward_level to action, or policy.value_level chunk$",
    ),
    (
        {"env": WHOLE, "policy": {"type": "tests.pipeline.test_check:PerActionSettings"}},
        r"algorithm.reward_level = chunk: .*set algorithm.reward_level to action",
    ),
    (
        {"env": PICTURES, "policy": {"type": "tiny_vla", "head": {"type": "flow_matching", "method": "ode"}}},
        r"policy.type = tiny_vla: its log-probs do not depend on its parameters.*flow_cps or flow_noise\), or set",
    ),
    (
        {
            "env": WHOLE,
            "policy": {"type": "tests.pipeline.test_check:NoCriticSettings"},
            "training": {"optimizer": {"value_lr": 0.001}},
        },
        r"training.optimizer.value_lr = 0.001: the policy has no module `critic`; leave it out",
    ),
    (IMITATE, r"demonstrations = set: .*set demonstrations and supervised to null"),
    (
        {"placement": {"trainer": {"device": "cuda:99"}}},
        r"placement.trainer.devices = 99: torch sees \d+ CUDA devices here; use cpu",
    ),
    (
        {"placement": {"generators": {"devices": "98-99"}}},
        r"placement.generators.devices = 98-99: torch sees \d+ CUDA devices here; use cpu",
    ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_a_wrong_combination_is_one_sentence(changes, words):
    with pytest.raises(ConfigError, match=f"^{words}") as refusal:
        validate_run(config(**changes))
    assert "\n" not in str(refusal.value)


def test_too_little_shared_memory_is_said_before_anything_starts():
    huge = {"launcher": "local", "training": {"mini_batch_samples": 10**10}}
    with pytest.raises(StartError, match=r"^shared memory: [\d,.]+ MB wanted .*, [\d,.]+ MB free in .*; lower"):
        validate_run(config(**huge))
    validate_run(config(**huge), trainer=False)  # no sample waits then
    validate_run(config(**{**huge, "launcher": "inline"}))


def test_what_fits_is_given_back():
    checked = validate_run(config())
    assert checked.spec.max_steps == 40
    again = validate_run(config())
    weights, others = checked.policy.state_dict(), again.policy.state_dict()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    validate_run(config(env=WHOLE, policy={"type": "gaussian"}, **IMITATE))


@pytest.mark.parametrize(
    "override", ["env=gymnasium:CartPol-v1", "policy=gaussian", "rollout.queue_key=os:nothing", "rollout.sharding=os:x"]
)
@pytest.mark.parametrize("out", [False, True])
def test_a_refused_run_leaves_no_folder(override, out, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "cartpole", override, *(["--out", "mine"] if out else [])]) == 2
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err.count("\n") == 1


class ShortSettings(WholeSettings):
    """Its batch has fewer rows than were asked for."""

    type: Literal["tests.pipeline.test_check:ShortSettings"] = "tests.pipeline.test_check:ShortSettings"

    made: ClassVar[list[Counting]] = []

    def build(self, rows):
        self.made.append(Counting(rows - 1, reset_rows=False))
        return self.made[-1]


class BoundlessSettings(WholeSettings):
    """Its spec cannot be."""

    type: Literal["tests.pipeline.test_check:BoundlessSettings"] = "tests.pipeline.test_check:BoundlessSettings"

    def spec(self):
        return replace(Counting(1).spec, max_steps=0)


def test_a_spec_that_cannot_be_is_named_before_the_start():
    changes = {"env": {"type": "tests.pipeline.test_check:BoundlessSettings"}, "policy": {"type": "gaussian"}}
    with pytest.raises(ConfigError, match=r"env.type = .*BoundlessSettings: .* max_steps is 1 or more, got 0"):
        validate_run(config(**changes))


def test_a_batch_that_is_not_what_was_asked_for_is_refused_and_ends_a_run():
    short = config(env={"type": "tests.pipeline.test_check:ShortSettings"}, policy={"type": "gaussian"})
    with pytest.raises(ConfigError, match=r"^env.type = .*: build\(6\) returned rows = 5; it must have 6 rows"):
        validate_run(short)
    with pytest.raises(RunHalted, match=r"env.build\(6\) gave rows = 5, it must be 6; correct the environment"):
        build_pipeline(RunContext(short))
    assert ShortSettings.made[-1].closed


class OddSettings(WholeSettings):
    """Its spec is whatever `says` makes of it."""

    type: Literal["tests.pipeline.test_check:OddSettings"] = "tests.pipeline.test_check:OddSettings"
    says: str = "none"

    def spec(self):
        if self.says == "raise":
            raise RuntimeError("no licence")


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("raise", r"spec raised RuntimeError: no licence \(.*test_check.py, line \d+\); fix it there"),
        ("none", r"spec returned NoneType; return an EnvSpec"),
    ],
)
def test_a_spec_that_is_none_is_refused(says, told):
    with pytest.raises(ConfigError, match=told):
        validate_run(
            config(env={"type": "tests.pipeline.test_check:OddSettings", "says": says}, policy={"type": "gaussian"})
        )


def test_a_run_without_a_trainer_takes_no_device_for_it():
    """A policy can be evaluated where the device that it was trained on is not."""
    settings = config(placement={"trainer": {"devices": "700"}})
    with pytest.raises(ConfigError, match=r"placement\.trainer\.devices = 700"):
        validate_run(settings)
    validate_run(settings, trainer=False)


@pytest.mark.parametrize(
    ("batching", "noted"),
    [
        ({"max_rows": 64}, True),
        ({"max_rows": 16}, False),
        ({"max_rows": 64, "max_requests": 2}, False),
        ({"max_rows": 64, "max_wait_ms": 0.0}, False),
        ({"max_rows": 64, "fire_when_all_wait": True}, False),
    ],
)
def test_a_batch_that_never_fills_is_noted(batching, noted):
    limits = {"type": "dynamic", "fire_when_all_wait": False, "max_wait_ms": 20.0, **batching}
    found = list(batching_findings(config(rollout={"simulators": 2, "rows": 8, "env_batches": 1}, batching=limits)))
    assert [finding.state for finding in found] == ["note"] * noted
    assert all("all rows together are 16, so every forward pass waits" in finding.detail for finding in found)
    assert all(finding.fix.endswith("max_rows to at most 16") for finding in found)


@pytest.mark.parametrize("words", [["train", "cartpole", "--check"], ["check", "cartpole"]])
def test_both_checks_note_a_batch_that_never_fills(words, capsys):
    limits = ["batching.fire_when_all_wait=false", "batching.max_rows=64", "rollout.rows=8", "launcher=inline"]
    assert main([*words, *limits, "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["state"] for check in checks if check["name"] == "batching"] == ["note"]
