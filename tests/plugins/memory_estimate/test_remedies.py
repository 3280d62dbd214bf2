"""Proposed settings fit when the run is planned with them, and numbers are the largest that do."""

from __future__ import annotations

from typing import Any

import pytest
from tests.long import long
from tests.pipeline.runs import config
from tests.plugins.memory_estimate.test_plan import DEVICES, GB, planner_of

from polyrhythm.config.load import load_config
from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.build import env_settings
from polyrhythm.plugins.memory_estimate.plan import Machine, Planner, with_settings
from polyrhythm.plugins.memory_estimate.remedies import Remedy, find_remedies
from polyrhythm.runtime.devices import devices_here

BATCHED: dict[str, Any] = {"rollout": {"env_batches": 8}, "batching": {"type": "dynamic", "max_rows": 48}}
PI0 = ["policy={type: pi0, dtype: float32}", "placement={trainer: {devices: 0}, generators: {devices: 0}}"]


def small_planner(run: RunConfig, device: int, host: int = 10 * GB, devices: int = 4) -> Planner:
    return Planner(
        env_settings(run).spec(), Machine(devices_here(devices), lambda name: host if name == "cpu" else device)
    )


def by_name(remedies: list[Remedy]) -> dict[str, Any]:
    return {name: value for remedy in remedies for name, value in remedy.settings.items()}


def test_nothing_is_proposed_for_a_run_that_fits() -> None:
    run = config()
    assert find_remedies(planner_of(run, large=False), run) == []


def test_rows_and_micro_batches_are_the_largest_that_fit() -> None:
    run = config(**BATCHED, training={"minibatch_steps": 0})
    spec = env_settings(run).spec()
    need = Planner(spec, Machine(devices_here(0), lambda _: GB)).plan(run).devices[0].total()
    for saved, setting in ((20_000, "training.micro_batch_steps"), (4_000, "batching.max_rows")):
        planner = Planner(spec, Machine(devices_here(0), lambda _, saved=saved: need - saved))  # type: ignore[misc]
        value = by_name(find_remedies(planner, run))[setting]
        assert planner.plan(with_settings(run, {setting: value})).fits
        assert not planner.plan(with_settings(run, {setting: value + 1})).fits


@long(4, "plans of pi0")
def test_every_proposal_fits_and_its_total_is_told() -> None:
    run = load_config("quickstart", PI0)
    whole = small_planner(run, GB).plan(run)
    device = next(own for own in whole.devices if own.name == "cuda:0")
    planner = small_planner(run, int(0.8 * device.total()))
    remedies = find_remedies(planner, run)
    assert {*by_name(remedies)} >= {
        "training.micro_batch_steps",
        "policy.gradient_checkpointing",
        "policy.train",
    }
    for remedy in remedies:
        plan = planner.plan(with_settings(run, remedy.settings))
        assert plan.fits
        assert remedy.totals == {"cuda:0": plan.devices[1].total()}
    assert find_remedies(planner, run, most=1) == remedies[:1]
    assert remedies[0].text().startswith("training.micro_batch_steps=")


