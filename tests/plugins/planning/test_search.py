"""Algorithm 1 against cases worked out by hand and RLinf's figures; the search against all placements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from tests.long import long
from tests.plugins.planning.profiles import GB, nodes, profile, recipe

from polyrhythm.envs.latency import LatencySettings
from polyrhythm.plugins.planning.arrangement import Arrangement, arranged
from polyrhythm.plugins.planning.graph import Flow, WorkflowGraph
from polyrhythm.plugins.planning.judge import Prediction, predict
from polyrhythm.plugins.planning.problem import problem_of
from polyrhythm.plugins.planning.search import Choices, Schedule, find_schedules, search, varied
from polyrhythm_bench.cases import placements

PAIR = WorkflowGraph(("rollout", "train"), (Flow("samples", "rollout", "train"),))
EMBODIED = WorkflowGraph(
    ("simulator", "generator", "trainer"),
    (
        Flow("requests", "simulator", "generator"),
        Flow("actions", "generator", "simulator"),
        Flow("samples", "simulator", "trainer"),
        Flow("weights", "trainer", "generator", later=True),
    ),
)


@dataclass(frozen=True)
class Fixed:
    """Nodes whose work divides evenly. work: seconds on one device; sizes: bytes; hosted: need no device."""

    work: dict[str, float]
    sizes: dict[str, int]
    switches: float = 0.0
    hosted: tuple[str, ...] = ()
    piece_s: float = 0.0

    def seconds(self, node: str, devices: int, parts: int) -> float:
        return self.work[node] / max(1, devices) + self.piece_s * parts

    def memory(self, node: str, devices: int) -> int:
        del devices
        return self.sizes[node]

    def switch(self, node: str) -> float:
        del node
        return self.switches

    def on_host(self, node: str) -> bool:
        return node in self.hosted


EVEN = Fixed({"rollout": 12.0, "train": 4.0}, {"rollout": 30, "train": 60})


def seats(one: Schedule) -> dict[str, tuple[int, int]]:
    return dict(one.seats)


def test_one_device_is_shared_if_both_fit_and_taken_in_turn_if_not() -> None:
    assert find_schedules(PAIR, 1, EVEN)[0].seconds == 16
    assert not find_schedules(PAIR, 1, EVEN, room=90)[0].turns
    (one,) = find_schedules(PAIR, 1, replace(EVEN, switches=1.0), room=80)
    assert (one.turns, one.seconds, one.memory) == (True, 18.0, (60,))
    assert find_schedules(PAIR, 1, EVEN, room=50) == []


def test_a_pipeline_is_as_slow_as_its_slowest_part_and_its_warm_up() -> None:
    """On 3 and 1 of 4 devices both take 4 s; in 32 pieces the warm-up is an eighth of a second."""
    best = find_schedules(PAIR, 4, replace(EVEN, switches=1.0), room=80, pieces=32)[0]
    assert seats(best) == {"rollout": (0, 3), "train": (3, 1)}
    assert best.seconds == pytest.approx(4 + 4 / 32)
    assert best.parts == 32
    ahead = find_schedules(PAIR, 4, EVEN, room=80, pieces=1, ahead=1.0)[0]
    assert ahead.seconds == 4  # 8 s over two versions, or all in turn without a switch
    whole = find_schedules(PAIR, 4, replace(EVEN, switches=3.0), room=80, pieces=1)[0]
    assert (whole.turns, whole.seconds) == (False, 8)  # turns would take 4 s and 2 of 3 s
    assert find_schedules(PAIR, 4, replace(EVEN, switches=0.5), room=80, pieces=1)[0].turns


def test_pieces_that_cost_more_are_fewer() -> None:
    best = find_schedules(PAIR, 4, replace(EVEN, piece_s=0.1), room=80)[0]
    assert best.parts < 32
    assert best.seconds > 4


def test_a_part_on_the_hosts_leaves_all_devices_to_the_other() -> None:
    best = find_schedules(PAIR, 4, replace(EVEN, hosted=("rollout",)), ahead=1.0)[0]
    assert seats(best) == {"rollout": (0, 0), "train": (0, 4)}
    assert best.seconds == 12


def test_many_devices_are_cut_at_few_places() -> None:
    found = find_schedules(EMBODIED, 256, Fixed(dict.fromkeys(EMBODIED.nodes, 64.0), dict.fromkeys(EMBODIED.nodes, 1)))
    assert found[0].seconds <= 0.75 * 1.01


# ------------------------------------------------------------ RLinf, figures 3 and 9


@dataclass(frozen=True)
class Rlinf:
    """RLinf's profile in words (section 2.2): a simulator's time hardly grows with its environments, its memory does;
    generation is linear in both; training takes a third of generation's time and most of a device. Seconds of 80 chunk
    steps of 256 environments."""

    on_gpu: bool
    rows: int = 256

    def seconds(self, node: str, devices: int, parts: int) -> float:
        if node == "simulator":
            envs = self.rows / max(1, devices) / parts
            return 80 * parts * (0.15 + 0.0002 * envs) if self.on_gpu else 80 * 0.9
        generation = 80 * 0.01 * self.rows / devices
        return generation if node == "generator" else generation / 3

    def memory(self, node: str, devices: int) -> int:
        rows = self.rows / max(1, devices)
        sizes = {"simulator": 12 + 0.5 * rows, "generator": 30 + rows, "trainer": 70}
        return round(sizes[node])

    def switch(self, node: str) -> float:
        del node
        return 1.0

    def on_host(self, node: str) -> bool:
        return node == "simulator" and not self.on_gpu


def test_hybrid_wins_on_maniskill() -> None:
    """Simulators and generators beside each other, the trainer on all devices in turn."""
    best = find_schedules(EMBODIED, 8, Rlinf(on_gpu=True), room=80, pieces=1)[0]
    simulates, generates, trains = (seats(best)[node] for node in EMBODIED.nodes)
    assert best.turns
    assert trains == (0, 8)
    assert simulates[1] + generates[1] == 8
    assert simulates[1] < generates[1] < 8
    roomy = find_schedules(EMBODIED, 8, Rlinf(on_gpu=True), pieces=1, kept=30)
    colocated = min(one.seconds for one in roomy if seats(one)["simulator"] == seats(one)["generator"] == (0, 8))
    apart = min(one.seconds for one in roomy if seats(one)["trainer"][1] < 8)
    assert roomy[0].seconds < colocated  # even if memory were no limit
    assert roomy[0].seconds < apart


def test_colocated_wins_on_libero() -> None:
    """Simulators on the CPU limit rollout: generator and trainer have all devices, one after the other."""
    best = find_schedules(EMBODIED, 8, Rlinf(on_gpu=False), room=80, pieces=1)[0]
    assert seats(best) == {"simulator": (0, 0), "generator": (0, 8), "trainer": (0, 8)}


class Leaving(LatencySettings):
    """Simulators that can leave their device, as ManiSkill's can."""

    leaves_device: ClassVar[bool] = True


