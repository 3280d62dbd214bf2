"""Every wrong key, type or combination is refused by a sentence; every right one is kept."""

from __future__ import annotations

from typing import Any, Literal, get_args

import pytest
from pydantic import BaseModel, ConfigDict, computed_field

from polyrhythm.config.explain import OTHER_NAMES, paths_to
from polyrhythm.config.load import merge, validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import DynamicBatching, LockstepBatching
from polyrhythm.errors import ConfigError, PolyrhythmError

THING = f"{__name__}:Thing"


class Thing(BaseModel):
    """A user's own settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: str
    size: int = 1
    flavour: Literal["sweet", "salty"] = "sweet"


class Part(BaseModel):
    """A section of a user's own settings."""

    width: int = 1


class Careless(BaseModel):
    """A user's own settings, of a class that says nothing of unknown keys."""

    type: str
    size: int = 1
    part: Part = Part()

    @computed_field
    @property
    def area(self) -> int:
        return self.size * self.part.width


class Taking(BaseModel):
    """A user's own settings that keep whatever they are given."""

    model_config = ConfigDict(extra="allow")
    type: str


class Holding(BaseModel):
    """A user's own settings with a section that keeps any key, alone, in a list, or as one of two."""

    type: str
    size: int = 1
    free: Taking | None = None
    parts: tuple[Part | Taking, ...] = ()
    by_name: dict[str, Taking] = {}


class TakingAll(Taking):
    """A user's own settings that keep whatever they are given, with a section that does not."""

    part: Part = Part()


class Typeless(BaseModel):
    """Not settings: without a type it could not be loaded again."""


BASE: dict[str, Any] = {
    "name": "test",
    "env": {"type": THING},
    "policy": {"type": THING},
    "training": {"versions": 3, "mini_batch_samples": 8},
}


