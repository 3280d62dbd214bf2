import pytest
from tests.plugins.planning.test_cluster import profile_of, work

from polyrhythm.conductors import build_conductor
from polyrhythm.config.load import load_config
from polyrhythm.config.schema import RunConfig
from polyrhythm.plugins.planning.cluster import cluster_settings
from polyrhythm.plugins.planning.profile import Profile, Work, WorkName
from polyrhythm.plugins.planning.timers import Rounds, Unit, UnitTimer, longer_than_alone
from polyrhythm.plugins.planning.together import seen_episodes, unit_timer, with_run
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.simulate import simulate
from polyrhythm.runtime.messages import Report
from polyrhythm.scheduler import records
from polyrhythm.scheduler.records import SampleEnd

CONFIG = load_config("cartpole")  # a slot of 8 rows steps in 2.8 ms alone, a pass takes 5 ms
STEP_S, PASS_S = 2.8e-3, 5e-3
TICKET = records.Ticket(0, 0, 0, 0, 0, 0, 0)


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
    assert found.stations["simulator"].works["handover"].seconds(0) == pytest.approx(0.0, abs=1e-6)  # beside a step
    assert "generator: beside the trainer" in " ".join(found.left_out)


@pytest.mark.parametrize(
    ("trains", "counts"), [(True, "in an update, 0 without"), (False, "0 units of its work in an")]
)
def test_what_a_run_had_too_few_units_of_is_said(trains: bool, counts: str) -> None:
    timer = unit_timer(profile_of(CONFIG))
    if trains:
        timer.on_decision(0.0, records.Wake(), [records.StartUpdate("trainer", 0, 0, (1,), ("1",))])
    cycles(timer, 0.0, 20, longer=1.0)
    found = with_run(profile_of(CONFIG), CONFIG, timer)
    (sentence,) = (one for one in found.left_out if one.startswith("generator: beside the trainer"))
    assert counts in sentence


def test_samples_are_told_from_steps() -> None:
    units = [Unit(1e-3 + 2e-4 * n + 5e-4, 1e-3, samples=n) for n in (0, 3, 1, 0, 2)]
    assert longer_than_alone(units) == pytest.approx((5e-4, 2e-4))
    assert longer_than_alone([*units, Unit(2e-3, 1e-3)]).unit_s > 5e-4  # the sum stays
    assert longer_than_alone([Unit(1.0, 2.0), Unit(1.0, 2.0, samples=1)]) == (0.0, 0.0)


def measured_again(profile: Profile, config: RunConfig) -> Profile:
    """The profile whose handovers are measured in the cluster that is simulated with it."""
    works: dict[WorkName, Work]
    bare, longer = dict(profile.stations), ("handover", "sample")
    for kind, station in profile.stations.items():
        works = {name: own for name, own in station.works.items() if name not in longer}
        bare[kind] = station.model_copy(update={"works": works})
    alone = profile.model_copy(update={"stations": bare})
    timer, settings = unit_timer(alone), cluster_settings(profile, config, versions=40)
    conductor = build_conductor(settings.scheduler)
    cluster = VirtualCluster(settings, conductor)
    cluster.driver.observer = timer.on_decision
    cluster.run()
    return with_run(alone, config, timer)


