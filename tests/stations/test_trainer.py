"""The trainer station: updates in units, weights between updates, states before weights, figures past the conductor."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.runtime.arenas import holding
from tests.stations.test_trainer_states import Ranks
from tests.training.toy import ToyPolicy, algorithm, collect, same, training, weights

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.runtime.memory.weights import InlineWeights
from polyrhythm.runtime.messages import Channels, Report
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler.records import (
    Checkpointed,
    Published,
    PublishWeights,
    SaveTrainer,
    Serve,
    StartUpdate,
    TrainerJoined,
    UpdateDone,
)
from polyrhythm.specs import WeightsLayout
from polyrhythm.specs.weights import weight_specs
from polyrhythm.stations.trainer import Trainer
from polyrhythm.stations.trainer_io import PublicationJob, Publisher
from polyrhythm.stations.trainer_states import TrainerStates
from polyrhythm.training.checkpoint import BackgroundSaving, load_state, save_state
from polyrhythm.training.learner import Learner
from polyrhythm.training.ranks import ONE_RANK

LEND = StartUpdate("t", 0, 2, (0, 1, 2), ("0", "1", "2"), (0, 0, 0))


def layout_of(policy):
    return WeightsLayout.of(weight_specs(policy.state_dict()))


class Stand:
    """A trainer with everything that it says; an update of it has 2 epochs of 3 mini-batches."""

    def __init__(self, states=None, channel=None, policy=None, *, overlap=False, settings=None, ranks=ONE_RANK, **more):
        """more: arena (else one with three samples), streamed (whether those have a version for each step)."""
        self.policy, self.said = policy or ToyPolicy(), []
        samples = collect(ToyPolicy(), lengths=(3, 4, 2))
        if more.get("streamed"):
            samples = [replace(x, newer=np.zeros(x.valid.shape, np.int32)) for x in samples]
        self.arena = more.get("arena") or holding(samples)
        self.channel = channel or InlineWeights(layout_of(self.policy))
        train = training(epochs=2, minibatch_steps=3)
        self.learner = Learner(self.policy, settings or algorithm(), train, total_updates=4, seed=0, ranks=ranks)
        channels = Channels(self.said.append, print, self.said.append)
        self.trainer = Trainer(
            "t", 0, Publisher(self.channel, self.learner), self.arena, channels, states, overlap=overlap
        )

    def do(self, *commands):
        for command in commands:
            self.trainer.handle(command)
        while self.trainer.work():
            pass


def test_updates_are_counted_since_the_start_of_the_station():
    """Those before are in the counters of the incarnation that did them: a run adds the counters of all."""
    stand = Stand()
    stand.do(LEND)
    channels = Channels(print, print, print)
    restarted = Trainer("t", 1, Publisher(stand.channel, stand.learner), stand.arena, channels)
    assert restarted.joined().updates == 1
    assert restarted.statistics()["updates"] == 0


def test_an_update_is_several_units_and_ends_with_a_report_and_an_event():
    stand = Stand()
    trainer, said = stand.trainer, stand.said
    assert not trainer.work()
    trainer.handle(LEND)
    units = 0
    while trainer.work():
        units += 1
        assert bool(said) == (units == 7)  # 2 epochs of 3 mini-batches, and the unit that finds the end
    report, done = said
    assert done == UpdateDone("t", 0, 0)
    assert (report.topic, report.step) == ("update", 0)
    assert report.values["staleness/lag_max"] == 2
    assert report.values["staleness/stale_trajectory_processed"] == 2
    assert report.values["staleness/stale_samples_processed"] == 2
    assert report.values["staleness/total_partial_num"] == 0
    assert report.values["env/sample_chunk_steps"] == 3
    assert "train/actor/policy_loss" in report.values
    assert trainer.joined() == TrainerJoined("t", 0, 1)
    assert trainer.statistics() == {"optimizer_steps": 6, "updates": 1}


def test_an_update_has_the_micro_batches_of_its_command_and_the_same_result():
    whole, cut = Stand(), Stand()
    whole.do(LEND)
    cut.do(replace(LEND, micro_batch=1))
    assert max(whole.policy.rows_seen) == 3
    assert max(cut.policy.rows_seen[-18:]) == 1  # the trained passes: 2 epochs of 9 chunk steps
    for name, x in whole.policy.state_dict().items():
        torch.testing.assert_close(cut.policy.state_dict()[name], x, atol=1e-7, rtol=1e-6)
    cut.do(replace(LEND, update=1))
    assert max(cut.policy.rows_seen[-6:]) > 1, "0 is the recipe's size again"


def test_groups_and_samples_that_are_old_or_had_new_weights_within_a_message_are_counted():
    stand = Stand(streamed=True)
    stand.arena.head[:3, 5] = (4, 4, 6)  # groups
    stand.arena.answers["newer"][stand.arena.layout.block(1, 1), 0] = 1
    stand.do(LEND)
    counted = {name.removeprefix("staleness/"): value for name, value in stand.said[0].values.items()}
    assert counted["stale_trajectory_processed"] == 2
    assert counted["stale_samples_processed"] == 1
    assert (counted["total_partial_num"], counted["max_partial_span"]) == (1, 1)
    assert counted["partial_ratio"] == pytest.approx(1 / 3)


def test_weights_are_published_after_the_update_before_them_and_do_not_move_on():
    stand = Stand()
    before = weights(stand.policy)
    stand.do(PublishWeights("t", 0), LEND, PublishWeights("t", 1))
    assert stand.said[0] == Published("t", 0, 0)
    assert stand.said[-1] == Published("t", 0, 1)
    assert [stand.channel.read(version)[0] for version in (0, 1)] == [0, 1]
    module = ToyPolicy(seed=9)
    assert Receiver(stand.channel, module).apply(0) == 0
    assert same(weights(module), before)
    assert Receiver(stand.channel, module).apply(1) == 1
    assert same(weights(module), weights(stand.policy))
    assert not same(weights(module), before)


def test_its_state_is_saved_before_every_second_version_is_published(tmp_path):
    stand = Stand(TrainerStates(str(tmp_path / "states"), every_versions=2))
    stand.do(PublishWeights("t", 1), LEND, PublishWeights("t", 2))
    assert stand.said[0] == Published("t", 0, 1)
    assert stand.said[-2:] == [Checkpointed("t", 0, 1), Published("t", 0, 2)]
    (path,) = (tmp_path / "states").iterdir()
    state = load_state(path)
    assert state["updates"] == 1
    assert same(state["policy"], weights(stand.policy))


class WrittenLater:
    """States that are written in the background, as sharded ones are: each until `written` is set."""

    copied = None

    def __init__(self, last=9):
        self.last, self.written, self.begun = last, threading.Event(), 0

    def due(self, version):
        return True

    def save(self, learner, *, background=False):
        assert self.begun == 0 or self.over, "one at a time"
        self.begun += 1
        return self

    @property
    def over(self):
        return self.written.is_set()

    def wait(self):
        assert self.written.wait(10)


def test_a_state_is_written_beside_publication_and_training_and_is_there_before_the_next_update_ends():
    states = WrittenLater()
    stand = Stand(states)
    stand.trainer.handle(PublishWeights("t", 0))
    stand.trainer.handle(LEND)
    for _ in range(7):  # the publication, and all steps of the update
        assert stand.trainer.work()
    assert stand.said == [Published("t", 0, 0)]
    threading.Timer(0.05, states.written.set).start()
    stand.do()
    assert [type(said) for said in stand.said] == [Published, Checkpointed, Report, UpdateDone]
    assert stand.said[1] == Checkpointed("t", 0, 0)


class HeldFile(TrainerStates):
    """A state in one file, which is not written before the test lets it be."""

    go_on = threading.Event()

    def save(self, learner, *, background=False):
        assert background
        copied = copy.deepcopy(learner.state_dict())
        path = Path(self.folder) / "state.pt"

        def write():
            assert self.go_on.wait(10)
            save_state(copied, path)

        return BackgroundSaving(write, copied)


def test_a_file_is_written_beside_the_steps_of_the_next_update_and_is_of_the_one_before(tmp_path):
    states = HeldFile(str(tmp_path))
    states.go_on.clear()
    stand = Stand(states, overlap=True)
    before = weights(stand.policy)
    stand.trainer.handle(PublishWeights("t", 1))
    stand.trainer.handle(LEND)
    for _ in range(7):
        assert stand.trainer.work()
    assert not same(weights(stand.policy), before)
    assert stand.said == [], "neither saved nor published, and the update is not over"
    threading.Timer(0.05, states.go_on.set).start()
    stand.do()
    stand.trainer.close()
    assert stand.said[0] == Checkpointed("t", 0, 0)
    assert {type(said) for said in stand.said[1:]} == {Published, Report, UpdateDone}
    saved = load_state(tmp_path / "state.pt")
    assert saved["updates"] == 0
    assert same(saved["policy"], before)
    assert same(stand.channel.read(1)[1], before)


def alike(one: object, other: object) -> bool:
    """Whether two states are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def test_what_is_saved_in_the_background_is_what_is_saved_at_once(tmp_path):
    stand = Stand()
    stand.do(LEND)
    stand.learner.policy.critic.bias = stand.learner.policy.logits.bias  # tied
    stand.learner.save(tmp_path / "at-once.pt")
    saving = stand.learner.save(tmp_path / "later.pt", background=True)
    stand.policy.logits.weight.data.zero_()
    assert saving.copied is not None
    saving.wait()
    assert saving.copied is None, "its memory goes"
    one, other = (load_state(tmp_path / name) for name in ("at-once.pt", "later.pt"))
    assert alike(one, other)
    assert other["policy"]["critic.bias"].data_ptr() == other["policy"]["logits.bias"].data_ptr()


