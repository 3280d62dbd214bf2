"""Objectives beside each other: the arithmetic, small runs of all of it, its page; and an update beside one by hand."""

from __future__ import annotations

import json
import runpy
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.long import long

from polyrhythm.algorithms.losses import POLICY_LOSSES
from polyrhythm.cli.main import main
from polyrhythm.errors import RunHalted
from polyrhythm.plugins.trial.env_contract import check_contract
from polyrhythm_bench.cases import algorithms, update
from polyrhythm_bench.harness.trainings import TrainingTask, train
from polyrhythm_bench.workloads.spot_env import SpotSettings

TINY = TrainingTask("cartpole", ("training.versions=3", "training.mini_batch_samples=4", "env.max_steps=20"), window=4)
WHOLE = (*TINY.settings, "rollout.segment_steps=0")


def ended(*returns, halted=""):
    return {"returns": returns, "successes": [0.0] * len(returns), "lag_mean": 1.0, "seconds": 1.0, "halted": halted}


def test_objectives_are_compared_with_the_best_at_the_same_staleness():
    runs = {
        ("a", 0): [ended(4, 4), ended(6, 6)],
        ("b", 0): [ended(2, 2), ended(3, 3, halted="NaN")],
        ("a", 8): [ended(1, 1), ended(3, 3)],
        ("b", 8): [ended(2, 2), ended(2, 2)],
    }
    found = algorithms.summarise(runs, window=1)
    cells = {(cell["objective"], cell["alpha"]): cell for cell in found["cells"]}
    assert [cells[key]["of_best"] for key in runs] == [1.0, 0.5, 1.0, 1.0]
    assert cells["b", 0]["halted"] == 1
    assert found["choose"] == {"0": ["a"], "8": ["a", "b"]}, "at 8 the seeds do not tell them apart"


def test_every_loss_is_among_the_objectives():
    types = {
        algorithms.TASKS["cartpole"].config(algorithms.settings(name, 2), 0).algorithm.loss.type
        for name in algorithms.LOSSES
    }
    assert types == set(POLICY_LOSSES)


@pytest.mark.parametrize("alpha", [0, 8])
def test_groups_and_flow_policies_have_tasks_of_their_own(alpha):
    for name in algorithms.ADVANTAGES:
        config = algorithms.TASKS["chains"].config(algorithms.settings(name, alpha), 0)
        assert (config.algorithm.advantage.type, config.groups.size) == (name, 8)
        assert config.freshness.max_lag == alpha
    methods = [
        algorithms.TASKS["spot"].config(algorithms.settings(name, alpha), 0).policy.head.method
        for name in algorithms.METHODS
    ]
    assert [method.type for method in methods] == ["flow_noise", "flow_sde", "flow_cps", "flow_cps"]
    assert methods[2] != methods[3]


def test_a_task_trains_its_own_objectives_among_the_chosen():
    found = {task: [str(way) for way in algorithms.ways_of(task, ["gipo", "maxrl"], [4])] for task in algorithms.TASKS}
    gipo = ["gipo, α = 4"]
    assert found == {"cartpole": gipo, "drawer": gipo, "chains": ["maxrl, α = 4"], "spot": []}
    assert {way.objective for way in algorithms.ways_of("spot", (), [0, 1])} == set(algorithms.METHODS)


def test_the_spot_is_within_reach_of_its_expert():
    settings = SpotSettings(reward="progress")
    assert all(finding.state == "ok" for finding in check_contract(settings, 4, lambda _: None))
    batch, rows = settings.build(64), np.arange(64)
    batch.reset(rows, [0] * 64, list(range(64)))
    first, image = np.zeros((64, 2), np.float32), np.zeros((64, 16, 16, 3), np.uint8)
    batch.observe(rows, {"image": image, "proprio": first})
    assert all(0 < lit <= 16 for lit in (image[..., 0] > 0).sum((1, 2)))
    ended, earned = np.zeros(64, bool), np.zeros(64)
    for _ in range(8):
        step = batch.step(rows, batch.expert_actions(rows))
        earned += np.where(ended, 0.0, step.reward)
        ended |= step.terminated
    assert ended.all()
    assert (earned > 0).mean() > 0.9, "but for those that begin there"


@pytest.mark.parametrize("alpha", algorithms.ALPHAS)
def test_only_staleness_differs_between_alphas(alpha):
    config, first = (
        algorithms.TASKS["cartpole"].config(algorithms.settings("tis", wanted), 0) for wanted in (alpha, 0)
    )
    assert config.freshness.max_lag == alpha
    assert config.batching.type == ("dynamic" if alpha else "lockstep")
    for section in ("env", "policy", "algorithm", "seed"):
        assert getattr(config, section) == getattr(first, section)
    assert config.training.optimizer == first.training.optimizer


def test_a_run_that_may_halt_counts_nothing_from_there_on(monkeypatch):
    blown = ("training.optimizer={lr: 1.0e+30, grad_clip: null}", "algorithm.loss=vanilla")
    config = TrainingTask("cartpole", WHOLE, window=4).config(blown, 1)
    with pytest.raises(RunHalted, match="not finite"):
        train(config)
    found = train(config, may_halt=True)
    assert "not finite" in found["halted"]
    assert len(found["returns"]) == 12
    assert found["returns"][-1] == 0.0


@long(8, "bench algorithms, short")
def test_the_command_writes_what_its_page_reads(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(algorithms.TASKS, "cartpole", TrainingTask("cartpole", WHOLE, window=4))
    told = ["bench", "algorithms", "--tasks", "cartpole", "--only", "tis,ppo", "--seeds", "2", "--json"]
    assert main(told) == 0
    results = tmp_path / "found.json"
    results.write_text(capsys.readouterr().out)
    part = json.loads(results.read_text())["parts"]["cartpole"]
    assert {(cell["objective"], cell["alpha"]) for cell in part["cells"]} == {
        (name, alpha) for name in ("tis", "ppo") for alpha in algorithms.ALPHAS
    }
    script = Path(__file__).parents[1] / "scripts" / "algorithms_table.py"
    monkeypatch.setattr(sys, "argv", ["", str(results), "--out", str(tmp_path / "newer.md")])
    runpy.run_path(str(script), run_name="__main__")
    page = (tmp_path / "newer.md").read_text()
    assert "(newer_cartpole.svg)" in page
    assert page.count("\n| tis |") == 1 + len(algorithms.ALPHAS)
    drawn = ET.fromstring((tmp_path / "newer_cartpole.svg").read_text())
    assert len(drawn.findall(".//{http://www.w3.org/2000/svg}path[@class='line o0']")) == 1 + len(algorithms.ALPHAS)


@pytest.mark.parametrize(("option", "names"), [("--tasks", "ppo"), ("--only", "cartpole")])
def test_unknown_names_are_refused(option, names, capsys):
    assert main(["bench", "algorithms", option, names]) == 2
    assert f"{option} {names}: it is not one of" in capsys.readouterr().err


@pytest.mark.parametrize("name", update.CASES)
def test_an_update_by_hand_is_the_same_maths(name):
    small = update.CASES[name]._replace(trajectories=4, epochs=2, minibatch=16)
    found = update.measure(small, repeats=1)
    assert found["decisions"] > 16
    assert found["difference"] < 1e-5


def test_other_maths_by_hand_is_noticed(monkeypatch):
    monkeypatch.setattr(update, "CLIP", 1e-6)
    with torch.random.fork_rng(), pytest.raises(AssertionError, match="not the same maths"):
        update.measure(update.CASES["mlp"]._replace(trajectories=4), repeats=1)
