import pytest
from tests.plugins.planning.test_cluster import profile_of

from polyrhythm.config.load import load_config
from polyrhythm.plugins.planning.together import UnitTimer, seen_episodes, unit_timer, with_run
from polyrhythm.runtime.messages import Report
from polyrhythm.scheduler import records
from polyrhythm.scheduler.records import SampleEnd

CONFIG = load_config("cartpole")  # a slot of 8 rows steps in 2.8 ms alone, a pass takes 5 ms
STEP_S, PASS_S = 2.8e-3, 5e-3


def request(slot: str, sequence: int) -> records.Request:
    return records.Request(slot, "simulator-0", sequence, 8, 0, "", 0.0)


def cycles(timer: UnitTimer, now: float, count: int, *, longer: float, handover: float = 1e-3) -> None:
    """Passes for both slots of one env batch, which step one after the other. longer: factor of all times."""
    slots = ("simulator-0.0/0", "simulator-0.0/1")
    for number in range(count):
        batch = records.Batch(number, "generator-0", tuple(request(slot, number) for slot in slots))
        wake, done = records.Wake(), records.BatchDone("generator-0", 0, number, 0)
        timer.on_decision(now, wake, [records.Serve("generator-0", batch)])
        now += longer * (PASS_S + handover)
        timer.on_decision(now, done, [])
        for slot in slots:
            now += longer * STEP_S
            after = longer * handover * (slot == slots[0])
            arrived = records.RequestArrived("simulator-0", 0, slot, number, 8, 0, "", evaluation=False)
            timer.on_decision(now + after, arrived, [])


def test_what_a_run_adds_is_the_handover() -> None:
    profile = profile_of(CONFIG)
    timer = unit_timer(profile)
    cycles(timer, 2.0, 20, longer=1.0)
    found = with_run(profile, CONFIG, timer)
    assert found.stations["generator"].works["handover"].seconds(0) == pytest.approx(1e-3)
    assert found.stations["simulator"].works["handover"].seconds(0) == pytest.approx(0.0, abs=1e-6)  # the lower half
    assert "generator: beside the trainer" in " ".join(found.left_out)


def test_what_takes_longer_during_updates_is_beside_the_trainer() -> None:
    profile = profile_of(CONFIG)
    timer = unit_timer(profile)
    cycles(timer, 0.0, 20, longer=1.0)
    timer.on_decision(1.0, records.Wake(), [records.StartUpdate("trainer", 0, 0, (1,), ("1",))])
    cycles(timer, 1.0, 20, longer=1.5)
    timer.on_decision(2.0, records.UpdateDone("trainer", 0, 0), [])
    cycles(timer, 2.0, 20, longer=1.0)
    found = with_run(profile, CONFIG, timer)
    assert found.stations["generator"].beside["trainer"] == pytest.approx(1.5)


def test_the_trainers_level_is_by_its_cpu_time() -> None:
    profile = profile_of(CONFIG)
    spent = iter([0.5 * number for number in range(8)])  # seconds an update, which take 6 x 4 ms alone
    timer = unit_timer(profile)
    timer.trainer_cpu_s = lambda: next(spent)
    values = {"env/sample_chunk_steps": 16.0, "train/actor/optimizer_steps": 6.0, "time/actor/passes": 1.0}
    for number in range(8):
        timer.on_report(float(number), Report("trainer", 0, "update", number, values))
    trainer = with_run(profile, CONFIG, timer).stations["trainer"]
    assert trainer.works["micro_batch"].seconds(256) == pytest.approx(4e-3 * 0.5 / 24e-3)
    assert trainer.beside["generator"] == pytest.approx(2.0)  # a second each


@pytest.mark.parametrize(("ends", "mean"), [("TT", 20), ("ST", 40), ("SS", 20), ("SSST", 80)])
def test_segments_count_for_their_episode(ends: str, mean: float) -> None:
    names = {"T": SampleEnd.TERMINATED, "S": SampleEnd.SEGMENT}
    samples = [records.SampleFinished("simulator-0", 0, 1, 0, "", names[end], 20, 20, 0, 0, None, 0.0) for end in ends]
    before = profile_of(CONFIG).episodes.model_copy(update={"longest": 500})
    assert seen_episodes(before, samples).mean == mean


@pytest.mark.parametrize("last", [0.0, 0.2])
def test_a_trainer_that_was_restarted_has_no_level(last: float) -> None:
    profile = profile_of(CONFIG)
    spent = iter([1.0 + 0.5 * number for number in range(7)] + [last])
    timer = unit_timer(profile)
    timer.trainer_cpu_s = lambda: next(spent)
    values = {"env/sample_chunk_steps": 16.0, "train/actor/optimizer_steps": 6.0, "time/actor/passes": 1.0}
    for number in range(8):
        timer.on_report(float(number), Report("trainer", 0, "update", number, values))
    trainer = with_run(profile, CONFIG, timer).stations["trainer"]
    assert trainer.works["micro_batch"] == profile.stations["trainer"].works["micro_batch"]
