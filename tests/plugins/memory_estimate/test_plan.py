"""What every device holds, as plain sums that can be followed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.long import long
from tests.pipeline.runs import config

from polyrhythm.config.load import load_config
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import StartError
from polyrhythm.pipeline.build import env_settings, policy_settings
from polyrhythm.plugins.memory_estimate.needs import HOST, SHARED, MemoryPart, micro_batch_rows, pass_rows
from polyrhythm.plugins.memory_estimate.plan import DeviceMemory, Machine, MemoryPlan, Planner, with_settings
from polyrhythm.plugins.memory_estimate.remedies import find_remedies
from polyrhythm.plugins.memory_estimate.room import check_room
from polyrhythm.policies.form import PolicyForm
from polyrhythm.runtime.devices import Devices, devices_here
from polyrhythm.specs import EnvSpec

GB = 10**9
#: A form of billions of parameters that nobody builds.
LARGE = {"act_bytes": 7 * GB, "train_bytes": 14 * GB, "trainable_bytes": 12 * GB, "block_bytes": 2 * GB}
DEVICES: dict[str, Any] = {
    "launcher": "local",
    "placement": {"trainer": {"devices": 0}, "generators": {"devices": 0}},
}


def planner_of(run: RunConfig, *, devices: int = 8, free: int = 80 * GB, large: bool = True) -> Planner:
    spec, form = parts_of(run)
    planner = Planner(spec, Machine(devices_here(devices), lambda _: free))
    planner.take_form(run, replace(form, **LARGE) if large else form)
    return planner


def parts_of(run: RunConfig) -> tuple[EnvSpec, PolicyForm]:
    spec = env_settings(run).spec()
    return spec, policy_settings(run).form(spec)


def sizes(plan: MemoryPlan, device: str, station: str) -> dict[str, int]:
    found = next(own for own in plan.devices if own.name == device)
    return found.stations()[station]


def test_one_rank_keeps_everything() -> None:
    run = config(**DEVICES)
    plan = planner_of(run).plan(run)
    assert plan.activations.startswith("its settings have no outline")
    assert sizes(plan, "cuda:0", "generator-0")["weights"] == 7 * GB
    trainer = sizes(plan, "cuda:0", "trainer")
    assert {name: trainer[name] for name in ("weights", "gradients", "optimizer")} == {
        "weights": 14 * GB,
        "gradients": 12 * GB,
        "optimizer": 24 * GB,
    }
    assert set(sizes(plan, HOST, "shared")) == {"arena", "published weights"}


def test_replicas_have_all_of_it_and_shards_a_share_and_the_largest_block() -> None:
    run = with_settings(config(**DEVICES), {"placement.trainer.devices": "0-3"})
    planner = planner_of(run)
    replicas = planner.plan(run)
    assert [own.name for own in replicas.devices] == ["cpu", "cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert sizes(replicas, "cuda:3", "trainer-rank3")["weights"] == 14 * GB
    accumulating = planner.plan(with_settings(run, {"training.micro_batch_steps": 2}))
    assert "gradients, not yet summed" not in sizes(replicas, "cuda:3", "trainer-rank3")
    assert sizes(accumulating, "cuda:3", "trainer-rank3")["gradients, not yet summed"] == 12 * GB
    shards = planner.plan(with_settings(run, {"placement.trainer.strategy": "shard"}))
    own = sizes(shards, "cuda:3", "trainer-rank3")
    assert own["weights"] == 3.5 * GB
    assert own["gradients"] == 3 * GB
    assert own["optimizer"] == 6 * GB
    assert own["largest block, gathered"] == 4 * GB  # its weights and its gradient
    assert "published weights" not in sizes(shards, "cuda:0", "trainer")  # no rank has them whole
    assert "published weights" in sizes(replicas, "cuda:0", "trainer")
    apart = planner.plan(with_settings(run, {"placement.generators.devices": "7"}))  # which reads it from there
    assert "published weights" in sizes(apart, "cuda:0", "trainer")


def on_cluster(trainer: str, generators: str, nodes: tuple[tuple[str, int], ...]) -> MemoryPlan:
    run = config(launcher="ray", placement={"trainer": {"devices": trainer}, "generators": {"devices": generators}})
    spec, form = parts_of(run)
    planner = Planner(spec, Machine(Devices(nodes), lambda _: 80 * GB))
    planner.take_form(run, replace(form, **LARGE))
    return planner.plan(run)


def test_main_and_a_trainer_on_another_host_each_have_what_the_other_publishes() -> None:
    others = "published weights of other hosts"
    nodes = (("a", 2), ("b", 2), ("c", 0))
    apart = on_cluster("3", "0", nodes)
    own = {host: sizes(apart, host, SHARED) for host in (HOST, "a", "b")}
    assert {host for host, parts in own.items() if others in parts} == {HOST, "b"}
    assert own["b"][others] == own["b"]["published weights"] == own["a"]["published weights"]
    for alone in (on_cluster("1", "0", nodes[:1]), on_cluster("cpu", "0", nodes)):
        assert all(others not in host.stations().get(SHARED, {}) for host in alone.devices)


def test_on_a_cluster_too_the_trainers_device_has_a_version_for_generators_of_its_node() -> None:
    nodes = (("a", 2), ("b", 2))
    for generators in ("2", "3"):
        assert "published weights" in sizes(on_cluster("2", generators, nodes), "cuda:2", "trainer")
    assert "published weights" not in sizes(on_cluster("2", "1", nodes), "cuda:2", "trainer")


def test_offloaded_moments_are_the_hosts() -> None:
    run = config(**DEVICES, training={"optimizer": {"offload": True}})
    plan = planner_of(run).plan(run)
    assert sizes(plan, HOST, "trainer")["optimizer"] == 24 * GB
    assert "optimizer" not in sizes(plan, "cuda:0", "trainer")
    assert sizes(plan, "cuda:0", "trainer")["moments on their way"] == 2 * 256 * 2**20


def test_a_leased_device_holds_its_largest_station_and_the_host_what_the_others_keep() -> None:
    run = config(**DEVICES)
    planner = planner_of(run)
    shared, leased = planner.plan(run), planner.plan(with_settings(run, {"placement.sharing": "lease"}))
    at_once, in_turn = (next(own for own in plan.devices if own.name == "cuda:0") for plan in (shared, leased))
    trainer = sum(in_turn.stations()["trainer"].values())
    gradients = in_turn.stations()["trainer"]["gradients"]
    assert in_turn.total() == trainer
    published = at_once.stations()["trainer"]["published weights"]  # which a trainer that leaves does not keep there
    assert at_once.total() == trainer + published + sum(at_once.stations()["generator-0"].values())
    assert sizes(leased, HOST, "trainer")["while suspended from cuda:0"] == trainer - gradients, "they are dropped"
    suspended = [part for part in leased.devices[0].parts if part.purpose.startswith("while suspended")]
    assert [*shared.devices[0].parts, *suspended] == list(leased.devices[0].parts)


def test_of_two_devices_one_alone_may_be_leased() -> None:
    run = with_settings(config(**DEVICES), {"placement.trainer.devices": "0-1", "placement.generators.devices": "0-1"})
    run = with_settings(run, {"rollout.generators": 2, "placement.sharing": "lease"})
    planner = planner_of(run)
    every, one = planner.plan(run), planner.plan(with_settings(run, {"placement.lease.devices": "1"}))
    assert [own.sharing for own in every.devices[:3]] == ["share", "lease", "lease"]
    assert [own.sharing for own in one.devices[:3]] == ["share", "share", "lease"]
    assert one.devices[1].total() > every.devices[1].total()
    assert one.devices[2].total() == every.devices[2].total()
    moved = {part.station for part in one.devices[0].parts if part.purpose.startswith("while suspended")}
    assert moved == {"generator-1", "trainer", "trainer-rank1"}, "all ranks leave"


def test_versions_of_one_process_stay_where_they_are_made_unless_that_is_leased() -> None:
    run = config(**{**DEVICES, "launcher": "inline"})
    planner = planner_of(run)
    shared, leased = planner.plan(run), planner.plan(with_settings(run, {"placement.sharing": "lease"}))
    assert set(sizes(shared, "cuda:0", "shared")) == {"published weights"}
    assert set(sizes(shared, HOST, "shared")) == {"arena"}
    assert set(sizes(leased, HOST, "shared")) == {"arena", "published weights"}


def test_a_leased_device_counts_its_largest_station_and_what_all_share() -> None:
    parts = (MemoryPart("a", "x", HOST, 3), MemoryPart("b", "x", HOST, 4), MemoryPart(SHARED, "arena", HOST, 2))
    assert DeviceMemory(HOST, 10, parts).total() == 9
    assert DeviceMemory(HOST, 10, parts, "lease").total() == 6
    assert DeviceMemory(HOST, 10, parts, building=9).total() == 9
    assert not DeviceMemory(HOST, 8, parts, building=9).fits


def test_what_is_certain_leaves_passes_out() -> None:
    run = config()
    planner = planner_of(run, large=False)
    form = planner.form(run)
    host = planner.plan(run, certain=True).devices[0].without("shared")
    assert host.total() == form.act_bytes + form.train_bytes + 3 * form.trainable_bytes
    full = planner.plan(run)
    assert full.activations == "probed on the CPU"
    assert full.devices[0].total() > full.devices[0].total(certain=True)
    assert sizes(full, HOST, "trainer")["micro-batch"] > 0
    assert full.excess() == full.devices[0].total() - 80 * GB
    assert full.plain()["devices"]["cpu"]["stations"] == full.devices[0].stations()


def test_a_run_that_only_acts_has_no_gradients() -> None:
    run = config(training={"versions": 0})
    plan = planner_of(run, large=False).plan(run)
    assert set(sizes(plan, HOST, "trainer")) == {"weights"}
    form = planner_of(run).form(run)
    planner = Planner(env_settings(run).spec(), Machine(devices_here(0), lambda _: GB), trainer=False)
    planner.take_form(run, form)
    assert "trainer" not in planner.plan(run).devices[0].stations()


def test_the_reference_policy_of_a_kl_term_is_counted() -> None:
    run = config(algorithm={"kl": {"coef": 0.1}})
    assert sizes(planner_of(run).plan(run), HOST, "trainer")["reference policy"] == 14 * GB


@pytest.mark.parametrize(
    ("changed", "bytes_"),
    [({}, None), ({"init_from": "run"}, 12 * GB), ({"policy.train": "all"}, 12 * GB)],
    ids=["adapters that begin at zero", "trained adapters", "everything"],
)
def test_a_reference_of_trained_adapters_is_a_copy(changed: dict[str, Any], bytes_: int | None) -> None:
    lora = {"type": "causal_lm", "layers": 1, "width": 32, "heads": 1, "hidden": 64, "train": "lora"}
    run = config(env={"type": "chains"}, policy=lora, algorithm={"kl": {"coef": 0.1}})
    run = with_settings(run, changed)
    found = sizes(planner_of(run).plan(run, certain=True), HOST, "trainer")
    assert found.get("reference policy") == bytes_


def test_generators_of_an_evaluation_have_a_second_copy() -> None:
    evaluation = {"every": 1, "episodes": 2, "rows": 2}
    run = config(**DEVICES, rollout={"generators": 2}, evaluation=evaluation)
    plan = planner_of(run).plan(run)
    assert sizes(plan, "cuda:0", "generator-0")["weights of the evaluation"] == 7 * GB
    tight = planner_of(run, free=plan.devices[1].total() - 7 * GB)
    assert {"evaluation.weights": "pause"} in [remedy.settings for remedy in find_remedies(tight, run)]
    assert "weights of the evaluation" not in sizes(plan, "cuda:0", "generator-1")
    assert sizes(plan, "cuda:0", "generator-1")["staging"] > 0


def test_a_pass_that_fails_is_told_and_the_rest_planned() -> None:
    run = config(policy={"type": "tests.plugins.memory_estimate.test_plan:Raises"})
    plan = planner_of(run, large=False).plan(run)
    assert plan.activations == "ZeroDivisionError in a pass of zeros: on purpose"
    assert "weights" in sizes(plan, HOST, "trainer")
    assert "pass" not in sizes(plan, HOST, "generator-0")


@long(3, "plans of several policies")
def test_policies_that_act_alike_share_the_passes_of_generators() -> None:
    found = {}
    for policy in ("train: all", "train: all, gradient_checkpointing: true", "train: lora"):
        run = load_config("quickstart", [f"policy={{type: pi0, {policy}}}"])
        planner = found.setdefault(
            "planner", Planner(env_settings(run).spec(), Machine(devices_here(0), lambda _: 80 * GB))
        )
        shared = sizes(planner.plan(run), HOST, "generator-0")
        alone = sizes(Planner(planner.spec, planner.machine).plan(run), HOST, "generator-0")
        assert shared == alone


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 6),
        ({"batching": {"type": "dynamic", "max_rows": 6}}, 6),
        ({"rollout": {"env_batches": 4}, "batching": {"type": "dynamic", "max_rows": 12}}, 12),
        ({"rollout": {"env_batches": 4}, "batching": {"type": "dynamic", "max_rows": 24, "max_requests": 1}}, 6),
        ({"rollout": {"env_batches": 4, "buckets": "powers"}, "batching": {"type": "dynamic", "max_rows": 20}}, 32),
    ],
)
def test_rows_of_the_largest_pass(changes: dict[str, Any], rows: int) -> None:
    run = config(**changes)
    assert pass_rows(run, env_settings(run).spec()) == rows
    padded = 1 << (rows - 1).bit_length()  # by default, on a CUDA device
    assert pass_rows(run, env_settings(run).spec(), on_device=True) == padded


@pytest.mark.parametrize(
    ("training", "ranks", "rows"),
    [
        ({"minibatch_steps": 0}, 1, 400),
        ({"minibatch_steps": 64}, 1, 64),
        ({"minibatch_steps": 64, "micro_batch_steps": 16}, 1, 16),
        ({"minibatch_steps": 64}, 4, 20),  # 16 and the root of it
        ({"minibatch_steps": 64, "micro_batch_steps": 32}, 4, 20),
        ({"minibatch_steps": 0, "mini_batch_samples": 5, "require_batches": 2}, 1, 200),
    ],
)
def test_rows_of_the_largest_micro_batch(training: dict[str, Any], ranks: int, rows: int) -> None:
    assert micro_batch_rows(config(training=training), 40, ranks) == rows


def test_settings_are_changed_in_a_copy() -> None:
    run = config(training={"mini_batch_samples": 6, "require_batches": 2})
    assert with_settings(run, {"policy.hidden": 3}).policy.hidden == 3  # type: ignore[attr-defined]
    assert run.groups.size == 1


class Raises(type(policy_settings(config()))):  # type: ignore[misc]
    """A policy whose passes fail."""

    type: Any = "tests.plugins.memory_estimate.test_plan:Raises"

    def build(self, *arguments: Any, **keywords: Any) -> Any:
        made = super().build(*arguments, **keywords)
        made.act = self._raise
        return made

    def _raise(self, *_: Any) -> None:
        raise ZeroDivisionError("on purpose")


def test_keys_and_values_of_streams_are_certain_and_each_copy_has_its_own() -> None:
    streams = "batching={type: streams, max_rows: 200}"
    run = load_config("quickstart_lm", [streams, "evaluation.every=1", "evaluation.every_episodes=8"])
    spec, form = parts_of(run)
    found = sizes(Planner(spec, Machine(devices_here(0), lambda _: GB)).plan(run, certain=True), HOST, "generator-0")
    assert found["keys and values"] == 2 * 200 * form.row_cache
    alone = load_config("quickstart_lm", [streams])
    found = sizes(Planner(spec, Machine(devices_here(0), lambda _: GB)).plan(alone, certain=True), HOST, "generator-0")
    assert found["keys and values"] == 200 * form.row_cache


def test_an_engine_of_vllm_has_its_own_weights_and_cache_and_a_server_nothing_here() -> None:
    streams, vllm = "batching={type: streams, max_rows: 200}", "policy.engine={type: vllm, cache_gib: 6}"

    def kept(*words: str) -> dict[str, int]:
        run = load_config("quickstart_lm", [streams, *words])
        return sizes(
            Planner(parts_of(run)[0], Machine(devices_here(0), lambda _: GB)).plan(run, certain=True),
            HOST,
            "generator-0",
        )

    native, own = kept(), kept(vllm)
    assert "keys and values" not in own
    assert own["vLLM's keys and values"] == 6 * 2**30
    assert own["vLLM's weights"] == native["weights"]
    beside = kept(vllm, "policy.engine.dtype=bfloat16", "evaluation.every=1", "evaluation.every_episodes=8")
    assert beside["vLLM's keys and values"] == 12 * 2**30, "the copy for evaluations has an engine too"
    assert beside["vLLM's weights"] == native["weights"]
    served = kept("policy.engine={type: sglang, url: 'http://here:1'}", "rollout.generators=1")
    assert {purpose for purpose in served if "keys" in purpose or "vLLM" in purpose} == set()

    run = load_config("quickstart_lm", [streams, vllm])
    (remedy, *_) = find_remedies(
        Planner(parts_of(run)[0], Machine(devices_here(0), lambda _: 5 * 10**9)), run, certain=True
    )
    assert remedy.settings == {"policy.engine.cache_gib": 4}
    with pytest.raises(StartError, match=r"policy\.engine\.cache_gib=4"):
        check_room(run, *parts_of(run), free=lambda _: 5 * 10**9)


def test_tokens_bound_the_rows_of_a_micro_batch() -> None:
    rows = {}
    for tokens in (0, 100, 1000, 10**9):
        run = load_config("quickstart_lm", [f"training.micro_batch_tokens={tokens}"])
        rows[tokens] = micro_batch_rows(run, steps=1, row_tokens=163)
    assert rows == {0: 128, 100: 1, 1000: 7, 10**9: 128}
