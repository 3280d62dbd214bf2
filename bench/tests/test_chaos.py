"""Chaos: which faults come, how recovery is measured, what the fault injector finds; and small runs of it."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import yaml
from tests.long import long
from tests.process.runs import ASYNCHRONOUS, children, orphaned_folders

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.scheduler import records
from polyrhythm.scheduler.samples.groups import SampleLedger
from polyrhythm_bench.chaos import run as chaos_run
from polyrhythm_bench.chaos.fault_injector import FaultInjector
from polyrhythm_bench.chaos.faults import NODE, Fault, Kind, PlannedFault, plan, totals
from polyrhythm_bench.chaos.load import LEAST, CpuContention, of_processes
from polyrhythm_bench.chaos.run import chaos, chaos_config
from polyrhythm_bench.chaos.throughput_window import WINDOW_S, ThroughputWindow
from polyrhythm_bench.cli import chaos as command

STATIONS = ["simulator-0", "simulator-1", "generator-0", "generator-1", "trainer"]


# ---------------------------------------------------------------- which faults


def test_a_seed_decides_the_faults():
    assert plan(5, 30, STATIONS, 4.0) == plan(5, 30, STATIONS, 4.0) != plan(6, 30, STATIONS, 4.0)
    assert plan(5, 7, STATIONS, 4.0) == plan(5, 30, STATIONS, 4.0)[:7]


@pytest.mark.parametrize("seed", range(5))
def test_every_three_faults_have_each_kind_and_each_role_and_every_nine_each_pair(seed):
    faults = [(fault.kind, fault.station.partition("-")[0]) for fault in plan(seed, 27, STATIONS, 4.0)]
    for first in range(0, 27, 3):
        kinds, roles = zip(*faults[first : first + 3], strict=True)
        assert (len(set(kinds)), len(set(roles))) == (3, 3)
    for first in range(0, 27, 9):
        assert len(set(faults[first : first + 9])) == 9


def test_with_nodes_two_of_five_faults_are_of_nodes():
    faults = plan(5, 20, STATIONS, 4.0, nodes=True)
    assert [fault.kind for fault in faults if fault.of_node] == [Kind.PARTITION, Kind.LOSS] * 4
    assert [index % 5 for index, fault in enumerate(faults) if fault.of_node] == [3, 4] * 4
    assert all(2.0 <= fault.slow_s <= 20.0 for fault in faults if fault.kind is Kind.PARTITION)
    assert {fault.allowed_s for fault in faults if fault.of_node} == {30.0}


def test_stations_of_a_role_have_their_share_and_a_slowed_one_keeps_its_deadline():
    faults = plan(1, 300, STATIONS, 4.0)
    counts = Counter(fault.station for fault in faults)
    assert set(counts) == set(STATIONS)
    assert counts["trainer"] == 100
    assert min(counts.values()) > 30
    assert all((0.5 < fault.slow_s < 3) is (fault.kind is Kind.SLOW) for fault in faults)


def test_ranks_of_the_trainer_have_their_share_of_its_faults():
    faults = plan(1, 300, [*STATIONS, "trainer-rank1"], 4.0)
    counts = Counter(fault.process for fault in faults if fault.station == "trainer")
    assert set(counts) == {"trainer", "trainer-rank1"}
    assert counts.total() == 100
    assert min(counts.values()) > 30
    assert {fault.allowed_s for fault in faults if fault.station == "trainer"} == {30.0}, "all ranks start again"
    assert {fault.allowed_s for fault in faults if fault.station != "trainer"} == {15.0}


# ---------------------------------------------------------------- throughput


def heard(pace, begin, end, per_second, calm_since=float("inf"), rows=2):
    """Requests of `rows` rows, evenly, so that `per_second` rows are asked for; windows are kept where they may be."""
    for i in range(round((end - begin) * per_second / rows)):
        now = begin + i * rows / per_second
        pace.hear(now, rows)
        pace.take(now, calm_since)


def test_the_rate_is_that_of_the_latest_window():
    pace = ThroughputWindow()
    heard(pace, 0.0, 10.0, 40)
    assert pace.rate(10.0) == pytest.approx(40, rel=0.05)
    heard(pace, 10.0, 11.0, 400)
    assert pace.rate(11.0) == pytest.approx(220, rel=0.05)
    assert pace.rate(13.5) == 0


def test_windows_count_only_while_nothing_disturbs_and_a_hiccup_moves_nothing():
    pace = ThroughputWindow()
    heard(pace, 0.0, 10.0, 100)
    assert not pace.take(10.0, float("inf"))
    assert not pace.take(10.0, 10.0 - WINDOW_S / 2), "half of the window was disturbed"
    assert pace.usual == 0
    heard(pace, 10.0, 14.6, 100, calm_since=10.0)
    assert pace.windows == 6, "every half second, once a window was undisturbed"
    assert pace.calm_s == 3.0
    assert pace.take(30.0, 10.0), "nothing was heard: one bad window of seven"
    assert pace.usual == pytest.approx(100, rel=0.05)


def test_what_is_usual_follows_a_change_that_stays_and_the_first_is_remembered():
    pace = ThroughputWindow()
    heard(pace, 0.0, 60.0, 100, calm_since=0.0)
    heard(pace, 60.0, 80.0, 50, calm_since=0.0)
    assert pace.usual == pytest.approx(50, rel=0.05)
    assert pace.first == pytest.approx(100, rel=0.05)


def loaded(*seconds):
    """The load of a machine with two cores: by second, what others and what the run took."""
    busy, used = [0.0], [0.0]
    for others, own in seconds:
        busy.append(busy[-1] + others + own)
        used.append(used[-1] + own)
    moments = iter(zip(busy, used, strict=True))
    load = CpuContention(lambda: next(moments), 2)
    for now in range(len(seconds) + 1):
        load.look(float(now))
        load.look(now + 0.1)  # too soon
        if 2 <= now < 8:
            load.keep()
    return load


def test_others_that_leave_less_than_the_run_needs_lower_what_is_expected():
    calm = [(0.5, 1.0)] * 8
    assert loaded(*calm).share() == 1
    assert loaded(*calm, (0.9, 1.1), (0.9, 1.1)).share() == 1, "it may take more than usual"
    assert loaded(*calm, (1.4, 0.6), (1.4, 0.6)).share() == pytest.approx(0.6)
    assert loaded(*calm, (0.5, 0.0), (0.5, 0.0)).share() == 1, "it stands still although there is room"
    assert loaded(*calm, (2.0, 0.0), (2.0, 0.0)).share() == LEAST
    assert loaded((0.5, 1.0)).share() == 1, "nothing is known of it yet"


def test_the_load_of_this_machine_knows_this_process():
    load = of_processes(lambda: [2**22 + 1])  # gone
    load.look(0.0)
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    load.look(1.0)
    load.keep()
    assert 0 < load.share() <= 1


# ---------------------------------------------------------------- watching


def alone():
    """A machine of which nobody takes anything."""
    return 0.0, 0.0


WAKE = records.Wake()


def watch(*faults, ledger=None, load=None):
    """A watch, without its thread, under which these faults were applied at 10 s, when 100 rows/s were usual."""
    load = load or CpuContention(alone, 2)
    seen = FaultInjector(SimpleNamespace(names=()), ledger or SampleLedger(), load, lambda: 0.0, 1.0)
    seen.faults += [Fault(PlannedFault(kind, station, 1.0, 1.0), 10.0, 100.0) for kind, station in faults]
    return seen


def asked(seen, begin, end, per_second):
    for i in range(round((end - begin) * per_second)):
        now = begin + i / per_second
        seen.on_decision(now, records.RequestArrived("s", 0, "e/0", i, 1, 0, ""), [])


def test_recovered_is_back_and_as_fast_as_before():
    seen = watch((Kind.KILL, "g"))
    asked(seen, 8.0, 12.0, 100)  # others go on, but the station is away
    seen.on_decision(12.0, records.StationLost("g", 0, "was killed"), [])
    asked(seen, 12.0, 14.0, 40)
    seen.on_decision(14.0, records.GeneratorJoined("g", 1), [])
    asked(seen, 14.0, 20.0, 100)
    (fault,) = [fault.as_dict(0.0) for fault in seen.faults]
    assert (fault["noticed_s"], fault["joined_s"]) == (2.0, 4.0)
    assert fault["recovered_s"] == pytest.approx(5.7, abs=0.3)
    assert seen.violations == list(seen.faults[0].complaints()) == []


def test_a_fault_of_a_rank_is_noticed_by_the_loss_of_its_station():
    seen = watch((Kind.KILL, "trainer-rank1"))
    seen.on_decision(10.5, records.StationLost("trainer", 0, "rank 1: was ended by SIGKILL"), [])
    seen.on_decision(12.0, records.TrainerJoined("trainer", 1, 3), [])
    (fault,) = [fault.as_dict(0.0) for fault in seen.faults]
    assert (fault["station"], fault["noticed_s"], fault["joined_s"]) == ("trainer-rank1", 0.5, 2.0)
    assert seen.violations == []


def test_a_node_is_recovered_from_once_all_its_stations_are_somewhere():
    """A station that fetched from it fails too; one that moves later is not lost."""
    seen = watch((Kind.LOSS, NODE))
    for name in ("g", "h"):
        seen.on_decision(9.0, records.GeneratorJoined(name, 0), [])
    asked(seen, 8.0, 10.0, 100)
    seen.on_decision(14.0, records.StationLost("g", 0, "sent no heartbeat"), [])
    seen.on_decision(15.0, records.StationLost("h", 0, "HostSilent"), [])
    seen.on_decision(20.0, records.GeneratorJoined("g", 1), [])
    asked(seen, 20.0, 23.0, 100)
    (fault,) = seen.faults
    assert (fault.noticed_at, fault.over_at, fault.recovered_at) == (14.0, None, None)
    seen.on_decision(23.0, records.GeneratorJoined("h", 1), [])
    assert fault.recovered_at == 23.0
    seen.on_decision(45.0, records.StationLost("g", 1, "moves to node b, which has room", False, moves=True), [])
    assert seen.violations == list(fault.complaints()) == []
    seen.on_decision(46.0, records.StationLost("h", 1, "sent no heartbeat"), [])
    assert len(seen.violations) == 1


def test_what_others_take_counts_once_the_run_works_again():
    """They leave it half of the CPU; while it stood still they took all."""
    seen = watch((Kind.KILL, "g"), load=SimpleNamespace(look=lambda now: None, keep=list, share=lambda: 0.5))
    seen.on_decision(10.5, records.StationLost("g", 0, "was killed"), [])
    seen.on_decision(12.0, records.GeneratorJoined("g", 1), [])
    asked(seen, 12.0, 13.9, 50)
    (fault,) = seen.faults
    assert fault.recovered_at is None
    asked(seen, 13.9, 14.5, 50)
    assert fault.recovered_at == pytest.approx(14.0, abs=0.05)
    assert fault.share == 0.5


def test_a_loss_that_nobody_caused_is_a_violation_and_so_is_an_imbalance():
    seen = watch((Kind.KILL, "g"))
    seen.on_decision(11.0, records.StationLost("s", 0, "was ended by SIGSEGV"), [])
    assert seen.violations == ["s was lost, though no fault was applied to it: it was ended by SIGSEGV"]
    ledger = SampleLedger(started=3, running=2)
    seen = watch(ledger=ledger)
    for _ in range(2):
        seen.on_decision(11.0, WAKE, [])
    (violation,) = seen.violations
    assert "after Wake the ledger does not balance" in violation


@pytest.mark.parametrize(
    ("kind", "times", "words"),
    [
        (Kind.KILL, {"noticed_at": 11.0, "over_at": 12.0, "recovered_at": 14.0}, []),
        (Kind.SLOW, {"over_at": 11.0, "recovered_at": 12.0}, []),
        (Kind.STOP, {}, ["was never noticed", "never came back"]),
        (Kind.KILL, {"noticed_at": 11.0}, ["never came back"]),
        (Kind.KILL, {"noticed_at": 11.0, "over_at": 12.0}, ["throughput never came back"]),
        (Kind.KILL, {"noticed_at": 11.0, "over_at": 12.0, "recovered_at": 26.0}, ["back after 16.0 s, 15 s"]),
        (Kind.SLOW, {"over_at": 11.0, "recovered_at": 12.0, "given_up": "sent no beat"}, ["given up: it sent no beat"]),
    ],
)
def test_what_of_a_fault_went_wrong(kind, times, words):
    fault = Fault(PlannedFault(kind, "g", 1.0, 1.0), 10.0, 100.0, **times)
    complaints = list(fault.complaints())
    assert len(complaints) == len(words)
    assert all(word in complaint for word, complaint in zip(words, complaints, strict=True))


def test_totals_by_kind():
    killed = PlannedFault(Kind.KILL, "g", 1.0, 0.0)
    made = [
        Fault(killed, 10.0, 1.0, noticed_at=10.5, over_at=12.0, recovered_at=10.0 + after) for after in (3.0, 5.0, 16.0)
    ]
    made.append(Fault(PlannedFault(Kind.SLOW, "t", 1.0, 1.0), 10.0, 1.0, over_at=11.0))
    found = totals([fault.as_dict(10.0) for fault in made])
    assert (found["faults"], found["recovered_in_time"]) == (4, 2)
    assert found["by_kind"]["kill"]["recovered_s"] == {"p50": 5.0, "max": 16.0}
    assert found["by_kind"]["slow"]["recovered_s"] == {"p50": None, "max": None}
    assert set(found["by_kind"]) == {"kill", "slow"}


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["cartpole", "--faults", "0"], "--faults = 0"),
        (["cartpole", "--faults", "-1"], "--faults = -1"),
        (["cartpole", "--faults", "3", "launcher=inline"], "launcher = inline"),
        (["cartpole", "--faults", "3", "--gpus-per-node", "2"], "--gpus-per-node = 2: there are no nodes"),
        (["cartpole", "--faults", "3", "training.versions=0"], "training.versions = 0"),
        (["cartpol", "--faults", "3"], "did you mean cartpole?"),
        (["cartpole", "--faults", "3", "supervision.heartbeat=3"], "heartbeat_s"),
    ],
)
def test_what_cannot_be_disturbed_is_refused_in_one_sentence(words, part, capsys):
    assert main(["chaos", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("polyrhythm: error: ")
    assert told.err.count("\n") == 1
    assert part in told.err


def test_the_older_name_of_faults_still_works_and_says_so(capsys):
    assert main(["chaos", "cartpole", "--kills", "0"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "--kills is now called --faults, and will be removed"
    assert said[1].startswith("polyrhythm: error: PR110: --faults = 0")


def test_the_recipe_stays_as_it_is_but_for_what_chaos_needs():
    config, recipe = chaos_config("cartpole", 30), load_config("cartpole")
    assert (config.supervision.heartbeat_s, config.evaluation.episodes) == (4.0, 0)
    assert config.training.versions > 10**5
    for section in ("env", "policy", "batching", "freshness", "algorithm", "checkpoint", "demonstrations"):
        assert getattr(config, section) == getattr(recipe, section), section
    assert chaos_config("cartpole", 3, ["supervision.heartbeat_s=7"]).supervision.heartbeat_s == 7
    with pytest.raises(ConfigError, match="--faults"):
        chaos_config("cartpole", 0)
    nodes = SimpleNamespace(address="10.0.0.1:6379", gpus=2)
    placed = chaos_config("cartpole", 3, ["placement.trainer.devices=0,2,4"], nodes)
    assert (placed.launcher, placed.placement.simulated_devices, placed.placement.trainer.devices) == (
        "ray",
        2,
        "0,2,4",
    )


@pytest.fixture
def any_pace(monkeypatch):
    """How fast a run is again is a figure of the machine, and judged elsewhere."""
    monkeypatch.setattr("polyrhythm_bench.chaos.fault_injector.ENOUGH", 0.2)


def disturbed(folder, kills, seed, warm_up_s, **changes):
    """A small run under faults; what came out."""
    recipe = folder / "small.yaml"
    recipe.write_text(yaml.safe_dump({**ASYNCHRONOUS, **changes}))
    (folder / "run").mkdir()
    result = chaos(validate_run(chaos_config(str(recipe), kills)), folder / "run", kills, seed, warm_up_s)
    assert [v for v in result["totals"]["violations"] if "throughput" not in v] == []
    assert not children()
    assert not orphaned_folders()
    assert json.loads(json.dumps(result)) == result
    table = command.table(result).splitlines()
    assert table[0].split()[:3] == ["at_s", "station", "kind"]
    assert len(table) > kills + 5
    return result


@long(6, "chaos with one killed simulator; faults of each kind run here")
def test_a_killed_simulator(tmp_path, monkeypatch, any_pace):
    monkeypatch.setattr(chaos_run, "plan", lambda *_, **__: [PlannedFault(Kind.KILL, "simulator-0", 0.5, 0.0)])
    result = disturbed(tmp_path, 1, 0, 0.5, rollout={"rows": 4})
    (fault,) = result["faults"]
    assert (fault["station"], fault["kind"]) == ("simulator-0", "kill")
    assert fault["noticed_s"] < fault["joined_s"] <= fault["recovered_s"]
    assert result["totals"]["ledger"]["dropped"] == {}
    assert result["totals"]["ledger"]["trained"] > 0


@long(25, "polyrhythm chaos, one fault of each kind at each role")
@pytest.mark.slow
def test_one_fault_of_each_kind_at_each_role(tmp_path, any_pace):
    result = disturbed(tmp_path, 3, 2, 2.0)
    faults = result["faults"]
    assert {fault["kind"] for fault in faults} == {"kill", "stop", "slow"}
    assert {fault["station"].partition("-")[0] for fault in faults} == {"simulator", "generator", "trainer"}
    assert result["totals"]["lag"]["max"] <= 1


def test_a_run_that_hangs_is_ended_and_reported(tmp_path, monkeypatch):
    """The last fault never comes, so nothing else ends the run. Its time is nearly over when the first one should."""
    monkeypatch.setattr(FaultInjector, "start", lambda self, planned: signal.setitimer(signal.ITIMER_REAL, 0.5))
    recipe = tmp_path / "small.yaml"
    recipe.write_text(yaml.safe_dump(ASYNCHRONOUS))
    config = chaos_config(str(recipe), 1)
    result = chaos(validate_run(config), tmp_path, 1, 0, 0.0)
    limit_s = config.supervision.start_s + 2 * chaos_run.RECOVERY_S
    assert f"the run hung: it did not end within {limit_s:.0f} s" in result["totals"]["violations"]
    assert not children()