@pytest.mark.parametrize("mean", [10, 60])
def test_a_profile_of_a_simulated_run_is_its_own(mean: int) -> None:
    """Whatever the length of episodes, the handovers are those of the run, and the rate too; what samples take hides
    behind passes here."""
    profile = profile_of(CONFIG)
    added: dict[str, dict[WorkName, Work]] = {
        "simulator": {"handover": work((0, 1e-3)), "sample": work((1, 1e-3))},
        "generator": {"handover": work((0, 2e-3))},
    }
    stations = {
        kind: own.model_copy(update={"works": {**own.works, **added.get(kind, {})}})
        for kind, own in profile.stations.items()
    }
    update = {
        "stations": stations,
        "episodes": profile.episodes.model_copy(update={"mean": mean, "deviation": mean / 2, "longest": 500}),
        "machine": profile.machine.model_copy(update={"cores": 64}),
    }
    run = profile.model_copy(update=update)
    found = measured_again(run, CONFIG)
    assert found.episodes.mean == pytest.approx(mean, rel=0.2)
    for kind, names in added.items():
        own, again = names["handover"], found.stations[kind].works["handover"]
        assert again.seconds(0) == pytest.approx(own.seconds(0), rel=0.15)
    rates = [simulate(cluster_settings(one, CONFIG))["throughput"]["transitions_per_s"] for one in (run, found)]
    assert rates[1] == pytest.approx(rates[0], rel=0.05)


def test_a_round_of_one_thread_is_without_the_trainers_work_and_idle_time() -> None:
    """Each round: an update of 3 ms, idle until the batching's time limit of 1 ms, a pass of 5 ms and a step of 2.8 ms,
    with a handover of 0.5 ms each, and 0.2 ms for a sample in every other round."""
    profile, busy, now = profile_of(CONFIG), [0.0, 0.0], 0.0
    timer = unit_timer(profile)
    assert timer.pass_s is not None
    alone = (timer.step_s, timer.pass_s, timer.reset_s, 0.0)
    rounds = timer.rounds = Rounds(*alone, lambda: (busy[0], busy[1]), lambda: 0.0)
    for number in range(20):
        own = request("simulator-0.0/0", number)
        sample = 0.2e-3 * (number % 2)
        now, busy[:] = now + 4e-3, [busy[0] + 3e-3, busy[1] + 3e-3]
        batch = records.Batch(number, "generator-0", (own,))
        timer.on_decision(now, records.Wake(), [records.Serve("generator-0", batch)])
        now, busy[1] = now + PASS_S + 0.5e-3, busy[1] + PASS_S
        timer.on_decision(now, records.BatchDone("generator-0", 0, number, 0), [])
        now, busy[1] = now + STEP_S + 0.5e-3 + sample, busy[1] + STEP_S
        arrived = records.RequestArrived("simulator-0", 0, own.slot, number, 8, 0, "", evaluation=False)
        grants = (records.Grant(0, TICKET, resume=True),) * (number % 2)
        timer.on_decision(now, arrived, [records.StartRows("simulator-0", own.slot, grants)] if grants else [])
    assert longer_than_alone(rounds.found) == pytest.approx((0.5e-3, 0.2e-3), rel=0.01)
    assert rounds.trained_s == pytest.approx(19 * 3e-3)


def test_a_slot_that_waits_for_samples_is_not_measured() -> None:
    timer, slot = unit_timer(profile_of(CONFIG)), "simulator-0.0/0"
    batch = records.Batch(0, "generator-0", (request(slot, 0),))
    grant = records.StartRows("simulator-0", slot, (records.Grant(0, TICKET, resume=True),))
    timer.on_decision(0.0, records.Wake(), [records.Serve("generator-0", batch)])
    timer.on_decision(1.0, records.BatchDone("generator-0", 0, 0, 0), [])
    timer.on_decision(9.0, records.UpdateDone("trainer", 0, 0), [grant])
    timer.on_decision(9.1, records.RequestArrived("simulator-0", 0, slot, 0, 8, 0, "", evaluation=False), [])
    assert not timer.steps


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
    timer.trainer_s = lambda: next(spent)
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
    timer.trainer_s = lambda: next(spent)
    values = {"env/sample_chunk_steps": 16.0, "train/actor/optimizer_steps": 6.0, "time/actor/passes": 1.0}
    for number in range(8):
        timer.on_report(float(number), Report("trainer", 0, "update", number, values))
    trainer = with_run(profile, CONFIG, timer).stations["trainer"]
    assert trainer.works["micro_batch"] == profile.stations["trainer"].works["micro_batch"]
