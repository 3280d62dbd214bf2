"""Modes of one recipe beside each other: the arithmetic, the order of the turns, and small runs of the machinery."""

from __future__ import annotations

from contextlib import closing

import psutil
import pytest
import yaml
from tests.long import long
from tests.process.runs import children, orphaned_folders

from polyrhythm.cli import show
from polyrhythm.config.load import load_config
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm_bench.cases.metaworld import FROZEN, MODES, run
from polyrhythm_bench.cli.bench import words
from polyrhythm_bench.harness import resources
from polyrhythm_bench.harness.comparison import Mode, compare, limited_by, summarise
from polyrhythm_bench.harness.version_cost import Mark, Reading, VersionCost, cost

# ---------------------------------------------------------------- arithmetic


def a_cost(seconds, cpu_s=2.0, others=0.0, busy=0.5):
    return VersionCost(
        seconds_per_version=seconds,
        transitions_per_s=3000 / seconds,
        transitions_per_version=3000,
        lag_mean=0.0,
        cores_busy=cpu_s / seconds,
        others_cores=others,
        cpu_s_by={"simulator-0": 0.75 * cpu_s, "main": 0.25 * cpu_s},
        busy={"simulator-0": busy},
    )


def test_a_version_costs_what_lies_between_two_marks_and_two_readings():
    before = Reading(1, 10.0, machine_cpu_s=100.0, cpu_s={"trainer": 5.0, "main": 1.0}, busy_s={"trainer": 4.0})
    after = Reading(5, 20.0, machine_cpu_s=119.0, cpu_s={"trainer": 13.0, "main": 2.0}, busy_s={"trainer": 8.5})
    found = cost(Mark(2, 12.5, 9_000), Mark(5, 19.5, 30_000), 0.5, before, after)
    assert found.seconds_per_version == pytest.approx(7 / 3)
    assert found.transitions_per_s == pytest.approx(3_000)
    assert found.transitions_per_version == pytest.approx(7_000)
    assert found.cores_busy == pytest.approx(0.9)
    assert found.others_cores == pytest.approx(1.0)
    assert found.cpu_s_by == pytest.approx({"trainer": 2.0, "main": 0.25})
    assert found.cpu_s_per_version == pytest.approx(2.25)
    assert found.busy == pytest.approx({"trainer": 0.45})
    assert found.lag_mean == 0.5


def test_figures_are_medians_and_speed_ups_are_of_the_same_turn():
    """Two cores. The second turn was slow for both: 6 s and 4 s, a speed-up of 1.5 like the others' 2 and 1.2."""
    others = [a_cost(4.0), a_cost(6.0), a_cost(3.0)]
    found = summarise([a_cost(2.0, cpu_s=3.6), a_cost(4.0, cpu_s=4.4), a_cost(2.5, cpu_s=4.0)], others, cores=2)
    assert found["seconds_by_turn"] == [2.0, 4.0, 2.5]
    assert found["seconds_per_version"] == 2.5
    assert found["speedup_by_turn"] == pytest.approx([2.0, 1.5, 1.2])
    assert found["speedup"] == pytest.approx(1.5)
    assert found["cpu_s_per_version"] == pytest.approx(4.0)
    assert found["least_seconds_per_version"] == pytest.approx(2.0)
    assert found["reached"] == pytest.approx(0.8), "of 0.9, 0.55 and 0.8"
    assert found["cpu_s_by"] == pytest.approx({"simulator-0": 3.0, "main": 1.0})


@pytest.mark.parametrize(
    ("cores_busy", "others", "busy", "limit"),
    [
        (1.8, 0.0, {"simulator-0": 1.0, "trainer": 0.5}, "cores"),
        (1.2, 0.7, {"simulator-0": 1.0, "trainer": 0.5}, "cores"),
        (1.2, 0.1, {"simulator-0": 0.95, "trainer": 0.5}, "simulator-0"),
        (1.2, 0.1, {"simulator-1": 0.95, "simulator-0": 0.9, "trainer": 0.5}, "simulator-0, simulator-1"),
        (1.0, 0.1, {"simulator-0": 0.6, "trainer": 0.4}, "waiting"),
    ],
)
def test_what_limits_a_version(cores_busy, others, busy, limit):
    assert limited_by(cores_busy, others, 2, busy) == limit


