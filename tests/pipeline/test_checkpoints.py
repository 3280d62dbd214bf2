"""A run saved in the middle and gone on with; what is not whole is refused."""

from __future__ import annotations

import json
import logging
import resource
import shutil
import signal
import subprocess
import sys
import threading
from copy import deepcopy
from dataclasses import fields

import numpy as np
import pytest
import torch
from tests.built import built
from tests.pipeline.runs import config
from tests.plugins.ranks.folders import save_as_folder

from polyrhythm.config.load import merge
from polyrhythm.errors import RunFolderError
from polyrhythm.pipeline.build import STATES, build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.observers.metrics import LagHistogram
from polyrhythm.pipeline.persistence.checkpoints import load_policy, load_run, newest_run, save_policy, saved_runs
from polyrhythm.pipeline.persistence.saver import RunCheckpointer
from polyrhythm.pipeline.persistence.snapshot import SampleHandover, take_snapshot, write_snapshot
from polyrhythm.pipeline.run_loop import Interrupted
from polyrhythm.scheduler.records import Checkpointed, StartUpdate, UpdateDone
from polyrhythm.specs import Trajectory
from polyrhythm.stations.trainer_states import TrainerStates
from polyrhythm.training.checkpoint import load, load_state, save_state

COUNTS = {"lags": {"0": 3}, "wall_s": 1.5, "busy_s": {}}
ASYNCHRONOUS = {
    "rollout": {"sharding": "even:2", "generators": 2, "segment_steps": 8},
    "batching": {"type": "dynamic", "max_rows": 4, "max_wait_ms": 1},
    "freshness": {"max_lag": 1.5, "on_update": "continue", "sync_interval": 2},
    "training": {"order": "arrival"},
}


def stopped(folder, stop, changes=ASYNCHRONOUS):
    """A real run that stands where `stop(conductor)` was first true."""
    pipeline = build_pipeline(RunContext(config(**changes), folder=folder), record=True)
    pipeline.loop.stop = lambda: stop(pipeline.loop.conductor)
    with pytest.raises(Interrupted):
        pipeline.loop.train_until(3)
    return pipeline


def snapshot_of(folder, pipeline):
    loop, payloads = pipeline.loop, pipeline.launcher.payloads
    return take_snapshot(folder / STATES, loop.conductor, payloads, pipeline.weights, pipeline.states, COUNTS)


def save(folder, pipeline):
    return write_snapshot(snapshot_of(folder, pipeline), pipeline.states.keep)


def waiting(conductor):
    """Handles of the samples that wait or are lent."""
    return {sample.payload_id for sample in conductor.rollout.samples.values() if sample.payload_id}


def in_the_second_version(conductor):
    """An update is lent, as the second of its version."""
    return conductor.versions.updates == 3 and conductor.updates.in_training


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_same_sample(found, wanted):
    for field in fields(Trajectory):
        one, other = getattr(found, field.name), getattr(wanted, field.name)
        if isinstance(other, dict):
            assert one.keys() == other.keys(), field.name
            assert all(np.array_equal(one[name], other[name]) for name in other), field.name
        else:
            assert np.array_equal(one, other), field.name
            assert type(one) is type(other), field.name


def test_a_saved_run_comes_back_with_samples_weights_and_counts(tmp_path):
    pipeline = stopped(tmp_path, in_the_second_version)
    conductor = pipeline.loop.conductor
    path = save(tmp_path, pipeline)
    saved = load_run(path)
    assert saved.conductor == json.loads(json.dumps(conductor.save()))
    assert saved.counts == COUNTS
    assert saved.samples.keys() == waiting(conductor) == set(pipeline.launcher.payloads.in_flight.finished())
    for payload_id, sample in saved.samples.items():
        assert_same_sample(sample, pipeline.launcher.payloads.arena.trajectory(int(payload_id)))
    version, weights = pipeline.weights.read()
    assert saved.version == version == 1
    assert same(saved.policy, weights)
    assert saved.updates == 2, "of the state that was saved before version 1 was published"
    assert load_state(saved.trainer)["updates"] == 2


