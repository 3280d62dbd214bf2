"""However a run ends, no process outlives it by more than seconds, and nothing stays in shared memory."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time

import pytest
import torch
import yaml
from tests.long import long
from tests.process.runs import (
    ASYNCHRONOUS,
    LOCKSTEP,
    PATIENCE_S,
    children,
    command,
    gone,
    orphaned_folders,
    stations_of,
    wait_for_file,
    wait_for_output,
    wait_for_updates,
)

from polyrhythm.cli.main import main
from polyrhythm.config.load import merge
from polyrhythm.pipeline.signals import Interrupts, SignalInterrupt
from polyrhythm.runtime.memory.shared_folder import remove_orphans

#: Two stations that generate would import torch twice.
SMALL = merge(ASYNCHRONOUS, {"rollout": {"simulators": 1, "generators": 1}})
#: It ends only when it is told to, and has the time to end in order on a busy machine too.
ENDLESS = merge(SMALL, {"training": {"versions": 100_000}, "shutdown_s": PATIENCE_S})


def output(folder):
    return (folder / "output").read_text()


def stop_and_resume(folder, base, signals, *, versions):
    """Start the run, send the signals, resume it; its ledger, and its weights."""
    changes = {"training": {"versions": versions}}
    for number, (signal_number, updates) in enumerate(signals):
        resume = "never" if number == 0 else "auto"
        with command(folder, base, **merge(changes, {"resume": resume})) as process:
            wait_for_output(folder, "going on in", process, times=number)  # Python may lose a SIGINT while it imports
            wait_for_updates(folder, updates, process)
            time.sleep(0.4 * random.random())  # at whatever moment
            os.kill(process.pid, signal_number)
            process.wait(PATIENCE_S)
    assert main(["train", str(folder / "recipe.yaml"), "resume=auto", "--out", str(folder / "run")]) == 0
    assert not children()
    weights = torch.load(folder / "run" / "policy.pt", weights_only=True)
    return json.loads((folder / "run" / "ledger.json").read_text()), weights


#: What a run says that had the time to end in good order: whenever the signal comes, an update is under way or none is.
IN_GOOD_ORDER = re.compile("the update under way is finished|no update was under way")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=long(10, "SIGTERM to main alone"))]
)
def test_the_first_signal_finishes_the_update_saves_and_stops(number, tmp_path, capsys):
    with command(tmp_path, ENDLESS) as process:
        wait_for_updates(tmp_path, 3, process)
        stations = list(stations_of(process.pid).values())
        # A folder in use is left to whoever has it.
        assert main(["train", str(tmp_path / "recipe.yaml"), "resume=auto", "--out", str(tmp_path / "run")]) == 2
        assert f"is in use by process {process.pid}" in capsys.readouterr().err
        assert process.poll() is None
        os.kill(process.pid, number)
        assert process.wait(PATIENCE_S) == 128 + number
        assert gone(stations)
    assert "shutting down; send it again to stop now" in output(tmp_path)
    assert IN_GOOD_ORDER.search(output(tmp_path))
    assert list((tmp_path / "run" / "checkpoints").glob("run-*/run.json"))
    assert not children()
    assert not orphaned_folders()


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=long(10, "SIGINT to all processes")),
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=long(10, "SIGHUP to all processes")),
    ],
)
def test_a_terminals_or_job_managers_signal_to_every_process_is_mains_affair(number, tmp_path):
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("whoever started the tests has this signal ignored, as nohup does")
    with command(tmp_path, ENDLESS) as process:
        wait_for_updates(tmp_path, 3, process)
        for pid in [*stations_of(process.pid).values(), process.pid]:
            os.kill(pid, number)
        assert process.wait(PATIENCE_S) == 128 + number
    assert "starting it again" not in output(tmp_path)
    assert IN_GOOD_ORDER.search(output(tmp_path))


@long(6, "a run in a shell's background")
def test_a_run_in_a_shells_background_ignores_sigint_and_stops_in_order_at_sigterm(tmp_path):
    with command(tmp_path, ENDLESS, background=True) as process:
        wait_for_updates(tmp_path, 2, process)
        os.kill(process.pid, signal.SIGINT)
        wait_for_updates(tmp_path, 5, process)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 143
    assert "SIGTERM: shutting down" in output(tmp_path)
    assert "SIGINT" not in output(tmp_path)
    assert IN_GOOD_ORDER.search(output(tmp_path))


def slow_second_update(folder):
    """Settings with which the second update hangs; it makes the file `second`."""
    policy = {"type": "tests.process.policies:SlowSettings", "seconds": 3600.0, "quick": 2}
    # Two evaluations per update, for the targets and for its one step.
    return {
        "policy": policy | {"marker": str(folder / "second")},
        "training": {"epochs": 1, "minibatch_steps": 0},
    }


@long(8, "a second signal; test_supervision.py has one in a run of this process")
def test_the_second_signal_stops_at_once(tmp_path):
    with command(tmp_path, merge(ENDLESS, slow_second_update(tmp_path))) as process:
        wait_for_file(tmp_path / "second", tmp_path, process)
        stations = list(stations_of(process.pid).values())
        os.kill(process.pid, signal.SIGINT)
        wait_for_output(tmp_path, "shutting down", process)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert gone(stations)
    assert not orphaned_folders()


def test_a_signal_that_is_held_ends_the_run_when_all_is_removed():
    done = []

    def end():
        with Interrupts().handle_signals() as interrupts, interrupts.hold():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)  # Python calls handlers between two instructions
            done.append("removed")

    with pytest.raises(SignalInterrupt) as raised:
        end()
    assert (done, raised.value.status) == (["removed"], 143)


@long(10, "an update that is abandoned; tests/pipeline has one in one process")
def test_an_update_that_takes_too_long_is_abandoned_and_its_samples_wait(tmp_path, capsys):
    with command(tmp_path, merge(ENDLESS, slow_second_update(tmp_path)), shutdown_s=0.5) as process:
        wait_for_updates(tmp_path, 1, process)
        wait_for_file(tmp_path / "second", tmp_path, process)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130, output(tmp_path)
    assert "the update under way is abandoned" in output(tmp_path)
    *_, saved = sorted((tmp_path / "run" / "checkpoints").glob("run-*"))
    assert json.loads((saved / "run.json").read_text())["conductor"]["updates"]["in_training"]
    words = ["train", str(tmp_path / "recipe.yaml"), "seed=4", "resume=auto", "--out", str(tmp_path / "run")]
    assert main(words) == 2
    assert "seed is 4 here but 3 in that run; give it the same settings" in capsys.readouterr().err


def test_after_sigkill_of_main_no_process_is_left_and_the_next_start_clears_the_memory(tmp_path):
    with command(tmp_path, ENDLESS, placement={"trainer": {"ranks": 2}}) as process:
        wait_for_updates(tmp_path, 2, process)
        found = stations_of(process.pid)
        stations = list(found.values())
        os.kill(found["trainer-rank1"], signal.SIGSTOP)  # a stopped one dies as well, and one that waits for it
        process.kill()
        assert gone(stations)
    (folder,) = orphaned_folders()
    assert remove_orphans() == [folder]
    assert not folder.exists()


DETERMINISTIC = merge(LOCKSTEP, {"checkpoint": {"run_every_s": 0}})
VERSIONS = 8


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """What the run gives that is not cut, in one process."""
    whole = tmp_path_factory.mktemp("whole")
    recipe = whole / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(merge(DETERMINISTIC, {"training": {"versions": VERSIONS}, "launcher": "inline"})))
    assert main(["train", str(recipe), "--out", str(whole / "run")]) == 0
    return torch.load(whole / "run" / "policy.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([(signal.SIGTERM, 2)], marks=long(10, "a run that SIGTERM cut")),
        [(signal.SIGKILL, 3)],
        pytest.param([(signal.SIGINT, 1), (signal.SIGKILL, 4)], marks=long(12, "a run that was cut twice")),
    ],
    ids=["sigterm", "sigkill", "twice"],
)
def test_a_deterministic_run_that_was_cut_gives_the_weights_of_one_that_was_not(signals, wanted, tmp_path):
    ledger, found = stop_and_resume(tmp_path, DETERMINISTIC, signals, versions=VERSIONS)
    assert found["version"] == wanted["version"] == VERSIONS
    for name, tensor in wanted["policy"].items():
        assert torch.equal(found["policy"][name], tensor), name
    every = 10 * VERSIONS
    assert ledger == {**ledger, "started": every, "trained": every, "rolled_back": 0, "running": 0, "dropped": {}}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/actor/policy_loss" in line] == list(range(VERSIONS))


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([(signal.SIGINT, 5)], marks=long(15, "an asynchronous run cut once")),
        pytest.param([(signal.SIGINT, 2), (signal.SIGINT, 5)], marks=long(15, "an asynchronous run cut twice")),
    ],
    ids=["once", "twice"],
)
def test_an_asynchronous_run_that_was_cut_trains_every_sample_once(signals, tmp_path):
    ledger, weights = stop_and_resume(
        tmp_path,
        merge({**LOCKSTEP}, {"freshness": {"max_lag": 2, "on_update": "continue"}, "batching": {"type": "dynamic"}}),
        signals,
        versions=24,
    )
    assert weights["version"] == 24
    total = sum(ledger[state] for state in ("trained", "lent", "buffered", "running", "reissuing", "rolled_back"))
    assert ledger["started"] == total + sum(ledger["dropped"].values())
    assert ledger["trained"] == 240
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert sum(summary["lag"]["counts"].values()) >= 240
    assert summary["lag"]["max"] <= 2