def test_cpu_seconds_are_of_this_process_and_of_the_machine():
    process = psutil.Process()
    begin, machine = resources.cpu_s_of(process), resources.machine_cpu_s()
    while (own := resources.cpu_s_of(process) - begin) < 0.3:
        pass
    assert resources.cpu_s() >= begin + own
    assert resources.machine_cpu_s() - machine > own - 0.1


# ---------------------------------------------------------------- turns


def test_the_best_choice_of_each_mode_takes_turns_with_the_others():
    seconds = {("sync", "one"): 4.0, ("sync", "two"): 3.0, ("beside", "one"): 1.5, ("beside", "two"): 2.0, ("both",): 1}
    asked = []

    def measure(settings, versions):
        asked.append((*settings, versions))
        return a_cost(seconds[tuple(settings)])

    either = (("one",), ("two",))
    modes = {
        "lockstep": Mode(("sync",), either),
        "train_async": Mode(("beside",), either),
        "full_async": Mode(("both",)),
    }
    found = compare(modes, measure, tries=2, versions=5, repeats=2, cores=2)
    turn = [("sync", "two", 5), ("beside", "one", 5), ("both", 5)]
    first_pass = [("sync", "one", 2), ("sync", "two", 2), ("beside", "one", 2), ("beside", "two", 2)]
    assert asked == [*first_pass, *turn, *turn], "a mode without a choice is not tried"
    assert found["first_pass"] == {"lockstep": {"one": 4.0, "two": 3.0}, "train_async": {"one": 1.5, "two": 2.0}}
    assert {name: own["settings"] for name, own in found["modes"].items()} == {
        "lockstep": ["sync", "two"],
        "train_async": ["beside", "one"],
        "full_async": ["both"],
    }
    assert [own["speedup"] for own in found["modes"].values()] == [1.0, 2.0, 3.0]


CHOICES = [(name, choice) for name, mode in MODES.items() for choice in mode.choices]


@pytest.mark.parametrize(("name", "choice"), CHOICES, ids=[f"{name} {' '.join(choice)}" for name, choice in CHOICES])
def test_a_mode_is_the_quickstart_but_for_what_makes_it(name, choice):
    recipe, config = (load_config("quickstart", words) for words in ((), [*FROZEN, *MODES[name].settings, *choice]))
    for section in ("env", "policy", "algorithm", "seed", "checkpoint"):
        assert getattr(config, section) == getattr(recipe, section)
    theirs, own = recipe.training, config.training
    unlike = {"optimizer", "critic_warmup_updates"}
    assert own.model_dump(exclude=unlike) == theirs.model_dump(exclude=unlike)
    assert config.rollout.rows * config.rollout.simulators == recipe.rollout.rows * recipe.rollout.simulators
    waits = name in ("lockstep", "rollout_async")
    assert (config.freshness.max_lag, config.freshness.on_update) == ((0, "drain") if waits else (1, "continue"))
    assert config.batching.type == ("lockstep" if name in ("lockstep", "train_async") else "dynamic")
    assert waits or config.placement == recipe.placement, "a trainer that works beside the others has one core"


# ---------------------------------------------------------------- runs

CHEAP = {
    "env": {"type": "polyrhythm_bench.workloads.drift_env:DriftSettings", "episode_steps": 32},
    "policy": {"type": "gaussian"},
    "rollout": {"rows": 4},
    "batching": {"type": "dynamic", "max_rows": 4},
    "freshness": {"max_lag": 1},
    "training": {"versions": 9, "mini_batch_samples": 4, "minibatch_steps": 64},
}