def test_a_file_that_cannot_be_written_ends_the_update_beside_it(tmp_path):
    (tmp_path / "trainer-00000000.pt" / "in-the-way").mkdir(parents=True)
    stand = Stand(TrainerStates(str(tmp_path)), overlap=True)
    with pytest.raises(RunHalted, match=r"trainer-00000000.pt cannot be written .* move it away"):
        stand.do(PublishWeights("t", 1), LEND)
    assert stand.said == []
    assert [path.name for path in tmp_path.iterdir()] == ["trainer-00000000.pt"]


def test_a_state_that_is_written_is_told_even_if_nothing_follows():
    states = WrittenLater()
    stand = Stand(states)
    stand.do(PublishWeights("t", 0))
    assert not stand.trainer.work()
    states.written.set()
    assert stand.trainer.work()
    assert stand.said == [Published("t", 0, 0), Checkpointed("t", 0, 0)]
    assert not stand.trainer.work()


@pytest.mark.parametrize("command", [PublishWeights("t", 4), SaveTrainer("t")])
def test_a_state_that_a_run_may_end_with_is_waited_for(command):
    states = WrittenLater(last=4)
    stand = Stand(states)
    threading.Timer(0.05, states.written.set).start()
    stand.do(command)
    assert stand.said[0] == Checkpointed("t", 0, 0)


