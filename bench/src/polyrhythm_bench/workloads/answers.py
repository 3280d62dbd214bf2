"""A scene of language: engines that sleep answer prompts in tokens, once for live processes and the simulated cluster.

Devices are a pool. Where training waits for rollout both have all of them in turn: as many generators as devices, and
an update by all. Where they overlap some devices generate, and the others train for as much longer.
"""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

from polyrhythm.config.base import Count, Section, Whole
from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster, summarise
from polyrhythm.plugins.virtual.clustersim.costs import Count as TokenCount
from polyrhythm.plugins.virtual.clustersim.costs import parse_cost, parse_count
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.specs.distributions import Distribution
from polyrhythm_bench.workloads.answers_env import Share
from polyrhythm_bench.workloads.scene import Publications
from polyrhythm_bench.workloads.sleeping_engine import LONGEST

#: Versions before counting begins.
_WARM_UP = 5


#: Draws of which the mean of a cut distribution is taken.
_DRAWS = 20_000


class CutDistribution(NamedTuple):
    """A distribution whose draws are at most `longest`. mean: drawn, nearly the expected value."""

    distribution: Distribution
    longest: float

    @property
    def mean(self) -> float:
        rng = random.Random(0)
        return sum(self.sample(rng) for _ in range(_DRAWS)) / _DRAWS

    def sample(self, rng: random.Random) -> float:
        return min(self.longest, self.distribution.sample(rng))


def cut_at(longest: int, tokens: str) -> TokenCount:
    """The distribution of an answer's length, cut."""
    return TokenCount(CutDistribution(parse_count(tokens).distribution, longest))


class AnswerMode(NamedTuple):
    """streams: an answer begins where there is a place for it, else nothing before the longest has ended. replicated:
    the answers to a prompt are requests of their own. max_lag: versions; on_update: as in `freshness`."""

    streams: bool
    replicated: bool = False
    max_lag: float = 0.0
    on_update: Literal["drain", "continue", "abort"] = "drain"

    @property
    def overlaps(self) -> bool:
        """Whether training and rollout overlap."""
        return self.max_lag > 0


#: The mechanisms of ROLL Flash, one more each.
MODES: dict[str, AnswerMode] = {
    "lockstep": AnswerMode(streams=False),
    "queue": AnswerMode(streams=True),
    "replicated": AnswerMode(streams=True, replicated=True),
    "alpha_1_continue": AnswerMode(True, True, 1.0, "continue"),
    "alpha_1_abort": AnswerMode(True, True, 1.0, "abort"),
    "alpha_2_continue": AnswerMode(True, True, 2.0, "continue"),
    "alpha_2_abort": AnswerMode(True, True, 2.0, "abort"),
}


#: Mean returns of groups that are trained on: neither all fail nor all succeed.
_FILTER = {"min_return": 0.01, "max_return": 0.99}


class AnswerScene(Section):
    """Prompts with `group` answers each; an update takes `prompts` of them."""

    prompts: Count = 8
    """Prompts of an update."""
    group: Count = 8
    """Answers to each."""
    devices: Count = 8
    """Devices of the pool."""
    training_devices: Count = 5
    """Those that train where training overlaps with rollout."""
    per_station: Count = 1
    """Devices that generate as one station: it has their places, and a step takes as long as on one of them, which has
    its share of the answers."""
    places: Count = 32
    """Answers of a device at a time."""
    tokens: str = "lognormal:60steps:1.0"
    """Distribution of an answer's length."""
    longest: Count = LONGEST
    """Tokens at which an answer is cut."""
    same_tokens: Share = 0.0
    """Share of the answers to a prompt that are equally long; simulated alone."""
    prefill: str = "2ms"
    """Cost of reading prompts, by their number."""
    decode: str = "5ms+0.05ms"
    """Cost of a decode step, by the answers under way."""
    context: str = "0ms"
    """What a decode step costs more for each token of the answers under way; simulated alone."""
    update_ms: Count = 1400
    """Milliseconds of an update by all devices."""
    solved: Share = 0.0
    """Share of prompts of which every answer succeeds; they teach nothing, and are replaced."""
    hopeless: Share = 0.0
    """Share of prompts of which none does."""
    extra_prompts: Whole = 0
    """Prompts beside those that an update needs, wherever answers are queued."""
    seed: int = 0
    """Seed of the run."""

    @property
    def mean_tokens(self) -> float:
        """Mean length of an answer."""
        return cut_at(self.longest, self.tokens).distribution.mean

    @property
    def samples(self) -> int:
        """Answers of an update."""
        return self.prompts * self.group

    def generators(self, mode: AnswerMode) -> int:
        """Generator stations."""
        return (self.devices - self.training_devices if mode.overlaps else self.devices) // self.per_station

    def cost_of(self, text: str) -> str:
        """The cost at a station that stands for several devices, each of which has its share of the answers."""
        cost = parse_cost(text)
        return text if self.per_station == 1 else f"{cost.base.mean}s+{cost.per_unit / self.per_station:.9f}s"

    @property
    def station_places(self) -> int:
        """Answers of a generator station at a time."""
        return self.places * self.per_station

    def update(self, mode: AnswerMode) -> str:
        """Time of an update."""
        share = self.training_devices / self.devices if mode.overlaps else 1.0
        return f"{self.update_ms / share:.1f}ms"

    def answers(self, mode: AnswerMode) -> int:
        """Answers under way or waiting for an update, at most: as many as the lag allows, and those of extra
        prompts."""
        return round(self.samples * (1 + mode.max_lag)) + self.extra_for(mode) * self.group

    def extra_for(self, mode: AnswerMode) -> int:
        """Extra prompts of this mode."""
        return self.extra_prompts if mode.streams else 0

    @property
    def filtered(self) -> bool:
        """Whether prompts are replaced whose answers all succeed or fail."""
        return self.solved + self.hopeless > 0