@pytest.fixture
def cheap(tmp_path):
    path = tmp_path / "cheap.yaml"
    path.write_text(yaml.safe_dump(CHEAP))
    return path


@pytest.mark.parametrize(("settings", "stays"), [((), False), (FROZEN, True)])
def test_the_policy_stays_as_it_is(cheap, settings, stays):
    config, _, policy = validate_run(load_config(cheap, [*settings, "launcher=inline", "freshness.max_lag=0"]))
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    with closing(build_pipeline(RunContext(config))) as pipeline:
        pipeline.loop.train_until(2)
        version, after = pipeline.weights.read()
    assert version == 2
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert (moved < 1e-10) == stays


@long(10, "bench metaworld, two modes in processes")
def test_two_modes_in_processes(cheap):
    modes = {
        "lockstep": Mode((*MODES["lockstep"].settings, "rollout.simulators=2", "rollout.rows=2")),
        "full_async": Mode(("rollout.sharding=even:2",)),
    }
    found = run(2, 1, recipe=cheap, modes=modes)
    assert not children()
    assert not orphaned_folders()
    assert found["warm_start"] is False
    assert found["first_pass"] == {}
    lockstep, asynchronous = found["modes"]["lockstep"], found["modes"]["full_async"]
    assert lockstep["transitions_per_version"] == 4 * 32
    assert lockstep["lag_mean"] == 0
    assert asynchronous["lag_mean"] == 1
    assert lockstep["speedup"] == 1
    assert asynchronous["speedup"] == pytest.approx(lockstep["seconds_by_turn"][0] / asynchronous["seconds_by_turn"][0])
    assert set(lockstep["busy"]) == {"simulator-0", "simulator-1", "generator-0", "trainer"}
    for own in (lockstep, asynchronous):
        assert set(own["cpu_s_by"]) == {*own["busy"], "main"}
        assert all(0 < share <= 1 for share in own["busy"].values())
        assert 0 < own["cores_busy"] <= found["cores"] + 0.1


@pytest.mark.sim
@pytest.mark.slow
@long(30, "bench metaworld with the quickstart's own warm start")
def test_the_quickstart_itself_from_its_warm_start(tmp_path, simulator):
    """The warm start is made and begun with; four rows, one version that is timed."""
    small = {
        "extends": "quickstart",
        "rollout": {"rows": 4},
        "training": {"mini_batch_samples": 4},
        "demonstrations": {"episodes_per_task": 1},
        "supervised": {"steps": 2, "batch_size": 16, "warmup_steps": 1},
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(small))
    found = run(1, 1, recipe=path, modes={"lockstep": Mode((*MODES["lockstep"].settings, "rollout.sharding=whole"))})
    assert found["warm_start"] is True
    own = found["modes"]["lockstep"]
    assert 0 < own["transitions_per_version"] <= 4 * 100
    assert own["lag_mean"] == 0
    assert own["seconds_per_version"] > 0
    assert not orphaned_folders()


# ---------------------------------------------------------------- in words


def test_a_table_has_a_column_for_each_mode():
    columns = {
        "one": {"settings": ["a=1", "b=2"], "seconds": 2.0, "busy": {"simulator-0": 0.5}, "limited_by": "cores"},
        "two": {"settings": [], "seconds": 1.25, "busy": {"simulator-1": 0.25}, "limited_by": "waiting"},
    }
    assert show.table(columns).splitlines() == [
        "                    one      two",
        "seconds               2     1.25",
        "busy simulator-0    0.5        -",
        "limited_by        cores  waiting",
        "busy simulator-1      -     0.25",
        "",
        "one, settings: a=1, b=2",
        "two, settings:",
    ]
    said = words({"recipe": "small", "cores": 2, "modes": columns})
    assert said == f'recipe: "small"\ncores: 2\n\n{show.table(columns)}'