def test_weights_that_a_lost_trainer_wrote_and_nobody_heard_of_are_not_saved(tmp_path):
    pipeline = stopped(tmp_path, in_the_second_version)
    version, weights = pipeline.weights.read()
    pipeline.weights.publish(version + 1, {name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    saved = load_run(save(tmp_path, pipeline))
    assert saved.version == version
    assert same(saved.policy, weights)


def test_weights_that_are_the_trainers_own_are_saved_once(tmp_path):
    pipeline = stopped(tmp_path, lambda conductor: conductor.versions.applied == 1)
    path = save(tmp_path, pipeline)
    assert {file.name for file in path.iterdir()} == {"run.json", "samples.npz", "trainer.pt"}
    saved = load_run(path)
    assert saved.version == 1
    assert same(saved.policy, pipeline.weights.read()[1])


def trained(pipeline):
    """Tickets of the updates that were finished, update by update."""
    lent, found = (), {}
    for decision in pipeline.loop.trace:
        if isinstance(decision.event, UpdateDone):
            found[decision.event.update] = lent
        for command in decision.commands:
            lent = command.tickets if isinstance(command, StartUpdate) else lent
    return found


@pytest.mark.parametrize("every_versions", [1, 3])
def test_a_run_goes_on_from_where_it_was_saved(every_versions, tmp_path):
    """With a state for every version nothing but the update under way is done again. With fewer, the run goes back to
    the first weights, under a new version; what it had trained is lost, and nothing else."""
    changes = {**ASYNCHRONOUS, "checkpoint": {"every_versions": every_versions}}
    first = stopped(tmp_path, in_the_second_version, changes)
    first.close()
    saved = load_run(save(tmp_path, first))
    second = build_pipeline(RunContext(config(**changes), folder=tmp_path, saved=saved), record=True)
    conductor = second.loop.conductor
    assert waiting(conductor) >= set(saved.samples)
    assert second.weights.newest == saved.version
    second.loop.train_until(3)
    ledger, begun = conductor.ledger, saved.updates
    assert ledger.imbalance == 0
    assert begun == (2 if every_versions == 1 else 0)
    whole = {update: tickets for update, tickets in trained(first).items() if update < begun} | trained(second)
    tickets = [ticket for tickets in whole.values() for ticket in tickets]
    assert len(tickets) == len(set(tickets)) == ledger.trained
    if every_versions == 1:
        assert list(whole) == list(range(6))
        assert ledger.trained == 60
        assert ledger.rolled_back == 10
    else:
        assert second.weights.newest == 3, "version 1 was seen, so what is trained from version 0 anew is version 2"
        assert ledger.rolled_back == 30
    lags = [
        c.version - oldest
        for d in second.loop.trace
        for c in d.commands
        if isinstance(c, StartUpdate)
        for oldest in c.oldest
    ]
    assert max(lags) <= 2
    assert set(second.launcher.payloads.in_flight.finished()) == waiting(conductor)
    second.close()


def test_the_newest_two_runs_are_kept_and_one_that_was_not_finished_is_none(tmp_path):
    pipeline = stopped(tmp_path, in_the_second_version)
    folder = tmp_path / STATES
    (folder / "run-000007.part").mkdir(parents=True)
    (folder / "run-000007.part" / "run.json").write_text("{")
    assert saved_runs(folder) == []
    paths = [save(tmp_path, pipeline) for _ in range(3)]
    assert [path.name for path in paths] == ["run-000000", "run-000001", "run-000002"]
    assert saved_runs(folder) == paths[1:]
    (folder / "run-000003.part").mkdir()
    (folder / "run-000003.part" / "samples.npz").write_bytes(b"cut short")
    assert load_run(save(tmp_path, pipeline)).samples
    assert saved_runs(folder)[-1].name == "run-000003"


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "cut short": cut,
    "empty": lambda path: path.write_bytes(b""),
    "something else": lambda path: path.write_bytes(b"rubbish"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["run.json", "samples.npz", "trainer.pt", "published.pt"])
def test_a_damaged_checkpoint_is_refused_with_what_is_wrong(name, damage, tmp_path, saved_once):
    path = tmp_path / "run-000000"
    path.mkdir()
    for file in saved_once.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    load_run(path)
    DAMAGES[damage](path / name)
    if (name, damage) == ("published.pt", "missing"):
        return  # as where the trainer's own weights are the published ones
    with pytest.raises(RunFolderError, match=r"^run-000000 is damaged: [^;]+$"):
        load_run(path)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    path = save(folder, stopped(folder, in_the_second_version))
    assert (path / "published.pt").is_file()
    return path


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["index", "__0_0.distcp"])
def test_a_run_whose_trainer_is_a_folder_is_whole_or_put_aside(name, damage, tmp_path, saved_once):
    """As one file; a newer saved run that is damaged gives way to the one before it."""
    for number in range(2):
        path = tmp_path / f"run-00000{number}"
        shutil.copytree(saved_once, path)
        save_as_folder(load_state(path / "trainer.pt"), path / "trainer")
        (path / "trainer.pt").unlink()
    found, wanted = load_run(path), load_run(saved_once)
    assert found.trainer == path / "trainer"
    assert found.updates == wanted.updates
    assert same(load(found.trainer)["policy"], load_state(wanted.trainer)["policy"])
    assert newest_run(tmp_path).trainer == path / "trainer"
    DAMAGES[damage](path / "trainer" / name)
    with pytest.raises(RunFolderError, match=r"^run-000001 is damaged: "):
        load_run(path)
    assert newest_run(tmp_path).trainer == tmp_path / "run-000000" / "trainer"
    assert (tmp_path / "run-000001.damaged").is_dir()


def test_a_bit_of_a_weight_that_changed_in_a_trainers_folder_is_found(tmp_path, saved_once):
    path = tmp_path / "run-000000"
    shutil.copytree(saved_once, path)
    state = load_state(path / "trainer.pt")
    file = save_as_folder(state, path / "trainer") / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[content.index(next(iter(state["policy"].values())).numpy().tobytes())] ^= 1
    load_run(path)
    file.write_bytes(content)
    with pytest.raises(RunFolderError, match=r"^run-000000 is damaged: .* in it is damaged"):
        load_run(path)


def test_a_snapshot_links_the_files_of_a_trainers_folder(tmp_path):
    pipeline = stopped(tmp_path, in_the_second_version)
    (state,) = pipeline.states.paths()[-1:]
    folder = save_as_folder(load_state(state), state.with_suffix(""))
    state.unlink()
    path = save(tmp_path, pipeline)
    assert {file.name for file in path.iterdir()} == {"run.json", "samples.npz", "trainer", "published.pt"}
    for file in folder.iterdir():
        assert (path / "trainer" / file.name).samefile(file)
    assert load_run(path).updates == TrainerStates.updates(folder)


@pytest.mark.parametrize("content", ["[]", "{}", '{"conductor": {}, "counts": {}}', '{"version": "x"}', "null"])
def test_a_checkpoint_with_other_content_is_refused(content, tmp_path, saved_once):
    path = tmp_path / "run-000000"
    path.mkdir()
    for file in saved_once.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "run.json").write_text(content)
    with pytest.raises(RunFolderError, match="run-000000 is damaged: "):
        load_run(path)