def refusal(change: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(merge(BASE, change))
    return str(caught.value)


def _models(model: type[BaseModel]) -> set[type[BaseModel]]:
    found = {model}
    for field in model.model_fields.values():
        pending: list[Any] = [field.annotation]
        while pending:
            annotation = pending.pop()
            pending += get_args(annotation)
            if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in found:
                found |= _models(annotation)
    return found


def test_every_field_is_documented_in_one_line() -> None:
    models = _models(RunConfig) - {BaseModel}
    assert len(models) > 12
    for model in models:
        for name, field in model.model_fields.items():
            if name == "type" and not field.is_required():
                continue  # its value is its documentation
            assert field.description, f"{model.__name__}.{name}"
            assert "\n" not in field.description, f"{model.__name__}.{name}"


def test_defaults_are_asynchronous_and_bounded() -> None:
    config = validate(BASE)
    assert isinstance(config.batching, DynamicBatching)
    assert (config.freshness.max_lag, config.freshness.bound, config.freshness.on_update) == (2.0, "sample", "continue")
    assert config.training.batch_size == 8
    assert isinstance(config.env, Thing)


def test_a_run_has_processes_of_its_own_on_the_cpu_and_begins_anew() -> None:
    config = validate(BASE)
    assert (config.launcher, config.resume, config.data_plane.transport) == ("local", "never", "ipc")
    kinds = (config.placement.simulators, config.placement.generators, config.placement.trainer)
    assert (config.placement.preset, [kind.devices for kind in kinds]) == (None, [None] * 3), "None: the CPU"
    assert config.checkpoint.every_versions == 1, "weights that were seen can always be gone back to"


#: What is proposed for a key that means the output.
OUT = "did you mean --out FOLDER (of this run) or out_dir?"


@pytest.mark.parametrize(("device", "devices"), [("cpu", "cpu"), ("cuda", "0"), ("cuda:0", "0"), ("cuda:12", "12")])
def test_the_key_for_a_single_device_means_a_list_of_one(device: str, devices: str) -> None:
    config = validate(merge(BASE, {"placement": {"trainer": {"device": device}}}))
    assert config.placement.trainer.devices == devices


@pytest.mark.parametrize(
    ("given", "devices"),
    [("cpu", "cpu"), ("all", "all"), ("0-3", "0-3"), ("0, 2,4", "0,2,4"), (3, "3"), ([0, 2], "0,2"), (None, None)],
)
def test_devices_are_words_or_ids_and_are_saved_as_text(given: Any, devices: str | None) -> None:
    config = validate(merge(BASE, {"placement": {"generators": {"devices": given}}}))
    assert config.placement.generators.devices == devices
    assert validate(config.model_dump(mode="json")).placement == config.placement


def test_placement_is_short_for_its_preset_and_other_keys_lie_over_it() -> None:
    config = validate(merge(merge(BASE, {"placement": "hybrid"}), {"placement": {"generators": {"threads": 2}}}))
    assert (config.placement.preset, config.placement.generators.threads) == ("hybrid", 2)


@pytest.mark.parametrize("inherited", ["colocated", {"preset": "colocated", "trainer": {"threads": 2}}])
@pytest.mark.parametrize("change", [None, {"preset": None}])
def test_null_takes_an_inherited_placement_back(inherited: Any, change: Any) -> None:
    config = validate(merge(merge(BASE, {"placement": inherited}), {"placement": change}))
    assert config.placement.preset is None
    assert validate(merge(merge(BASE, {"placement": inherited}), {"placement": {"preset": "hybrid"}})).placement.preset


def test_lockstep_is_a_setting() -> None:
    config = validate(
        merge(BASE, {"freshness": {"max_lag": 0, "on_update": "drain"}, "batching": {"type": "lockstep"}})
    )
    assert isinstance(config.batching, LockstepBatching)
    assert config.freshness.max_lag == 0


def test_max_lag_zero_with_continue_is_accepted() -> None:
    assert validate(merge(BASE, {"freshness": {"max_lag": 0, "on_update": "continue"}})).freshness.max_lag == 0


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        validate(BASE).seed = 3


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"trainig": {}}, ["trainig: no such key", "did you mean training?"]),
        (
            {"training": {"mini_batch_sampels": 3}},
            ["training.mini_batch_sampels = 3", "did you mean mini_batch_samples?"],
        ),
        ({"training": {"lrr": 1}}, ["training.lrr = 1", "did you mean training.optimizer.lr?"]),
        ({"training": {"odrer": 1}}, ["training.odrer = 1", "did you mean order?"]),
        ({"batching": {"max_wait": 3}}, ["batching.max_wait = 3", "did you mean max_wait_ms?"]),
        ({"batching": {"type": "lockstp"}}, ["batching.type = 'lockstp'", "did you mean lockstep?", "dynamic"]),
        ({"algorithm": {"loss": "foo"}}, ["algorithm.loss.type = 'foo': it must be 'ppo', "]),
        (
            {"algorithm": {"advantage": {"type": "foo", "std": 1}}},
            ["algorithm.advantage.type = 'foo': it must be 'gae', "],
        ),
        ({"groups": {"size": {"of": None, "at": [True]}}}, ["groups.size = {of: null, at: [true]}: it must be"]),
        ({"out": "x"}, [f"out = 'x': no such key; {OUT} the sections are"]),
        ({"output": "x"}, [f"output = 'x': no such key; {OUT} the sections are"]),
        ({"groups": {"output": 3}}, [f"groups.output = 3: no such key; {OUT} the keys of groups are"]),
        ({"training": {"learning_rate": 1}}, ["learning_rate = 1: no such key; did you mean training.optimizer.lr? "]),
        ({"puts": 3}, ["puts = 3: no such key; the sections are"]),
        ({"env": {"output": 3}}, ["env.output = 3: no such key; the keys of env are"]),
        ({"batching": {"type": "lockstep", "max_rows": 3}}, ["batching.max_rows = 3", "no such key"]),
        ({"batching": 3}, ["batching = 3", "a section"]),
        ({"batching": {"type": "aut"}}, ["batching.type = 'aut'", "did you mean auto?"]),
        ({"batching": {"type": "auto", "max_wait_ms": 5.0}}, ["batching.max_wait_ms = 5.0", "no such key"]),
        ({"batching": {"type": "auto", "max_rows": 0}}, ["batching.max_rows = 0", "at least 1"]),
        ({"batching": {"max_wait_ms": -1.0}}, ["batching.max_wait_ms = -1.0", "at least 0"]),
        ({"rollout": {"routing": "afinity"}}, ["rollout.routing = 'afinity'", "did you mean affinity?"]),
        ({"evaluation": {"priority": "fist"}}, ["evaluation.priority = 'fist'", "did you mean first?"]),
        ({"evaluation": {"max_wait_s": -1}}, ["evaluation.max_wait_s = -1", "at least 0"]),
        ({"freshness": {"on_update": "contine"}}, ["freshness.on_update = 'contine'", "did you mean continue?"]),
        ({"algorithm": {"loss": {"clip": 1}}}, ["algorithm.loss.clip = 1", "the keys of algorithm.loss"]),
        ({"training": {"optimizer": {"betas": [0.9, 1.0]}}}, ["training.optimizer.betas.1 = 1.0", "less than 1"]),
        ({"training": {"optimizer": {"lr": -1}}}, ["training.optimizer.lr = -1", "more than 0"]),
        ({"rollout": {"rows": True}}, ["rollout.rows = true", "a whole number"]),
        ({"rollout": {"rows": "8"}}, ["rollout.rows = '8'", "a whole number"]),
        ({"groups": {"extra_groups": -1}}, ["groups.extra_groups = -1", "at least 0"]),
        ({"groups": {"max_filtered": 0}}, ["groups.max_filtered = 0", "at least 1"]),
        ({"groups": {"on_max_filtered": "halt"}}, ["groups.on_max_filtered = 'halt'", "accept"]),
        ({"rollout": {"rows": 0}}, ["rollout.rows = 0", "at least 1"]),
        ({"rollout": 3}, ["rollout = 3", "a section"]),
        ({"freshness": {"max_lag": float("inf")}}, ["freshness.max_lag = inf", "finite"]),
        ({"freshness": {"max_lag": -1}}, ["freshness.max_lag = -1", "at least 0"]),
        ({"evaluation": {"greedy": "yes"}}, ["evaluation.greedy = 'yes'", "true or false"]),
        ({"name": "a/b"}, ["name = 'a/b'"]),
        ({"launcher": "inlin"}, ["launcher = 'inlin'", "did you mean inline?"]),
        ({"shutdown_s": -1}, ["shutdown_s = -1", "at least 0"]),
        (
            {"placement": {"trainer": {"device": "gpu"}}},
            ["placement.trainer.device = 'gpu'", "cuda:N", "or device ids"],
        ),
        ({"placement": {"trainer": {"devices": "cuda:1"}}}, ["placement.trainer.devices = 'cuda:1'", "write 1"]),
        ({"placement": {"trainer": {"device": "cpu", "devices": 1}}}, ["trainer.device = 'cpu'", "set devices = cpu"]),
        ({"placement": {"simulators": {"devices": "3-1"}}}, ["placement.simulators.devices = '3-1'", "goes down"]),
        ({"placement": {"simulators": {"devices": [0, 0]}}}, ["placement.simulators.devices = [0, 0]", "named twice"]),
        ({"placement": {"simulators": {"devices": "0-99999"}}}, ["devices = '0-99999'", "device ids such as"]),
        ({"placement": "hybird"}, ["placement = 'hybird'", "did you mean hybrid? it must be", "disaggregated or auto"]),
        ({"placement": {"preset": "hybird"}}, ["placement.preset = 'hybird'", "did you mean hybrid?"]),
        ({"placement": {"generators": {"threads": 0}}}, ["placement.generators.threads = 0", "at least 1"]),
        ({"data_plane": {"transport": "ipx"}}, ["data_plane.transport = 'ipx'", "did you mean ipc?"]),
        ({"supervision": {"step_s": 0}}, ["supervision.step_s = 0", "more than 0"]),
        ({"supervision": {"heartbeat": 3}}, ["supervision.heartbeat = 3", "did you mean heartbeat_s?"]),
        ({"checkpoint": {"every_versions": 0}}, ["checkpoint.every_versions = 0", "at least 1"]),
        ({"env": {"size": "big"}}, ["env.size = 'big'", "whole number"]),
        ({"env": {"sise": 3}}, ["env.sise = 3", "did you mean size?"]),
        ({"env": {"flavour": "swet"}}, ["env.flavour = 'swet'", "did you mean sweet?"]),
        (
            {"env": {"type": f"{__name__}:Careless", "sise": 3}},
            ["env.sise = 3", "did you mean size?", "the keys of env are type, size, part"],
        ),
        ({"policy": {"type": f"{__name__}:Careless", "sise": 3}}, ["policy.sise = 3", "did you mean size?"]),
        (
            {"env": {"type": f"{__name__}:Careless", "part": {"widht": 3}}},
            ["env.part.widht = 3", "did you mean width?", "the keys of env.part are width"],
        ),
        ({"env": None}, ["env = null", "type", "metaworld"]),
        ({"env": {"type": "gymnasum"}}, ["env.type = 'gymnasum'", "did you mean gymnasium?"]),
        ({"policy": {"type": "tiny_vl"}}, ["policy.type = 'tiny_vl'", "did you mean tiny_vla?"]),
        ({"env": {"type": "no_such_module:Thing"}}, ["env.type", "cannot be imported"]),
        ({"env": {"type": f"{__name__}:Nothing"}}, ["env.type", "has no Nothing"]),
        ({"env": {"type": f"{__name__}:Typeless"}}, ["env.type", "`type` field"]),
        ({"env": {"type": f"{__name__}:refusal"}}, ["env.type", "pydantic model"]),
    ],
)
def test_wrong_keys_and_values_name_path_value_and_remedy(change: dict[str, Any], parts: list[str]) -> None:
    message = refusal(change)
    for part in parts:
        assert part in message
    assert "pydantic.dev" not in message
    assert "\n" not in message


