import pytest

from polyrhythm.config.load import load_config
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.pipeline.build import env_settings
from polyrhythm.plugins.planning.cluster import CORES, cluster_settings
from polyrhythm.plugins.planning.costs import mini_batch, update_seconds
from polyrhythm.plugins.planning.from_run import profile_of as profile_of_run
from polyrhythm.plugins.planning.from_run import updated
from polyrhythm.plugins.planning.memory import device_memory, station_memory
from polyrhythm.plugins.planning.profile import (
    Episodes,
    Kind,
    Machine,
    Profile,
    StationProfile,
    Timing,
    Work,
    settings_digest,
)
from polyrhythm.plugins.virtual.clustersim.costs import parse_cost
from polyrhythm.plugins.virtual.simulate import simulate

_GB = 10**9


def recipe(*overrides: str) -> RunConfig:
    return load_config("cartpole", overrides)


def work(*times: tuple[int, float], memory: int = 0) -> Work:
    """Times without spread: (amount, seconds)."""
    return Work(
        timings=tuple(
            Timing(amount=n, count=9, mean_s=s, median_s=s, p90_s=s, p99_s=s, memory=memory) for n, s in times
        )
    )


def profile_of(config: RunConfig, device: str = "cpu", beside: float = 0.0) -> Profile:
    """A chunk step of 2 ms + 0.1 ms a row, a pass of 5 ms up to 64 rows, an update of 1 ms a mini-batch."""
    factors: dict[Kind, float] = {"trainer": beside} if beside else {}
    return Profile(
        recipe=config.name,
        settings=settings_digest(config),
        date="2026-11-28T22:00:00+00:00",
        machine=Machine(cores=4, memory=8 * _GB),
        episodes=Episodes(mean=20, longest=20),
        weights=1000,
        stations={
            "simulator": StationProfile(works={"step": work((1, 2.1e-3), (16, 3.6e-3)), "reset": work((1, 1e-4))}),
            "generator": StationProfile(
                device=device,
                resident=2 * _GB,
                works={"pass": work((1, 5e-3), (64, 5e-3), memory=_GB), "apply": work((1000, 1e-3))},
                beside=factors,
            ),
            "trainer": StationProfile(
                device=device,
                resident=4 * _GB,
                works={"micro_batch": work((64, 1e-3), (256, 4e-3), memory=3 * _GB), "optimizer_step": work((0, 0.0))},
                beside=factors,
            ),
        },
    )


def test_a_lockstep_cycle_takes_step_and_pass() -> None:
    config = recipe(
        "batching.type=lockstep", "rollout.sharding=whole", "freshness.max_lag=0", "freshness.on_update=drain"
    )
    settings = cluster_settings(profile_of(config), config, versions=30)
    summary = simulate(settings)
    cycles = settings.versions * 20  # episodes of 20 steps, all rows together
    update = update_seconds(profile_of(config), config.training, 320)
    expected = cycles * (3.6e-3 + 5e-3) + settings.versions * update
    assert summary["virtual_s"] == pytest.approx(expected, rel=0.05)


def test_an_update_is_targets_passes_and_steps() -> None:
    config = recipe()  # 6 epochs in mini-batches of 256 chunk steps
    found = profile_of(config)
    assert update_seconds(found, config.training, 1024) == pytest.approx(6 * 4 * 4e-3)
    assert update_seconds(found, config.training, 1024, epochs=1) == pytest.approx(4 * 4e-3)
    micro = recipe("training.micro_batch_steps=64").training
    assert update_seconds(found, micro, 1024) == pytest.approx(6 * 4 * 4 * 1e-3)
    assert update_seconds(found, config.training, 1024, ranks=4) == pytest.approx(6 * 16 * 1e-3)


def test_stations_without_a_device_share_the_cores() -> None:
    settings = cluster_settings(profile_of(recipe()), recipe())
    for group in (*settings.simulators, *settings.generators, settings.trainer):
        assert (group.devices, group.occupies) == ((CORES,), 0.25)  # one thread of four cores


@pytest.mark.parametrize(("beside", "share"), [(0.0, 1.0), (1.0, 0.5), (2.0, 1.0), (2.6, 1.0)])
def test_what_stations_take_longer_beside_others_is_shared(beside: float, share: float) -> None:
    config = recipe("placement=colocated")
    settings = cluster_settings(profile_of(config, "cuda", beside), config, devices=1)
    assert settings.generators[0].devices == settings.trainer.devices == (0,)
    assert settings.generators[0].occupies == settings.trainer.occupies == share
    assert settings.simulators[0].devices == (CORES,)  # measured on the CPU