def live(scene: AnswerScene, mode: AnswerMode, versions: int) -> RunConfig:
    """The scene as a run of real processes that sleep."""
    assert not scene.same_tokens, "an engine knows no prompts"
    assert scene.context == "0ms", "a sleeping engine knows no contexts"
    rows = 1 if mode.replicated else scene.group
    return validate(
        {
            "name": "answers",
            "seed": scene.seed,
            "env": {
                "type": "polyrhythm_bench.workloads.answers_env:AnswersEnvSettings",
                "solved": scene.solved,
                "hopeless": scene.hopeless,
            },
            "policy": {
                "type": "polyrhythm_bench.workloads.sleeping_engine:SleepingLmSettings",
                "policy": {"type": "gaussian"},
                "tokens": scene.tokens,
                "longest": scene.longest,
                "prefill": scene.cost_of(scene.prefill),
                "decode": scene.cost_of(scene.decode),
                "evaluate": scene.update(mode),
            },
            "rollout": {
                "rows": scene.answers(mode),
                "sharding": f"even:{scene.answers(mode) // rows}",
                "generators": scene.generators(mode),
            },
            "batching": {"type": "streams", "max_rows": scene.station_places} if mode.streams else {"type": "lockstep"},
            "groups": {
                "size": scene.group,
                "extra_groups": scene.extra_for(mode),
                **(_FILTER if scene.filtered else {}),
            },
            "freshness": {"max_lag": mode.max_lag, "on_update": mode.on_update},
            # One pass over all samples at once, and none before it, so that the update sleeps once.
            "training": {"versions": versions, "mini_batch_samples": scene.samples, "epochs": 1, "minibatch_steps": 0},
            "algorithm": {"proximal": "behavior"},
        }
    )


def cluster(scene: AnswerScene, mode: AnswerMode, versions: int) -> ClusterSettings:
    """The scene as a simulated cluster whose messages take no time."""
    rows = 1 if mode.replicated else scene.group
    return ClusterSettings.model_validate(
        {
            "seed": scene.seed,
            "versions": versions,
            "scheduler": {
                "batch_size": scene.samples,
                "group_size": scene.group,
                "seed": scene.seed,
                "batching": "streams" if mode.streams else "lockstep",
                "max_rows": scene.station_places,
                "max_lag": mode.max_lag,
                "on_update": mode.on_update,
                "extra_groups": scene.extra_for(mode),
                **(_FILTER if scene.filtered else {}),
            },
            "simulators": [
                {
                    "env_batches": scene.answers(mode) // rows,
                    "rows": rows,
                    "tokens": cut_at(scene.longest, scene.tokens),
                    "same_tokens": scene.same_tokens,
                    "solved": scene.solved,
                    "hopeless": scene.hopeless,
                }
            ],
            "generators": [
                {
                    "count": scene.generators(mode),
                    "prefill": scene.cost_of(scene.prefill),
                    "decode": scene.cost_of(scene.decode),
                    "context": scene.context,
                }
            ],
            "trainer": {"update": scene.update(mode)},
        }
    )


def run_cluster(settings: ClusterSettings, counted: int) -> tuple[VirtualCluster, float]:
    """The cluster after its run, and the virtual seconds of its last `counted` versions."""
    published = Publications()
    machine = VirtualCluster(settings)
    machine.driver.observer = published.note
    machine.run()
    return machine, published.at[settings.versions] - published.at[settings.versions - counted]


class SimulatedRates(NamedTuple):
    """samples_per_s: trained, after a warm-up; generators, trainer: shares of the time in which they work; tokens:
    mean length of an answer."""

    samples_per_s: float
    generators: float
    trainer: float
    tokens: float


def simulated(scene: AnswerScene, mode: AnswerMode, counted: int = 40) -> SimulatedRates:
    """So many versions of the scene on the virtual clock."""
    machine, seconds = run_cluster(cluster(scene, mode, _WARM_UP + counted), counted)
    summary = summarise(machine.driver, machine.conductor.ledger.as_dict())  # type: ignore[attr-defined]
    busy, throughput = summary["utilisation"], summary["throughput"]
    return SimulatedRates(
        counted * scene.samples / seconds,
        busy["generator"],
        busy["trainer"],
        throughput["tokens"] / max(1, throughput["samples"]),
    )
