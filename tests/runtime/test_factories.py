"""Factories as plain data: what is packed in one process is the same factory in another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.pipeline.runs import config

from polyrhythm.pipeline.array_specs import env_batch_infos, shown, step_settings
from polyrhythm.runtime.factories import StationContext, StationFactory, pack, unpack
from polyrhythm.runtime.memory.arena import ArenaLayout, in_memory
from polyrhythm.runtime.memory.process_memory import ProcessMemory
from polyrhythm.runtime.memory.weights import InlineWeights
from polyrhythm.runtime.messages import Channels
from polyrhythm.specs import WeightsLayout
from polyrhythm.stations.generator_factory import GeneratorFactory, PolicyFactory
from polyrhythm.stations.simulator.station import SimulatorFactory
from polyrhythm.stations.trainer_factory import TrainerFactory
from polyrhythm.stations.trainer_states import TrainerStates

RUN = config(rollout={"env_batches": 2, "sharding": "even:2", "generators": 2}, algorithm={"entropy_coef": 0.01})
SPEC = RUN.env.spec()  # type: ignore[attr-defined]


def factories() -> list[StationFactory]:
    policy = PolicyFactory(RUN.policy.model_dump(mode="json"), SPEC, 3)
    infos = env_batch_infos(RUN, SPEC)[0]
    algorithm, training = (section.model_dump(mode="json") for section in (RUN.algorithm, RUN.training))
    return [
        SimulatorFactory("s", RUN.env.model_dump(mode="json"), SPEC, 6, tuple(infos), step_settings(RUN, 1)),
        GeneratorFactory("g", policy, "too", (4, 8)),
        GeneratorFactory("g", policy, places=5, resumes=True),
        TrainerFactory("t", policy, algorithm, training, 6, TrainerStates("folder", 2)),
        TrainerFactory("t", policy, algorithm, training, 6, None),
    ]


@pytest.mark.parametrize("factory", factories(), ids=lambda factory: type(factory).__name__)
def test_a_factory_comes_out_as_it_was_packed(factory: StationFactory) -> None:
    kind, content = pack(factory)
    assert kind == f"{type(factory).__module__}:{type(factory).__name__}"
    assert unpack(kind, content) == factory


def test_a_simulator_has_a_part_for_each_env_batch_with_an_address_of_its_own() -> None:
    simulator, layout = factories()[0], ArenaLayout(1, 1, 1, {}, {}, {})
    context = StationContext(
        in_memory(layout), lambda: InlineWeights(WeightsLayout.of({})), Channels(print, print, print)
    )
    assert [address for address, _ in simulator.parts(context, incarnation=4)] == ["s.4.0", "s.4.1"]


@pytest.mark.parametrize(
    ("lenders", "seat", "lent"),
    [(("sim:0",), "sim:0", True), (("sim:0",), "sim:1", False), (("cpu", "sim:1"), "sim:1", True), ((), "cpu", False)],
)
def test_a_rank_without_a_lender_on_its_device_makes_no_pool(
    lenders: tuple[str, ...], seat: str, lent: bool, tmp_path: Path
) -> None:
    layout, published = ArenaLayout(1, 1, 1, {}, {}, {}), WeightsLayout.of({})
    context = StationContext(
        in_memory(layout),
        lambda: InlineWeights(published),
        Channels(print, print, print),
        memory=ProcessMemory(layout, published, tmp_path),
        seat=seat,
    )
    trainer = factories()[-1]
    assert isinstance(trainer, TrainerFactory)
    assert replace(trainer, lenders=lenders).is_lent_to(context) is lent


@pytest.mark.parametrize("leases", [False, True])
def test_only_a_simulator_that_stays_on_its_device_shows_observations_there(leases: bool, tmp_path: Path) -> None:
    run = config(env={"type": "tests.process.tensor_env:LeavingTensorSettings", "id": "CartPole-v1", "max_steps": 9})
    spec = run.env.spec()  # type: ignore[attr-defined]
    infos = tuple(env_batch_infos(run, spec)[0])
    factory = SimulatorFactory("s", run.env.model_dump(mode="json"), spec, 6, infos, step_settings(run, 1))
    layout, published = ArenaLayout(1, 1, 1, shown(spec), {}, {}), WeightsLayout.of({})
    context = StationContext(
        in_memory(layout),
        lambda: InlineWeights(published),
        Channels(print, print, print),
        announced=leases,
        memory=ProcessMemory(layout, published, tmp_path),
        seat="sim:0",
    )
    stations = [make() for _, make in factory.parts(context, incarnation=0)]
    assert len(list(tmp_path.rglob("block"))) == (0 if leases else sum(len(info.slots) for info in infos))
    for station in stations:
        station.close()
    assert not list(tmp_path.rglob("block"))