def test_one_state_is_written_at_a_time():
    states = WrittenLater()
    stand = Stand(states)
    stand.do(PublishWeights("t", 0))
    threading.Timer(0.05, states.written.set).start()
    stand.do(PublishWeights("t", 1))
    assert [type(said) for said in stand.said] == [Published, Checkpointed, Checkpointed, Published]
    assert states.begun == 2


def test_what_threads_do_is_a_call_under_way_that_supervision_limits():
    states = WrittenLater()
    stand = Stand(states)
    begin = time.monotonic()
    stand.do(PublishWeights("t", 0))
    call, since = stand.trainer.current_call()
    assert call == "save"
    assert begin <= since <= time.monotonic()
    assert stand.trainer.pending_work() == ["t is at a save in the background"]
    states.written.set()
    assert stand.trainer.current_call() == ("", 0.0)
    policy = ToyPolicy()
    channel = SlowWeights(policy)
    stand = Stand(channel=channel, policy=policy, overlap=True)
    stand.trainer.handle(PublishWeights("t", 0))
    assert stand.trainer.work()
    assert stand.trainer.current_call()[0] == "publish"
    assert stand.trainer.pending_work() == ["t is at a publish in the background"]
    channel.go_on.set()
    stand.do()
    stand.trainer.close()
    assert stand.trainer.current_call() == ("", 0.0)
    assert stand.trainer.pending_work() == []


def test_a_save_that_is_asked_for_waits_for_the_update_before_it(tmp_path):
    stand = Stand(TrainerStates(str(tmp_path), every_versions=9))
    stand.do(LEND, SaveTrainer("t"))
    assert stand.said[-2:] == [UpdateDone("t", 0, 0), Checkpointed("t", 0, 1)]
    assert [path.name for path in tmp_path.iterdir()] == ["trainer-00000001.pt"]


class SlowWeights(InlineWeights):
    """Its publication waits until the test lets it go on."""

    def __init__(self, policy):
        super().__init__(layout_of(policy))
        self.begun, self.go_on = threading.Event(), threading.Event()

    def publish(self, version, state):
        self.begun.set()
        assert self.go_on.wait(10)
        super().publish(version, state)