def test_a_run_is_saved_when_the_trainers_state_is_as_old_as_the_conductor(tmp_path):
    """Not more often than it may be, and never in the middle of an update."""
    settings = config(**ASYNCHRONOUS, checkpoint={"run_every_s": 5.0})
    pipeline = build_pipeline(RunContext(settings, folder=tmp_path))
    conductor = pipeline.loop.conductor
    saver = RunCheckpointer(tmp_path / STATES, pipeline, settings.checkpoint, LagHistogram(), None, 100.0)
    for now, updates in ((104.0, 0), (105.0, 1), (106.0, 0), (110.0, 0), (111.0, 0)):
        saver.on_decision(now, Checkpointed("trainer", 0, updates), [])
        saver.wait()
    assert conductor.versions.updates == 0
    assert [path.name for path in saved_runs(tmp_path / STATES)] == ["run-000000", "run-000001"]
    pipeline.close()


class Gate:
    """Writes a snapshot, as a slow disk does, once it is opened. begun, over: snapshots; samples: as they were when the
    first was taken."""

    def __init__(self, pipeline):
        self.begun, self.over, self.opened, self.written = [], [], threading.Event(), threading.Event()
        self._arena, self.samples = pipeline.launcher.payloads.arena, {}

    def __call__(self, snapshot, keep):
        self.begun.append(snapshot)
        assert self.opened.wait(60.0)
        self.over.append(write_snapshot(snapshot, keep))
        self.written.set()
        return self.over[-1]

    def note(self, conductor):
        """Copy, in main's thread, what a save that begins now has to hold."""
        self.samples = {
            payload_id: deepcopy(self._arena.trajectory(int(payload_id))) for payload_id in waiting(conductor)
        }