@long(3, "three modes on eight devices")
def test_the_judge_agrees_with_both_figures() -> None:
    """RLinf's three modes on 8 devices, on-policy, by the real scheduler: a pass of 32 rows at a time."""
    config = recipe(
        "freshness.max_lag=0",
        "freshness.on_update=drain",
        "training.streaming=false",
        "training.mini_batch_samples=256",
        "training.minibatch_steps=0",
        "rollout.simulators=8",
        "rollout.rows=32",
        "batching.max_rows=32",
    )
    config = config.model_copy(update={"env": Leaving.model_validate(config.env.model_dump())})
    everything = tuple(range(8))
    colocated = Arrangement(8, 8, 1, 32, 1, 32, micro_batch=32, sharing="lease")
    colocated = replace(colocated, generator_devices=everything, trainer_devices=everything)

    def judged(
        one: Arrangement, simulators_on: str, step: float, simulator_gb: float = 0.0, working_gb: float = 32
    ) -> Prediction:
        own = profile(
            config,
            simulators_on=simulators_on,
            step=((1, step), (128, 1.2 * step, simulator_gb * GB)),
            passes=((1, 0.01, GB), (32, 0.32, working_gb * GB)),
            micro_batch=((32, 32 * 0.01 / 3, working_gb * GB), (4096, 4096 * 0.01 / 3, working_gb * GB)),
            chunk_steps=64 if simulators_on == "cuda" else 16,
            fixed=0.05,
            weights=GB,
        )
        return predict(own, arranged(config, one), nodes(8))

    beside = replace(colocated, simulators=4, env_batches=2, generators=4)
    maniskill = {
        "colocated": replace(colocated, simulator_devices=everything),
        "hybrid": replace(beside, simulator_devices=(0, 1, 2, 3), generator_devices=(4, 5, 6, 7)),
    }
    maniskill["apart"] = replace(
        maniskill["hybrid"], sharing="share", generators=2, generator_devices=(4, 5), trainer_devices=(6, 7)
    )
    found = {name: judged(one, "cuda", 0.15, simulator_gb=42) for name, one in maniskill.items()}
    together = judged(replace(maniskill["colocated"], sharing="share"), "cuda", 0.15, simulator_gb=42)
    assert "would hold" in together.over  # figure 3: simulators and generation do not fit, so they would take turns
    assert not found["hybrid"].over
    assert not found["apart"].over
    assert found["hybrid"].samples_per_s > 1.2 * found["colocated"].samples_per_s
    assert found["hybrid"].samples_per_s > 1.2 * found["apart"].samples_per_s
    same = replace(colocated, sharing="share")  # no simulator on the devices: both others fit there
    libero = {
        "colocated": same,
        "hybrid": replace(same, generators=6, generator_devices=everything[2:]),
        "apart": replace(same, generators=6, generator_devices=everything[:6], trainer_devices=(6, 7)),
    }
    rates = {name: judged(one, "cpu", 0.9, working_gb=4).samples_per_s for name, one in libero.items()}
    assert max(rates, key=rates.__getitem__) == "colocated"
    assert rates["colocated"] / rates["apart"] > 1.1