def test_a_device_holds_all_stations_or_the_largest() -> None:
    both, turns = (recipe("placement=colocated", f"placement.sharing={how}") for how in ("share", "lease"))
    assert device_memory(profile_of(both, "cuda"), both, devices=1) == {"cuda:0": (2 + 1 + 4 + 3) * _GB}
    assert device_memory(profile_of(turns, "cuda"), turns, devices=1) == {"cuda:0": (4 + 3) * _GB}
    leased = cluster_settings(profile_of(turns, "cuda"), turns, devices=1)
    assert (leased.sharing, leased.lease.devices, leased.trainer.resident_gb) == ("lease", (0,), 4.0)
    assert simulate(leased)["switches"]["count"] > 0


def test_stations_take_turns_on_a_host_without_devices() -> None:
    config = recipe("placement.sharing=lease")
    settings = cluster_settings(profile_of(config), config)
    assert settings.generators[0].devices == settings.trainer.devices == settings.lease.devices == (CORES,)
    assert settings.simulators[0].devices == ()  # it does not leave
    assert simulate(settings)["switches"]["count"] > 0


@pytest.mark.parametrize(
    ("overrides", "differing"),
    [
        (["policy.hidden=65"], "policy"),
        (["env.max_steps=400"], "env"),
        (["rollout.action_repeat=2"], "env"),
        (["algorithm.loss={type: ppo}", "algorithm.proximal=behavior"], "algorithm"),
    ],
)
def test_a_profile_of_another_recipe_is_refused(overrides: list[str], differing: str) -> None:
    with pytest.raises(ConfigError, match=rf"whose {differing} differs .*polyrhythm profile cartpole"):
        cluster_settings(profile_of(recipe()), recipe(*overrides))


@pytest.mark.parametrize("override", ["rollout.rows=32", "training.epochs=2", "algorithm.gamma=0.5"])
def test_a_profile_is_of_any_amount(override: str) -> None:
    assert simulate(cluster_settings(profile_of(recipe()), recipe(override)))["versions"] == 20


def test_a_station_that_was_not_measured_is_named() -> None:
    whole = profile_of(recipe())
    part = whole.model_copy(update={"stations": {name: x for name, x in whole.stations.items() if name != "trainer"}})
    with pytest.raises(ConfigError, match="lacks micro_batch, optimizer_step of the trainer"):
        cluster_settings(part, recipe())


def test_devices_must_be_there_and_measured() -> None:
    config = recipe("placement=hybrid")
    with pytest.raises(MissingError):
        cluster_settings(profile_of(config, "cuda"), config, devices=1)
    with pytest.raises(ConfigError, match="generator was measured on the CPU"):
        cluster_settings(profile_of(config), config, devices=2)


@pytest.mark.parametrize(
    ("overrides", "chunk_steps", "ranks", "expected"),
    [
        (("minibatch_steps=0", "require_batches=4"), 1024, 1, (256, 1)),
        (("minibatch_steps=0", "require_batches=4"), 256, 4, (64, 1)),
        (("minibatch_steps=256", "require_batches=2"), 256, 1, (128, 1)),
        (("minibatch_steps=256", "micro_batch_steps=64"), 1024, 1, (256, 4)),
        (("minibatch_steps=256", "micro_batch_steps=64"), 256, 4, (64, 1)),
        (("minibatch_steps=64",), 65, 1, (32.5, 1)),  # the learner cuts 33 + 32
        (("minibatch_steps=160",), 160 / 3, 3, (160 / 3, 1)),
    ],
)
def test_mini_batches_are_those_of_the_learner(
    overrides: tuple[str, ...], chunk_steps: float, ranks: int, expected: tuple[float, int]
) -> None:
    training = recipe("training.micro_batch_steps=0", *(f"training.{text}" for text in overrides)).training
    assert mini_batch(training, chunk_steps, ranks) == pytest.approx(expected)