def test_decisions_go_on_while_a_run_is_written_and_what_is_written_is_of_one_moment(tmp_path):
    changes = {"training": {"versions": 6}, "freshness": {"max_lag": 4.0}, "checkpoint": {"run_every_s": 0.0}}
    settings = config(**merge({**ASYNCHRONOUS, "freshness": {}}, changes))
    pipeline = build_pipeline(RunContext(settings, folder=tmp_path))
    loop, gate = pipeline.loop, Gate(pipeline)
    saver = RunCheckpointer(tmp_path / STATES, pipeline, settings.checkpoint, LagHistogram(), None, 0.0, write=gate)

    class SavesOnce(Observer):
        """Passes on the first moment at which a run can be saved that has finished samples."""

        hears = (Checkpointed,)

        def on_decision(self, now, event, commands):
            due = event.updates == loop.conductor.versions.updates and waiting(loop.conductor)
            if due and not gate.begun:
                gate.note(loop.conductor)
                gate.at = loop.conductor.save()
                saver.on_decision(now, event, commands)

    loop.add_observers(SavesOnce())
    loop.train_until(6)
    assert loop.conductor.versions.applied == 6, "versions go on, and the save is not written yet"
    assert (len(gate.begun), gate.over) == (1, [])
    released = gate.samples.keys() - set(pipeline.launcher.payloads.in_flight.finished())
    assert released, "the conductor has given blocks back that are not written yet"
    assert saved_runs(tmp_path / STATES) == []
    gate.opened.set()
    saver.wait()
    saved = load_run(saved_runs(tmp_path / STATES)[-1])
    assert saved.conductor == json.loads(json.dumps(gate.at))
    assert saved.samples.keys() == gate.samples.keys()
    for payload_id, sample in saved.samples.items():
        assert_same_sample(sample, gate.samples[payload_id])
    pipeline.close()


def test_a_block_that_is_needed_is_copied_first(tmp_path):
    pipeline = stopped(tmp_path, in_the_second_version)
    arena = pipeline.launcher.payloads.arena
    payload_ids = sorted(waiting(pipeline.loop.conductor))
    wanted = {payload_id: deepcopy(arena.trajectory(int(payload_id))) for payload_id in payload_ids}
    handover = SampleHandover(pipeline.launcher.payloads, payload_ids)
    reading = handover.samples()
    found = [next(reading)]
    for payload_id in payload_ids:
        assert handover.is_pending(int(payload_id)) is (payload_id != payload_ids[0])
        handover.copy_now(int(payload_id))
        arena.rewards[arena.layout.block(int(payload_id), 1)] = 99.0  # the next sample's
        assert not handover.is_pending(int(payload_id))
    found += reading
    assert [payload_id for payload_id, _ in found] == payload_ids
    for payload_id, sample in found:
        assert_same_sample(sample, wanted[payload_id])


def test_the_next_save_begins_when_the_one_before_is_written(tmp_path):
    settings = config(**ASYNCHRONOUS, checkpoint={"run_every_s": 5.0})
    pipeline = build_pipeline(RunContext(settings, folder=tmp_path))
    gate = Gate(pipeline)
    saver = RunCheckpointer(tmp_path / STATES, pipeline, settings.checkpoint, LagHistogram(), None, 100.0, write=gate)
    for now in (105.0, 110.0, 115.0):
        saver.on_decision(now, Checkpointed("trainer", 0, 0), [])
    assert len(gate.begun) == 1
    gate.opened.set()
    saver.wait()
    saver.on_decision(116.0, Checkpointed("trainer", 0, 0), [])
    saver.wait()
    assert len(gate.over) == 2, "it was due, and did not wait for another five seconds"
    pipeline.close()