def test_a_version_that_is_published_from_a_copy_may_be_announced_after_the_next_update(tmp_path):
    """The state is there before that update ends; the versions keep their order and their weights."""
    policy = ToyPolicy()
    channel = SlowWeights(policy)
    stand = Stand(TrainerStates(str(tmp_path)), channel=channel, policy=policy, overlap=True)
    before = weights(policy)
    stand.trainer.handle(PublishWeights("t", 1))
    stand.trainer.handle(LEND)
    for _ in range(8):  # the publication begins; six steps, and the end of the update
        assert stand.trainer.work()
    checkpointed, report, done = stand.said
    assert (checkpointed, done) == (Checkpointed("t", 0, 0), UpdateDone("t", 0, 0))
    assert isinstance(report, Report)
    assert channel.newest == -1, "version 1 is not there yet"
    stand.trainer.handle(PublishWeights("t", 2))
    threading.Timer(0.05, channel.go_on.set).start()
    stand.do()
    stand.trainer.close()
    assert stand.said[3:] == [Published("t", 0, 1), Checkpointed("t", 0, 1), Published("t", 0, 2)]
    assert same(channel.read(1)[1], before)
    assert same(channel.read(2)[1], weights(policy))


class Watched(ToyPolicy):
    """Says when it is asked to evaluate."""

    def __init__(self):
        super().__init__()
        self.asked = threading.Event()

    def evaluate(self, obs, forward_inputs):
        self.asked.set()
        return super().evaluate(obs, forward_inputs)


def test_a_publication_overlaps_the_next_update_up_to_its_first_change_of_weights():
    policy = Watched()
    channel = SlowWeights(policy)
    stand = Stand(channel=channel, policy=policy, overlap=True)
    before = weights(policy)
    stand.trainer.handle(PublishWeights("t", 0))
    stand.trainer.handle(LEND)
    assert stand.trainer.work()
    assert channel.begun.wait(10)
    step = threading.Thread(target=stand.trainer.work)
    step.start()
    assert policy.asked.wait(10), "the update's first forward pass runs while the weights are being copied"
    assert same(weights(stand.policy), before)
    assert stand.said == []
    channel.go_on.set()
    step.join()
    assert stand.said == [Published("t", 0, 0)]
    assert same(channel.read()[1], before), "what is published is whole, and of before the step"
    assert not same(weights(stand.policy), before)
    stand.do()
    assert stand.said[-1] == UpdateDone("t", 0, 0)
    stand.trainer.close()


def test_an_update_whose_steps_are_all_skipped_waits_until_the_weights_before_it_are_read():
    """What is published is of the update before, whatever the next update does."""
    policy = ToyPolicy(seed=9)  # not the one that acted, so every ratio is out of bounds
    channel = SlowWeights(policy)
    settings = algorithm(early_stop_ratio=1.05, proximal="behavior")
    stand = Stand(channel=channel, policy=policy, overlap=True, settings=settings)
    before = weights(policy)
    stand.trainer.handle(PublishWeights("t", 0))
    stand.trainer.handle(LEND)
    assert stand.trainer.work()
    assert channel.begun.wait(10)
    update = threading.Thread(target=stand.do)
    update.start()
    while stand.trainer.current_call()[0] != "update" and update.is_alive():
        pass
    update.join(0.2)
    assert stand.said == [], "the update does not end while the weights are being copied"
    assert stand.learner.updates == 0
    channel.go_on.set()
    update.join()
    published, report, done = stand.said
    assert (published, done) == (Published("t", 0, 0), UpdateDone("t", 0, 0))
    assert report.values["train/actor/early_stopped"] == 1.0
    assert same(weights(policy), before)
    stand.do(PublishWeights("t", 1))
    stand.trainer.close()
    assert stand.said[-1] == Published("t", 0, 1)


class BrokenWeights(InlineWeights):
    def publish(self, version, state):
        raise OSError("no memory")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_publication_that_exits_does_not_block_its_station(overlap):
    def leave(_):
        sys.exit("no more")

    with pytest.raises(SystemExit, match="no more"):
        PublicationJob(leave, 1, overlap).wait()


def test_a_background_save_that_exits_is_not_taken_for_saved():
    with pytest.raises(SystemExit, match="no more"):
        BackgroundSaving(partial(sys.exit, "no more")).wait()