@long(2, "a plan of pi0")
def test_changes_are_put_together_where_one_alone_is_too_little() -> None:
    run = load_config("quickstart", PI0)
    plan = small_planner(run, GB).plan(run)
    trainer = plan.devices[1].stations()["trainer"]
    fixed = plan.devices[1].total() - trainer["micro-batch"] - trainer["optimizer"]
    planner = small_planner(run, fixed + trainer["optimizer"] // 2)
    only_rows = with_settings(run, {"training.micro_batch_steps": 1})
    assert not planner.plan(only_rows).fits
    for remedy in find_remedies(planner, run):
        assert planner.plan(with_settings(run, remedy.settings)).fits


def test_leases_and_ranks_are_proposed() -> None:
    run = config(**DEVICES)
    planner = planner_of(run, free=56 * GB)  # 7 + 14 + 3 * 12 = 57 GB
    host = planner.machine
    planner.machine = Machine(host.devices, lambda name: 10**12 if name == "cpu" else 56 * GB)
    assert by_name(find_remedies(planner, run)) == {
        "training.optimizer.offload": True,
        "placement.sharing": "lease",
        "placement.trainer.devices": "0-1",
        "placement.trainer.strategy": "shard",
    }
    divided = with_settings(run, {"placement.trainer.devices": "0-1"})  # all of it on each of two
    proposed = [dict(remedy.settings) for remedy in find_remedies(planner, divided)]
    assert {"placement.trainer.strategy": "shard"} in proposed
    assert {"placement.sharing": "lease"} in proposed


def test_a_lease_of_other_devices_than_the_full_one_is_widened() -> None:
    run = with_settings(config(**DEVICES), {"placement.sharing": "lease", "placement.lease.devices": "1"})
    planner = planner_of(run)
    planner.machine = Machine(devices_here(8), lambda name: 10**12 if name == "cpu" else 56 * GB)
    (found,) = [remedy for remedy in find_remedies(planner, run) if "placement.lease.devices" in remedy.settings]
    assert found.text() == "placement.lease.devices=null"


def test_the_smallest_number_of_ranks_that_fits() -> None:
    run = config(**DEVICES)
    planner = planner_of(run)
    # 7 GB of the generator, a block of 4 GB, and 50 GB divided by the ranks.
    for free, ranks in ((40, 2), (29, 3), (24, 4), (18, 8)):
        planner.machine = Machine(devices_here(8), lambda name, free=free: 10**12 if name == "cpu" else free * GB)  # type: ignore[misc]
        assert by_name(find_remedies(planner, run))["placement.trainer.devices"] == f"0-{ranks - 1}"
    planner.machine = Machine(devices_here(8), lambda name: 10**12 if name == "cpu" else 15 * GB)
    (all_of_it,) = find_remedies(planner, run)  # 7 GB, 26 GB of weights and gradients, divided, and the block of 4 GB
    assert all_of_it.settings == {
        "training.optimizer.offload": True,
        "placement.trainer.devices": "0-7",
        "placement.trainer.strategy": "shard",
    }
    planner.machine = Machine(devices_here(8), lambda name: 10**12 if name == "cpu" else 6 * GB)
    assert find_remedies(planner, run) == []


def test_a_host_that_is_too_small_for_an_update_gets_fewer_samples() -> None:
    run = config(training={"mini_batch_samples": 1000, "minibatch_steps": 64}, groups={"size": 4})
    spec = env_settings(run).spec()
    need = Planner(spec, Machine(devices_here(0), lambda _: GB)).plan(run).devices[0].total()
    planner = Planner(spec, Machine(devices_here(0), lambda _: need // 2))
    value = by_name(find_remedies(planner, run))["training.mini_batch_samples"]
    assert value % 4 == 0
    assert planner.plan(with_settings(run, {"training.mini_batch_samples": value})).fits
    assert not planner.plan(with_settings(run, {"training.mini_batch_samples": value + 4})).fits


def test_a_frozen_prefix_moves_to_a_device_that_has_room() -> None:
    precomputed = "policy={type: pi0, dtype: float32, train: expert}"
    run = load_config("quickstart", [precomputed, *PI0[1:], "training.precomputed_mib=0"])
    plan = small_planner(run, 10 * GB).plan(run)
    assert plan.devices[0].stations()["trainer"]["precomputed"] > 0
    planner = small_planner(run, 10 * GB, host=plan.devices[0].total() - 1)
    mib = by_name(find_remedies(planner, run))["training.precomputed_mib"]
    moved = planner.plan(with_settings(run, {"training.precomputed_mib": mib}))
    assert moved.fits
    taken = "precomputed of a mini-batch"
    assert plan.devices[0].stations()["trainer"][taken] > 0
    on_device = moved.devices[1].stations()["trainer"]
    assert "lent prefixes" in on_device
    assert all(taken not in device.stations().get("trainer", {}) for device in moved.devices), "micro-batches are read"
    without = plan.devices[1].stations()["trainer"]
    assert on_device["batches"] == without["batches"], "both send what was precomputed of two micro-batches"


@pytest.mark.parametrize(("value", "text"), [(True, "a.b=true"), (3, "a.b=3"), ("lora", "a.b=lora")])
def test_a_proposal_is_written_as_an_override(value: object, text: str) -> None:
    assert Remedy({"a.b": value}, {}).text() == text