def test_a_save_that_does_not_end_is_said_once_and_nobody_waits_for_it(tmp_path, caplog):
    settings = config(**ASYNCHRONOUS)
    pipeline = build_pipeline(RunContext(settings, folder=tmp_path))
    gate = Gate(pipeline)
    saver = RunCheckpointer(
        *(tmp_path / STATES, pipeline, settings.checkpoint, LagHistogram(), None, 0.0), deadline_s=0.0, write=gate
    )
    saver.on_decision(100.0, Checkpointed("trainer", 0, 0), [])
    for now in (101.0, 102.0):
        saver.on_tick(now)
    assert caplog.text.count("run-000000.part is still being written after 0 s; the run goes on") == 1
    saver.save()
    assert "run-000000.part is not written after" in caplog.text
    gate.opened.set()
    assert gate.written.wait(60.0)
    pipeline.close()


def test_a_save_that_was_given_up_is_not_waited_for_again(tmp_path, caplog):
    settings = config(**ASYNCHRONOUS)
    pipeline = build_pipeline(RunContext(settings, folder=tmp_path))
    gate = Gate(pipeline)
    saver = RunCheckpointer(
        *(tmp_path / STATES, pipeline, settings.checkpoint, LagHistogram(), None, 0.0), deadline_s=0.0, write=gate
    )
    saver.save()
    saver.wait()
    assert caplog.text.count("run-000000.part is not written after") == 1
    gate.opened.set()
    assert gate.written.wait(60.0)
    pipeline.close()


def test_an_interrupt_while_the_last_save_is_written_ends_the_waiting_for_good(tmp_path, caplog):
    settings = config(**ASYNCHRONOUS)
    pipeline = build_pipeline(RunContext(settings, folder=tmp_path))
    gate = Gate(pipeline)
    saver = RunCheckpointer(
        *(tmp_path / STATES, pipeline, settings.checkpoint, LagHistogram(), None, 0.0), deadline_s=2.0, write=gate
    )
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)  # as a second Ctrl-C
        with pytest.raises(KeyboardInterrupt):
            saver.save()
    finally:
        signal.signal(signal.SIGALRM, before)
    saver.wait()
    assert "is given up" not in caplog.text, "nobody waited for the deadline"
    gate.opened.set()
    assert gate.written.wait(60.0)
    pipeline.close()


def test_a_bug_while_a_run_is_written_is_raised_once(tmp_path):
    settings = config(**ASYNCHRONOUS)
    pipeline = build_pipeline(RunContext(settings, folder=tmp_path))

    def broken(snapshot, keep):
        raise ValueError("a bug")

    given = (tmp_path / STATES, pipeline, settings.checkpoint, LagHistogram(), None, 0.0)
    saver = RunCheckpointer(*given, write=broken)
    with pytest.raises(ValueError, match="a bug"):
        saver.save()
    saver.wait()  # what ends the run goes on: the weights are still to be saved
    pipeline.close()


def test_a_run_is_saved_though_an_older_one_cannot_be_removed(tmp_path, caplog):
    pipeline = stopped(tmp_path, in_the_second_version)
    save(tmp_path, pipeline)
    (tmp_path / STATES / "run-000000").replace(tmp_path / "elsewhere")
    (tmp_path / STATES / "run-000000").symlink_to(tmp_path / "elsewhere")
    runs = [save(tmp_path, pipeline) for _ in range(pipeline.states.keep)]
    pipeline.close()
    assert saved_runs(tmp_path / STATES)[1:] == runs
    assert "run-000000 cannot be removed" in caplog.text