@pytest.mark.parametrize("overlap", [False, True])
def test_what_goes_wrong_in_a_publication_is_raised_where_the_station_works(overlap):
    policy = ToyPolicy()
    stand = Stand(channel=BrokenWeights(layout_of(policy)), overlap=overlap)
    with pytest.raises(OSError, match="no memory"):
        stand.do(PublishWeights("t", 0), LEND)
    assert stand.said == []


def test_closing_in_the_middle_of_an_update_leaves_it_uncounted():
    stand = Stand()
    stand.trainer.handle(LEND)
    assert stand.trainer.work()
    assert stand.trainer.pending_work() == ["t has StartUpdate to do"]
    stand.trainer.close()
    assert stand.learner.updates == 0


def test_what_a_trainer_does_not_do_is_refused():
    with pytest.raises(UnfitMessage, match="Serve"):
        Stand().trainer.handle(Serve("t", None))


def test_the_newest_two_states_are_kept_and_another_runs_can_be_taken_over(tmp_path):
    states, learner = TrainerStates(str(tmp_path / "mine"), every_versions=1), Stand().learner
    for updates in (1, 2, 10):
        learner.updates = updates
        states.save(learner).wait()
    assert [states.updates(path) for path in states.paths()] == [2, 10]
    other = TrainerStates(str(tmp_path / "other"), every_versions=1)
    other.reset(states.paths()[0])
    assert [other.updates(path) for path in other.paths()] == [2]
    assert torch.equal(load_state(other.paths()[0])["policy"]["critic.bias"], learner.policy.critic.bias)
    other.reset(None)
    assert other.paths() == []


def test_interpolation_goes_by_the_conductors_versions_not_by_the_number_of_updates():
    """After a restart versions go on while updates are counted anew; a sample's age is in versions."""

    def error(version):
        stand = Stand(settings=algorithm(proximal="interpolate"), policy=ToyPolicy(seed=1))
        stand.do(StartUpdate("t", 0, version, LEND.tickets, LEND.payload_ids, LEND.oldest))
        return stand.said[0].values["train/actor/interpolation_error"]

    # Samples of versions 0 to 2, three, four and two decisions: what is left is 1/age of the whole distance.
    assert error(0) > error(9) > 5 * error(99) > 0


class Streamed(InlineWeights):
    """Notes whether it was given a stream, and the thread in which it was."""

    def publish(self, version, state):
        self.given = (isinstance(state, Mapping), threading.current_thread().name)
        super().publish(version, state)


@pytest.mark.parametrize(
    ("rank", "strategy", "given"),
    [
        (0, "replicate", (True, "publication")),
        (0, "shard", (False, threading.main_thread().name)),
        (1, "replicate", None),
        (1, "shard", None),
    ],
)
def test_rank_0_publishes_and_with_shards_all_take_part_in_the_stations_own_thread(rank, strategy, given, monkeypatch):
    ranks = Ranks(rank, strategy)
    asked = []
    monkeypatch.setattr(ranks, "snapshot", lambda state: (asked.append(name) or (name, state[name]) for name in state))
    policy = ToyPolicy()
    stand = Stand(channel=Streamed(layout_of(policy)), policy=policy, overlap=True, ranks=ranks)
    stand.do(PublishWeights("t", 0))
    stand.trainer.close()
    assert stand.said == [Published("t", 0, 0)], "the process of another rank keeps it to itself"
    assert getattr(stand.channel, "given", None) == given
    assert stand.channel.newest == (0 if given else -1)
    assert bool(asked) == (rank == 0 or strategy == "shard")
    assert not asked or asked == list(policy.state_dict())


@pytest.mark.parametrize("overlap", [False, True])
def test_the_last_publication_is_measured_too(overlap):
    stand = Stand(overlap=overlap)
    stand.trainer.handle(PublishWeights("t", 0))
    spans, limit = [], time.monotonic() + 10
    while not spans and time.monotonic() < limit:
        if stand.trainer.work():
            spans += stand.trainer.spans(0.0, 1.0)
    assert [(span.kind, span.number) for span in spans] == [("publish", 0)]
    assert not stand.trainer.work()


FREE = {"advantage": "grpo", "value": {"coef": 0.0}}
PARTS = (
    replace(LEND, tickets=(0,), payload_ids=("0",), oldest=(0,), more=True),
    replace(LEND, tickets=(1,), payload_ids=("1",), oldest=(0,), more=True),
    replace(LEND, tickets=(2,), payload_ids=("2",), oldest=(0,)),
)