def test_a_runs_micro_batches_are_counted_as_they_are_simulated() -> None:
    """Four optimizer steps of 0.1 s each: a rank's update of 0.4 s is measured and simulated."""
    config = recipe("training.minibatch_steps=0", "training.require_batches=4", "training.epochs=1")
    for ranks in (1, 2):
        line = {"time_s": 1.0, "env/sample_env_steps": 20, "env/sample_chunk_steps": 20}
        line |= {"train/actor/optimizer_steps": 4, "time/actor/passes": 0.4}
        seats = {f"trainer.{rank}": {"device": f"cuda:{rank}"} for rank in range(ranks)}
        found = profile_of_run(config, {"seats": seats}, [line])
        (timing,) = found.stations["trainer"].works["micro_batch"].timings
        assert timing.amount == 20 * config.training.mini_batch_samples / ranks
        assert timing.mean_s == pytest.approx(0.1)
        steps = 20 * config.training.batch_size / ranks
        assert update_seconds(found, config.training, steps, ranks=ranks) == pytest.approx(0.4)


def test_ranks_share_the_memory_of_a_micro_batch() -> None:
    config = recipe("training.micro_batch_steps=0", "training.minibatch_steps=256", "placement.trainer.devices=0-7")
    placed = config.model_copy(update={"rollout": config.rollout.model_copy(update={"generators": 1})})
    own = profile_of(config, "cuda")
    works = {**own.stations["trainer"].works}
    works["micro_batch"] = Work(
        timings=tuple(
            timing.model_copy(update={"memory": timing.amount * _GB // 10}) for timing in works["micro_batch"].timings
        )
    )
    trainer = own.stations["trainer"].model_copy(update={"works": works})
    own = own.model_copy(update={"stations": {**own.stations, "trainer": trainer}})
    one = station_memory(own, placed, env_settings(config).spec())
    eight = station_memory(own, placed, env_settings(config).spec(), 8)
    assert one["trainer"] == 4 * _GB + 256 * _GB // 10
    assert eight["trainer"] == 4 * _GB + 64 * _GB // 10  # 32 and √32 more: the next measured amount is 64
    assert one["generator"] == eight["generator"]


def test_samples_take_the_time_of_their_simulator() -> None:
    config = recipe(
        "batching.type=lockstep", "rollout.sharding=whole", "freshness.max_lag=0", "freshness.on_update=drain"
    )
    settings = cluster_settings(profile_of(config), config, versions=10)
    (simulator,) = settings.simulators
    longer = settings.model_copy(update={"simulators": (simulator.model_copy(update={"sample": parse_cost("3ms")}),)})
    seconds = [simulate(one)["virtual_s"] for one in (settings, longer)]
    assert seconds[1] - seconds[0] == pytest.approx(10 * 16 * 3e-3, rel=0.01)


def test_in_one_thread_passes_wait_for_a_unit_of_work() -> None:
    """The batching's time limit is over before the other slot's step is; so a pass takes both slots' rows only if the
    conductor, as in a run, has its turn after the step."""
    config = recipe("launcher=inline", "batching.max_wait_ms=1")
    settings = cluster_settings(profile_of(config), config)
    rows = [
        simulate(settings.model_copy(update={"sharing": sharing}))["requests"]["rows_per_batch"]
        for sharing in (settings.sharing, "exclusive")
    ]
    assert rows[0] > 14
    assert rows[1] < 12


@pytest.mark.parametrize(("busy", "slower"), [(1.0, 2.0), (0.5, 1.5), (0.1, 1.1)])
def test_a_run_does_not_count_the_slow_down_twice(busy: float, slower: float) -> None:
    """Everything took 1.8 times as long in the run, in which the trainer was busy for this share."""
    config = recipe("training.epochs=1")
    before = profile_of(config, beside=2.0).model_copy(update={"rate": 1e3, "others_cores": 3.0})
    stations = {
        kind: station.model_copy(
            update={
                "works": {name: Work(timings=(work.scaled(1.8).timings[-1],)) for name, work in station.works.items()},
                "beside": {},
            }
        )
        for kind, station in before.stations.items()
    }
    found = before.model_copy(update={"stations": stations, "others_cores": 0.0})
    steps = 20 * config.training.batch_size
    rate = busy * steps / update_seconds(found, config.training, steps)
    after = updated(before, found.model_copy(update={"rate": rate}), config)
    assert after.stations["generator"].works["pass"].seconds(64) == pytest.approx(5e-3 * 1.8 / slower)
    assert after.stations["simulator"].works["step"].seconds(16) == pytest.approx(3.6e-3 * 1.8)  # beside nobody
    assert after.stations["generator"].works["apply"].seconds(1000) == pytest.approx(1.8e-3)
    assert (after.rate, after.others_cores) == (rate, 0.0)