def test_names_of_other_systems_are_not_ours_and_mean_settings_of_ours() -> None:
    ours = paths_to(None, RunConfig)
    assert set(OTHER_NAMES) <= set(ours)
    names = [name for listed in OTHER_NAMES.values() for name in listed]
    assert len(names) == len(set(names))
    assert {name for name in names if name in {path.rpartition(".")[2] for path in ours}} == {"batch_size"}


def test_what_own_settings_compute_is_saved_and_read_again() -> None:
    env = {"type": f"{__name__}:Careless", "size": 3, "part": {"width": 2}}
    saved = validate({**BASE, "env": env}).model_dump(mode="json")
    assert saved["env"]["area"] == 6
    assert validate(saved).env == Careless(**env)


def test_own_settings_that_allow_any_key_keep_it() -> None:
    taken = validate({**BASE, "env": {"type": f"{__name__}:Taking", "colour": "red"}}).env
    assert taken.model_extra == {"colour": "red"}


def test_a_section_of_own_settings_that_allows_any_key_keeps_it() -> None:
    red = {"type": "x", "colour": "red"}
    content = {"free": red, "parts": [red, {"width": 2}], "by_name": {"first": red}}
    env: Any = validate({**BASE, "env": {"type": f"{__name__}:Holding", **content}}).env
    for kept in (env.free, env.parts[0], env.by_name["first"]):
        assert kept.model_extra == {"colour": "red"}
    assert env.parts[1].width == 2


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"type": "Holding", "sise": 2, "free": {"type": "x", "colour": "red"}}, "env.sise = 2: no such key; did"),
        ({"type": "Holding", "parts": [{"widht": 2}]}, "widht = 2: no such key"),
        ({"type": "TakingAll", "colour": "red", "part": {"widht": 2}}, "env.part.widht = 2: no such key; did you mean"),
        ({"type": "TakingAll", "colour": "red", "part": {"width": "wide"}}, "env.part.width = 'wide': it must be"),
    ],
)
def test_a_key_is_refused_where_its_own_section_does_not_allow_it(env: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refusal:
        validate({**BASE, "env": {**env, "type": f"{__name__}:{env['type']}"}})
    assert "colour" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "path", "remedy"),
    [
        ({"freshness": {"on_update": "abort"}}, "freshness.on_update", "one-pass policy"),
        ({"groups": {"size": 3}}, "groups.size", "make it 6 or 9"),
        ({"groups": {"size": 16}}, "groups.size", "make it 16"),
        ({"groups": {"size": 4}, "rollout": {"segment_steps": 5}}, "rollout.segment_steps", "set segment_steps to 0"),
        ({"groups": {"min_return": 0.9, "max_return": 0.1}}, "groups.min_return", "below max_return 0.1; lower it"),
        ({"groups": {"extra_groups": 1}, "training": {"order": "ticket"}}, "groups.extra_groups", "order to arrival"),
        ({"groups": {"extra_members": 2}, "rollout": {"segment_steps": 5}}, "groups.extra_members", "segment_steps"),
        ({"groups": {"max_return": 0.9}, "rollout": {"segment_steps": 5}}, "rollout.segment_steps", "bounds to null"),
        ({"rollout": {"rows": 100}}, "batching.max_rows", "largest slot has 100 rows"),
        (
            {"rollout": {"rows": 9, "sharding": "even:2"}, "batching": {"max_rows": 4}},
            "batching.max_rows",
            "has 5 rows",
        ),
        ({"rollout": {"sharding": [1, 7]}, "batching": {"max_rows": 6}}, "batching.max_rows", "has 7 rows"),
        ({"rollout": {"sharding": [3, 4]}}, "rollout.sharding", "slots of 7 rows"),
        ({"rollout": {"sharding": [8, 0]}}, "rollout.sharding", "at least 1 row"),
        ({"rollout": {"sharding": []}}, "rollout.sharding", "at least 1 row"),
        ({"rollout": {"sharding": "even:9"}}, "rollout.sharding", "at most even:8"),
        ({"rollout": {"sharding": "even:0"}}, "rollout.sharding", "even:N"),
        ({"rollout": {"sharding": "halves"}}, "rollout.sharding", "even:N"),
        ({"rollout": {"queue_key": "shortest"}}, "rollout.queue_key", "module:function"),
        ({"supervised": {}}, "supervised", "add demonstrations"),
        ({"demonstrations": {}}, "demonstrations", "add supervised"),
        ({"demonstrations": {}, "supervised": {"warmup_steps": 90}}, "supervised.warmup_steps", "lower it"),
        ({"algorithm": {"loss": "decoupled_ppo", "proximal": "behavior"}}, "algorithm.proximal", "recompute"),
        (
            {"algorithm": {"loss": {"behave_weight_threshold": 2.0}}},
            "algorithm.loss.behave_weight_threshold",
            "no such key; the keys of algorithm.loss are type, clip_low, clip_high, dual_clip",
        ),
        ({"algorithm": {"loss": "ppoo"}}, "algorithm.loss.type", "did you mean ppo"),
        ({"algorithm": {"loss": {"type": "tis", "clip_low": 0.2}}}, "algorithm.loss.clip_low", "are type, cap"),
        ({"algorithm": {"advantage": "rloo"}}, "groups.size", "rloo compares the samples of a group"),
        ({"algorithm": {"overlong": {"penalty": 0.5}}}, "algorithm.overlong.penalty", "tokens is null"),
        ({"algorithm": {"advantage": "maxrl"}}, "groups.size", "maxrl compares the samples of a group"),
        ({"algorithm": {"loss": {"type": "gipo", "sigma": 0.0}}}, "algorithm.loss.sigma", "more than 0"),
        (
            {"algorithm": {"advantage": "reinforce_plus_plus"}, "rollout": {"segment_steps": 5}},
            "rollout.segment_steps",
            "needs whole episodes",
        ),
        ({"algorithm": {"loss": "no-module:"}}, "algorithm.loss.type", "write module:function, such as"),
        ({"algorithm": {"loss": None}}, "algorithm.loss", "give a name, such as ppo or gae, or a section"),
        ({"algorithm": {"loss": {"type": None}}}, "algorithm.loss", "give a name, such as ppo"),
        ({"algorithm": {"value": {"coef": 0.0}}}, "algorithm.value.coef", "gae uses a value that nothing would"),
        (
            {"algorithm": {"advantage": "v_trace", "loss": "tis", "proximal": "behavior"}},
            "algorithm.proximal",
            "v_trace",
        ),
        ({"algorithm": {"advantage": "v_trace"}}, "algorithm.loss.type", "use tis, cispo"),
        (
            {"algorithm": {"loss": "tis", "advantage": {"type": "v_trace", "trace_cap": 2.0}}},
            "algorithm.advantage.trace_cap",
            "larger than rho_cap 1",
        ),
        (
            {"algorithm": {"loss": "tis", "proximal": "interpolate"}},
            "algorithm.proximal",
            "reads no proximal policy",
        ),
        ({"algorithm": {"kl": {"place": "reward"}}}, "algorithm.kl.coef", "give a weight"),
        (
            {"algorithm": {"loss": {"type": "topr", "positive_weight": 0.0, "negative_weight": 0.0}}},
            "algorithm.loss.positive_weight",
            "nothing is learned",
        ),
        (
            {"algorithm": {"value": {"coef": 0.0}}, "training": {"critic_warmup_updates": 1}},
            "training.critic_warmup_updates",
            "algorithm.value.coef is 0",
        ),
        ({"algorithm": {"mismatch_cap": 5.0, "loss": "tis"}}, "algorithm.mismatch_cap", "weighted twice"),
        ({"algorithm": {"mismatch_cap": 5.0, "proximal": "behavior"}}, "algorithm.mismatch_cap", "recompute"),
        ({"algorithm": {"kl": {"coef": 0.1, "estimator": "k1"}}}, "algorithm.kl.estimator", "place reward"),
        ({"algorithm": {"aggregation": "sum_over_constant"}}, "algorithm.aggregation_constant", "give the constant"),
        (
            {"algorithm": {"kl": {"coef": 0.1, "estimator": "k2", "cap": 10.0}}},
            "algorithm.kl.cap",
            "set estimator k3",
        ),
        ({"algorithm": {"loss": {"type": "clip_cov", "cov_low": 5.0}}}, "algorithm.loss.cov_low", "lower it"),
        ({"algorithm": {"loss": {"type": "tis", "floor": 3.0}}}, "algorithm.loss.floor", "larger than cap 2"),
        ({"algorithm": {"loss": "clip_cov", "proximal": "interpolate"}}, "algorithm.proximal", "set it to recompute"),
        ({"algorithm": {"loss": "m2po", "proximal": "behavior"}}, "algorithm.proximal", "set it to recompute"),
        (
            {
                "algorithm": {
                    "advantage": {"type": "reinforce_plus_plus", "returns": "to_go", "group_baseline": True},
                },
            },
            "algorithm.advantage.group_baseline",
            "set returns total",
        ),
        (
            {"algorithm": {"rollout_correction": {"weight_max": 2.0}}},
            "algorithm.rollout_correction.weight_max",
            "set weight",
        ),
        (
            {"algorithm": {"rollout_correction": {"weight": "token", "count_rejected": False}}},
            "algorithm.rollout_correction.count_rejected",
            "set reject",
        ),
        (
            {"algorithm": {"rollout_correction": {"reject": "ratio"}}},
            "algorithm.rollout_correction.reject",
            "set reject_above",
        ),
        (
            {"algorithm": {"rollout_correction": {"weight": "token", "weight_min": 3.0, "weight_max": 2.0}}},
            "algorithm.rollout_correction.weight_min",
            "larger than weight_max 2",
        ),
        (
            {"algorithm": {"rollout_correction": {"weight": "token"}, "loss": "decoupled_ppo"}},
            "algorithm.rollout_correction.weight",
            "use ppo, or weight none",
        ),
        (
            {"algorithm": {"rollout_correction": {"weight": "token"}, "loss": "gspo"}},
            "algorithm.rollout_correction.weight",
            "use gspo with ratio_to proximal",
        ),
        (
            {"algorithm": {"rollout_correction": {"weight": "token"}, "mismatch_cap": 2.0}},
            "algorithm.rollout_correction.weight",
            "set one of them",
        ),
        (
            {"algorithm": {"rollout_correction": {"weight": "token"}, "proximal": "behavior"}},
            "algorithm.rollout_correction.weight",
            "set algorithm.proximal recompute",
        ),
        (
            {"algorithm": {"bootstrap": "never"}, "rollout": {"segment_steps": 8}},
            "algorithm.bootstrap",
            "segment_steps 0",
        ),
        ({"algorithm": {"early_stop_ratio": 0.9}}, "algorithm.early_stop_ratio", "more than 1"),
        ({"algorithm": {"loss": {"dual_clip": 1.0}}}, "algorithm.loss.dual_clip", "more than 1"),
        ({"algorithm": {"reward_level": "action", "logprob_level": "chunk"}}, "algorithm.reward_level", "chunk"),
        ({"training": {"minibatch_steps": 8, "micro_batch_steps": 9}}, "training.micro_batch_steps", "8 steps"),
        ({"training": {"critic_warmup_updates": 3}}, "training.critic_warmup_updates", "give it at most 2"),
        ({"evaluation": {"episodes": 8, "greedy": False}}, "evaluation.episodes", "set one"),
        ({"evaluation": {"weights": "pause", "priority": "last"}}, "evaluation.priority", "set second_copy"),
        ({"evaluation": {"priority": "last"}}, "evaluation.priority", "set evaluation.every"),
        ({"evaluation": {"max_wait_s": 2.0}}, "evaluation.max_wait_s", "for priority last, not turns"),
    ],
)
def test_impossible_combinations_say_what_to_change(change: dict[str, Any], path: str, remedy: str) -> None:
    message = refusal(change)
    assert message.startswith(f"{path} = ")
    assert remedy in message


@pytest.mark.parametrize(
    ("sharding", "largest"),
    [("whole", 8), ("even:3", 3), ([2, 6], 6), ("my.module:cut", None), ("even:8", 1), ("rows", 1)],
)
def test_largest_slot(sharding: Any, largest: int | None) -> None:
    assert validate(merge(BASE, {"rollout": {"sharding": sharding}})).rollout.largest_slot_rows == largest


def test_every_problem_has_a_line() -> None:
    with pytest.raises(PolyrhythmError) as caught:
        validate({"name": "x", "env": {"type": THING}, "policy": {"type": THING, "size": "a"}, "sed": 1})
    assert isinstance(caught.value, ConfigError)
    assert len(caught.value.problems) == 3
    head, *lines = str(caught.value).splitlines()
    assert head == "3 problems"
    assert lines == [f"  {problem}" for problem in caught.value.problems]
    assert any(problem.startswith("training is missing; add it") for problem in caught.value.problems)


def test_of_many_problems_the_first_eight_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(BASE | {f"key{number}": 1 for number in range(20)}, origin="mine.yaml")
    head, *lines = str(caught.value).splitlines()
    assert head == "mine.yaml: 20 problems"
    assert (len(lines), lines[-1]) == (9, "  and 12 more")