def streamed(states=None, *, more=()):
    """A stand whose updates may come in parts: 3 samples, one step an epoch."""
    stand = Stand(states, settings=algorithm(**FREE))
    train = training(epochs=2, mini_batch_samples=3, minibatch_steps=0, **dict(more))
    stand.learner = Learner(stand.policy, algorithm(**FREE), train, total_updates=4, seed=0)
    channels = Channels(stand.said.append, print, stand.said.append)
    stand.trainer = Trainer("t", 0, Publisher(stand.channel, stand.learner), stand.arena, channels, states)
    return stand


def test_an_update_in_parts_ends_with_the_last_and_says_what_a_whole_one_does():
    whole, stand = streamed(), streamed()
    whole.do(PublishWeights("t", 0), LEND)
    stand.do(PublishWeights("t", 0))
    for part in PARTS:
        assert [type(said) for said in stand.said] == [Published]
        stand.do(part)
    for name, x in weights(whole.policy).items():
        torch.testing.assert_close(weights(stand.policy)[name], x, atol=1e-6, rtol=1e-6)
    one, other = ({k: v for k, v in at.said[1].values.items() if not k.startswith("time/")} for at in (whole, stand))
    assert (one.pop("train/actor/parts"), other.pop("train/actor/parts")) == (1.0, 3.0)
    assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert whole.said[2:] == stand.said[2:] == [UpdateDone("t", 0, 0)]
    for at in (whole, stand):
        statistics = at.trainer.statistics()
        assert (statistics["optimizer_steps"], statistics["updates"]) == (2, 1)


def test_parts_that_came_before_the_first_pass_are_one():
    stand = streamed()
    for part in PARTS:
        stand.trainer.handle(part)
    stand.do(PublishWeights("t", 0))
    (report,) = [said for said in stand.said if isinstance(said, Report)]
    assert report.values["train/actor/parts"] == 1.0


def test_a_trainer_that_waits_for_samples_has_nothing_to_do_and_says_so():
    stand = streamed()
    stand.do(PARTS[0])
    assert not stand.trainer.work()
    assert stand.trainer.current_call()[0] == ""
    assert stand.trainer.pending_work() == ["t waits for samples of an update"]
    stand.trainer.close()


@pytest.mark.parametrize(
    "wrong", [LEND, replace(PARTS[1], update=1), replace(PARTS[1], tickets=(5,)), replace(PARTS[1], payload_ids=("9",))]
)
def test_a_part_that_does_not_continue_the_update_is_refused(wrong):
    stand = streamed()
    stand.do(PARTS[0])
    if wrong is LEND:
        stand.do(*PARTS[1:])
    with pytest.raises(UnfitMessage):
        stand.trainer.handle(wrong)


def test_a_state_is_saved_while_an_update_lacks_samples_and_is_that_before_it(tmp_path):
    states = TrainerStates(str(tmp_path), every_versions=9)
    stand = streamed(states)
    before = weights(stand.policy)
    stand.do(PARTS[0], SaveTrainer("t"))
    assert stand.said == [Checkpointed("t", 0, 0)]
    stand.do(PARTS[1], PARTS[2])
    assert stand.said[-1] == UpdateDone("t", 0, 0)
    assert not same(weights(stand.policy), before)
    (saved,) = tmp_path.glob("**/*.pt")
    assert same(load_state(saved)["policy"], before)


def test_no_state_is_saved_between_the_mini_batches_of_an_update(tmp_path):
    states = TrainerStates(str(tmp_path), every_versions=9)
    stand = Stand(states, settings=algorithm(**FREE, proximal="behavior"))
    train = training(epochs=1, mini_batch_samples=1, require_batches=3, minibatch_steps=0)
    stand.learner = Learner(stand.policy, algorithm(**FREE, proximal="behavior"), train, total_updates=4, seed=0)
    channels = Channels(stand.said.append, print, stand.said.append)
    stand.trainer = Trainer("t", 0, Publisher(stand.channel, stand.learner), stand.arena, channels, states)
    stand.do(PARTS[0], SaveTrainer("t"))
    assert stand.said == []
    stand.do(PARTS[1], PARTS[2])
    assert [type(said) for said in stand.said[1:]] == [UpdateDone, Checkpointed]