def test_a_run_whose_trainers_states_somebody_removed_is_not_saved_and_goes_on(tmp_path, caplog):
    settings = config(**ASYNCHRONOUS)
    pipeline = build_pipeline(RunContext(settings, folder=tmp_path))
    for path in pipeline.states.paths():
        path.unlink()
    RunCheckpointer(tmp_path / STATES, pipeline, settings.checkpoint, LagHistogram(), None, 0.0).save()
    pipeline.close()
    assert f"the run cannot be saved in {tmp_path / STATES}: there is no trainer-*" in caplog.text


def test_a_run_that_cannot_be_written_is_said_and_the_one_before_stays(tmp_path, caplog):
    """A real limit of the system on the size of a file, in a process of its own."""
    code = """
import pathlib, sys
from tests.pipeline.test_checkpoints import limited
limited(pathlib.Path(sys.argv[1]))
"""
    pipeline = stopped(tmp_path, in_the_second_version)
    before = save(tmp_path, pipeline)
    pipeline.close()
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    folder = tmp_path / STATES
    assert f"the run cannot be saved in {folder}: " in found.stderr
    assert "run-000001.part" in found.stderr
    assert saved_runs(folder) == [before]
    assert not list(folder.glob("*.part"))
    assert load_run(before).samples


def limited(folder):
    """Go on with the run in the folder, and save it."""
    logging.basicConfig()
    settings = config(**ASYNCHRONOUS)
    saved = load_run(saved_runs(folder / STATES)[-1])
    pipeline = build_pipeline(RunContext(settings, folder=folder, saved=saved))
    saver = RunCheckpointer(folder / STATES, pipeline, settings.checkpoint, LagHistogram(), saved, 0.0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
    saver.save()
    pipeline.loop.evaluate("after", held_out(3, 1, 1, greedy=True))
    pipeline.close()


def test_what_a_run_has_counted_goes_on_counting(tmp_path):
    settings = config()
    pipeline = build_pipeline(RunContext(settings, folder=tmp_path))
    saver = RunCheckpointer(
        tmp_path / STATES, pipeline, settings.checkpoint, LagHistogram({"1": 4}), None, pipeline.loop.clock()
    )
    pipeline.loop.add_observers(saver)
    pipeline.loop.train_until(1)
    saver.save()
    pipeline.close()
    saved = load_run(saved_runs(tmp_path / STATES)[-1])
    assert saved.counts["lags"] == {"1": 4}
    saved.counts["wall_s"] += 1000.0
    again = build_pipeline(RunContext(settings, folder=tmp_path, saved=saved))
    later = RunCheckpointer(tmp_path / STATES, again, settings.checkpoint, LagHistogram(), saved, again.loop.clock())
    again.loop.add_observers(later)
    again.loop.train_until(2)
    later.save()
    before, after = saved.counts, load_run(saved_runs(tmp_path / STATES)[-1]).counts
    assert after["totals"]["transitions"] > before["totals"]["transitions"] > 0
    assert after["wall_s"] > before["wall_s"] > 0
    assert after["busy_s"].keys() == before["busy_s"].keys() == {"simulator-0", "generator-0", "trainer"}
    assert all(after["busy_s"][name] > before["busy_s"][name] > 0 for name in before["busy_s"])
    again.close()


def test_the_policy_alone_is_saved_with_its_settings_and_version(tmp_path):
    settings = config()
    policy = built(settings.policy, settings.env.spec(), 3)
    save_policy(policy.state_dict(), settings, tmp_path / "policy.pt", 7)
    for path in (tmp_path, tmp_path / "policy.pt"):
        found, weights, version = load_policy(path)
        assert (found, version) == (settings, 7)
        assert same(weights, policy.state_dict())
    save_state({"policy": {}}, tmp_path / "policy.pt")
    with pytest.raises(RunFolderError, match=r"holds no policy with its settings \(KeyError: 'version'\)"):
        load_policy(tmp_path)
    torch.save([1], tmp_path / "policy.pt")
    with pytest.raises(RunFolderError, match="it holds list; name another"):
        load_policy(tmp_path)


def test_a_state_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "state.pt"
    save_state({"updates": 1}, path)
    (tmp_path / "state.pt.part").write_bytes(b"cut short")
    assert load_state(path) == {"updates": 1}
    save_state({"updates": 2}, path)
    assert load_state(path) == {"updates": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]