# ------------------------------------------------------------ the whole search


def test_the_best_is_found_among_neighbours() -> None:
    start = Arrangement(1, 1, 1, 8, generator_devices=(0,), trainer_devices=(1,))
    choices = Choices(env_batches=(1, 2, 4, 8), slots=(1, 2), max_rows=(8, 16, 32, 64))
    target = replace(start, env_batches=4, rows=2, max_rows=16)

    def rates(those: Sequence[Arrangement]) -> list[float]:
        return [-abs(math.log2(one.env_batches / 4)) - abs(math.log2(one.max_rows / 16)) - one.slots for one in those]

    (best, _), *rest = search([start], choices, rates, float, most=40)
    assert best == target
    assert len(rest) < 40
    few = search([start], choices, rates, float, most=3)
    assert len(few) == 3
    assert search([start], choices, lambda those: [None] * len(those), float) == []


def test_the_first_judged_have_different_seats() -> None:
    one = Arrangement(1, 1, 1, 8)
    same = [replace(one, max_rows=rows) for rows in (8, 16, 32)]
    other = replace(one, generator_devices=(0,))
    assert varied([*same, other], 2) == [same[0], other]
    assert varied([*same, other], 3) == [same[0], other, same[1]]


@pytest.mark.parametrize("seed", [*(pytest.param(seed, marks=long(5, "another problem")) for seed in (1, 11)), 13])
def test_little_is_missed_of_the_best_of_all(seed: int) -> None:
    """Of 60 seeds: bench/results/plan.md."""
    problem = placements.problem(seed)
    rate = problem.solve()[0].prediction.samples_per_s
    found = problem.judge(list(problem.everything()))
    assert 1 - rate / max(one.samples_per_s for one in found if one is not None) <= placements.LIMITS[1]


def test_divisions_of_equal_devices() -> None:
    assert len(list(placements.divisions(1, simulators=False))) == 1
    assert len(list(placements.divisions(2, simulators=False))) == 5


def test_memory_rules_out_before_judging() -> None:
    config = recipe("training.micro_batch_steps=8")
    problem = problem_of(profile(config), config, nodes(1))
    assert all(problem.judge([one for one in problem.proposals()[:4] if one.sharing != "lease"]))
    tight = profile(config).model_copy(
        update={"machine": profile(config).machine.model_copy(update={"device_memory": 52 * GB})}
    )
    found = problem_of(tight, config, nodes(1)).solve(first=2, most=2)
    assert {one.arrangement.sharing for one in found} == {"lease"}
