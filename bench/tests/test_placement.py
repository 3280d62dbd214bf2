"""Devices that are locks: turns in the order of asking, one cell live beside its simulation, rankings, the page."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from tests.long import long

from polyrhythm_bench.cases import placement, placement_page
from polyrhythm_bench.papers.published import published
from polyrhythm_bench.papers.stages import Times
from polyrhythm_bench.workloads import placement_scene as scenes
from polyrhythm_bench.workloads.device_lock import Device, TurnRecord, read_turns
from polyrhythm_bench.workloads.placement_run import Versions, simulated, summarise_turns
from polyrhythm_bench.workloads.placement_scene import MODES, PLACEMENTS, SETUPS, PlacementScene, find_row

DATA = published()
TIMES = Times(step=0.06, contention=0.65, generate=0.02, train=0.05)
HERE = "import sys, time; from pathlib import Path; from polyrhythm_bench.workloads.device_lock import Device; "
#: Takes turns on device 0, one right after the other.
TURNS = (
    HERE
    + """
for _ in range(8):
    with Device(Path(sys.argv[1]), 0).hold(sys.argv[2]):
        time.sleep(0.02)
"""
)
#: Takes device 0, says so, and keeps it.
HANG = HERE + "Device(Path(sys.argv[1]), 0).ask('holder').wait(); print('held', flush=True); time.sleep(60)"


def test_turns_come_in_the_order_of_asking_across_threads(tmp_path):
    device = Device(tmp_path, 0)
    first = device.ask("a")
    first.wait()
    order: list[str] = []

    def take(turn, name):
        turn.wait()
        order.append(name)
        turn.end()

    turns = [(device.ask(name), name) for name in "bcd"]
    threads = [threading.Thread(target=take, args=turn) for turn in reversed(turns)]
    for thread in threads:
        thread.start()
    assert order == []
    first.end()
    for thread in threads:
        thread.join(timeout=10)
    assert order == ["b", "c", "d"]
    assert [turn.station for turn in sorted(read_turns(tmp_path), key=lambda turn: turn.number)] == ["a", "b", "c", "d"]
    assert not list(tmp_path.glob("*.turn-*")), "a turn that ended leaves no file"


def test_processes_exclude_each_other_and_nobody_comes_back_before_the_others(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", TURNS, tmp_path, f"s-{i}"]) for i in range(3)]
    for process in processes:
        assert process.wait(timeout=60) == 0
    turns = sorted(read_turns(tmp_path), key=lambda turn: turn.began)
    found = summarise_turns([turns])
    assert (found["turns"], found["overlapping"]) == (24, 0)
    assert [turn.number for turn in turns] == list(range(1, 25))


def test_the_device_of_a_killed_process_is_free(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HANG, tmp_path], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        turn = Device(tmp_path, 0).ask("next")
        process.kill()
    turn.wait()
    turn.end()


def test_what_is_wrong_with_turns_is_counted():
    def turn(number, asked, began, ended, device=0):
        return TurnRecord(device, number, "s", asked, began, ended)

    fine = [turn(1, 0.0, 0.0, 1.0), turn(2, 0.5, 1.25, 2.0), turn(1, 0.0, 0.5, 1.5, device=1), turn(3, 2.5, 2.5, 3.0)]
    assert summarise_turns([fine]) == {"turns": 4, "out_of_order": 0, "overlapping": 0, "handover_ms": 250.0}
    wrong = [turn(2, 0.5, 0.0, 1.0), turn(1, 0.25, 0.75, 2.0)]
    assert summarise_turns([wrong])["out_of_order"] == summarise_turns([wrong])["overlapping"] == 1


@pytest.mark.parametrize("key", SETUPS)
def test_every_cell_has_a_row_and_scaling_keeps_its_load(key):
    found = {(place, mode): find_row(DATA, key, place, mode) for place in PLACEMENTS for mode in MODES}
    assert all(found[place, "lockstep"][1] for place in ("colocated", "hybrid"))
    assert [found["disaggregated", mode][1] for mode in MODES] == [None, None]
    for row, _ in found.values():
        scene = PlacementScene(row, TIMES, 0.01)
        small = scene.small
        assert (small.gpus, small.batches) == (4, row.batches)
        assert small.envs / len(small.simulating) == row.envs / len(row.simulating), "as many on a device"
        for kind in ("simulating", "generating", "training"):
            assert len(getattr(small, kind)) * 2 == len(getattr(row, kind))


def test_scaling_changes_the_simulated_rate_little():
    row, _ = find_row(DATA, "robocasa", "hybrid", "asynchronous")
    small, large = (simulated(PlacementScene(row, TIMES, scale), Versions(2, 4, 2)).rate for scale in (0.1, 1.0))
    assert small == pytest.approx(large, rel=0.02)


def test_the_live_run_has_the_costs_of_the_simulated_one(tmp_path):
    row, _ = find_row(DATA, "maniskill", "hybrid", "lockstep")
    scene = PlacementScene(row, TIMES, 0.01)
    config, cluster = scenes.live(scene, 3, tmp_path), scenes.cluster(scene, 3)
    # 272 environments in each of 6 env batches of 3 devices; a rank trains on a quarter, in 4 gradient steps.
    assert config.policy.policy.act == f"{7.2 * 20 * 0.01:.4f}ms+{1000 * 272 * 0.02 * 0.01:.4f}ms"
    assert config.policy.evaluate_ms == pytest.approx(1000 * 272 * 6 / 4 * 4 * 0.05 * 0.01 / 4)
    assert config.env.env.step_time == f"lognormal:{1000 * 272 * 0.06 * 0.01:.4f}ms:0.05"
    assert (config.env.devices, config.policy.generators, config.policy.trainer) == ((0, 1, 2), (3,), (0, 1, 2, 3))
    assert cluster.sharing == "exclusive"
    assert config.training.epochs == cluster.trainer.gradient_steps


def test_env_batches_take_turns_on_a_device_and_hinder_each_other_on_cores():
    """Two env batches of 1 s: 2 s on their device; 2 to the power of 0.65 s on cores."""
    slow = replace(TIMES, generate=1e-6, train=1e-6)
    for key, expected in (("maniskill", 2.0), ("metaworld", 2**0.65)):
        row, _ = find_row(DATA, key, "colocated", "lockstep")
        scene = PlacementScene(row, replace(slow, step=1 / (row.envs / 16)), 1.0)
        found = simulated(scene, Versions(1, 2, 0))
        assert found.seconds == pytest.approx(2 * 4 * expected, rel=0.15), key


def test_rankings_compare_what_is_published():
    def cell(name, published, live):
        return {"placement": name, "mode": "lockstep", "published": published} | {
            "simulated": live,
            "live": live,
        }

    cells = [cell("colocated", 3.0, 1.0), cell("hybrid", 2.0, 2.0), cell("disaggregated", None, 1.5)]
    (found,) = placement.rank(cells)
    assert found["published"] == ["colocated", "hybrid"]
    assert found["live"] == ["hybrid", "disaggregated", "colocated"]
    assert found["agrees"] is False
    assert placement.rank([cell("colocated", 3.0, 2.0), cell("hybrid", 2.0, 1.0)])[0]["agrees"] is True
    assert placement.rank(cells[1:])[0]["agrees"] is None


@long(9, "one cell of bench placement, live")
def test_one_small_cell_live_beside_its_simulation():
    found = placement.run(
        ["maniskill"],
        repeats=1,
        times={"maniskill": Times(step=0.086, contention=1.36, generate=0.014, train=0.108)},
        cells=[("hybrid", "asynchronous")],
        chunk_step_s=0.15,
        counted_s=1.0,
        seeds=1,
    )
    (part,) = found["parts"].values()
    (cell,) = part["cells"]
    assert 0.4 < cell["live_to_simulated"] < 1.05, "stages take their time, and a little more"
    assert found["largest_error"] == abs(cell["live_to_simulated"] - 1)
    assert (cell["out_of_order"], cell["overlapping"]) == (0, 0)
    assert cell["turns"] > 0


def measured(**changes):
    """The result of a setup, as the benchmark prints it."""

    def cell(name, mode, published, live):
        return {
            "placement": name,
            "mode": mode,
            "published": published,
            "simulated": live,
            "live": live,
            "live_to_simulated": 1.0,
            "ratios_by_turn": [1.0],
            "seconds": 12.0,
            "busy": 0.5,
            "busy_simulated": 0.5,
            "others_cores": 1.0,
            "turns": 1000,
            "out_of_order": 0,
            "overlapping": 0,
            "handover_ms": 0.5,
        } | changes

    cells = [
        cell("colocated", "lockstep", 190.0, 180.0),
        cell("hybrid", "lockstep", 140.0, 141.0),
        cell("disaggregated", "lockstep", None, 92.0),
        cell("colocated", "asynchronous", None, 183.0),
        cell("hybrid", "asynchronous", 255.0, 151.0),
    ]
    times = {"step": 0.086, "contention": 1.36, "generate": 0.014, "train": 0.108}
    return {"ManiSkill": {"times": times, "scale": 0.01, "cells": cells, "rankings": placement.rank(cells)}}


def test_the_page_says_where_the_order_is_the_papers(tmp_path):
    (path,) = placement_page.write(json.loads(json.dumps(measured())), tmp_path)
    page = path.read_text(encoding="utf-8")
    assert "| hybrid | asynchronous | 255 | 151.0 | 151.0 | 1.000 (1.000) |" in page
    assert "| disaggregated | lockstep |  | 92.0 |" in page
    assert "| lockstep | colocated > hybrid | colocated > hybrid > disaggregated |" in page
    assert "**all cells are within it**" in page
    said = " ".join(page.split())
    assert "in lockstep the order of the placements is theirs; in asynchronous fewer than two" in said
    assert "ours is colocated lockstep." in said


def test_the_page_marks_what_is_beyond_the_bar(tmp_path):
    (path,) = placement_page.write(measured(live_to_simulated=0.93), tmp_path)
    page = path.read_text(encoding="utf-8")
    assert "**0.930** (1.000)" in page
    assert "**5 of 5 are beyond**" in " ".join(page.split())
    assert "the largest difference is 7.0%" in " ".join(page.split())
