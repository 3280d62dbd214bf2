"""A scene: stages that only sleep, described once for live processes, the simulated cluster and a formula.

The time of a stage is a distribution (`lognormal:10ms:0.8`) or a cost (`10ms+0.1ms`: base and per row); the live run
sleeps for it, the simulated cluster draws from it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError, field_validator, model_validator

from polyrhythm.config.base import Count, InvalidSetting, NotNegative, Section
from polyrhythm.config.explain import explain
from polyrhythm.config.load import parse_override, validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.costs import Cost, parse_cost
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler.records import Command, Event, Published
from polyrhythm.specs.distributions import Distribution, parse_distribution

Mode = Literal["lockstep", "rollout_async", "train_async", "full_async"]
MODES: tuple[Mode, ...] = ("lockstep", "rollout_async", "train_async", "full_async")
_SHARE = re.compile(r"(\d+\.?\d*)%")
#: Versions that are simulated before counting begins, and those that are counted.
_WARM_UP, _COUNTED = 10, 60


class StageScenario(Section):
    """Env batches of `rows` rows, dealt evenly over the simulators, each with its own thread; one update a version, of
    as many samples as there are rows."""

    env_batches: Count = 16
    """Env batches of all simulators together."""
    rows: Count = 1
    """Rows of an env batch."""
    simulators: Count = 2
    """Simulator stations."""
    generators: Count = 1
    """Generator stations; the passes of each are in sequence."""
    sim_latency: str = "lognormal:10ms:0.8"
    """Distribution of an env batch's step time, whatever its rows."""
    infer_latency: str = "10ms+0.1ms"
    """Cost of a forward pass, by its rows."""
    train_latency: str = "30%"
    """Distribution of an update's time; or a share of the lock-step rollout, such as 30%."""
    episode_steps: Count = 50
    """Env steps of every episode."""
    max_lag: NotNegative = 2.0
    """Lag allowed where training overlaps with rollout."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the run."""

    @field_validator("sim_latency")
    @classmethod
    def _check_distribution(cls, distribution: str) -> str:
        parse_distribution(distribution)
        return distribution

    @field_validator("infer_latency")
    @classmethod
    def _check_cost(cls, cost: str) -> str:
        parse_cost(cost)
        return cost

    @field_validator("train_latency")
    @classmethod
    def _check_distribution_or_share(cls, text: str) -> str:
        if _SHARE.fullmatch(text) is None:
            parse_distribution(text)
        return text

    @model_validator(mode="after")
    def _check_division(self) -> StageScenario:
        if self.env_batches % self.simulators:
            raise InvalidSetting(
                "env_batches", self.env_batches, f"not a multiple of {self.simulators} simulators; make it one"
            )
        return self

    @property
    def samples(self) -> int:
        """Rows of all env batches, and samples of an update."""
        return self.env_batches * self.rows

    @property
    def transitions(self) -> int:
        """Transitions of a version."""
        return self.samples * self.episode_steps

    def of_turn(self, turn: int) -> StageScenario:
        """The same scene with another seed for each turn: the same draws again would add no information."""
        return self.model_copy(update={"seed": self.seed + turn})

    def settled(self) -> StageScenario:
        """The same scene with a training time: a share is taken of the simulated lock-step rollout."""
        share = _SHARE.fullmatch(self.train_latency)
        if share is None:
            return self
        alone = self.model_copy(update={"train_latency": "constant:0ms"})
        seconds = float(share[1]) / 100 * self.transitions / simulated(alone, "lockstep", {"type": "lockstep"})
        return self.model_copy(update={"train_latency": f"constant:{1000 * seconds:.3f}ms"})


def parse_scene(words: Sequence[str]) -> StageScenario:
    """The default scene with words such as `env_batches=8` applied. ConfigError: no such setting, or value."""
    tree: dict[str, Any] = {}
    for word in words:
        tree |= parse_override(word)
    try:
        return StageScenario.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(*explain(error, StageScenario)) from None


class StageOverhead(NamedTuple):
    """Overhead of a live run in seconds: of each pass, between its two events at the conductor, and of each
    of its rows; of each step and reset of an env batch; of an update; of publishing and of loading a version."""

    pass_s: float = 0.0
    row_s: float = 0.0
    step_s: float = 0.0
    reset_s: float = 0.0
    update_s: float = 0.0
    publish_s: float = 0.0
    apply_s: float = 0.0


NO_OVERHEAD = StageOverhead()


class ShiftedDistribution(NamedTuple):
    """A distribution shifted by `seconds`, at least 0."""

    distribution: Distribution
    seconds: float

    @property
    def mean(self) -> float:
        return self.distribution.mean + self.seconds

    def sample(self, rng: random.Random) -> float:
        return max(0.0, self.distribution.sample(rng) + self.seconds)


def batchings(scene: StageScenario) -> list[dict[str, Any]]:
    """The fixed settings of dynamic batching that are tried for the best one: a grid of max_rows and max_wait."""
    sizes = sorted({max(scene.rows, scene.samples // part) for part in (1, 2, 4)})
    waits = (0.0, 1.0, 2.0, 5.0, 10.0)
    return [{"type": "dynamic", "max_rows": rows, "max_wait_ms": wait} for rows in sizes for wait in waits]


def live(scene: StageScenario, mode: Mode, batching: Mapping[str, Any], versions: int) -> RunConfig:
    """The scene as a run of real processes that sleep. The scene is settled."""
    here = "polyrhythm_bench.workloads"
    return validate(
        {
            "name": "scene",
            "seed": scene.seed,
            "env": {
                "type": "latency",
                "episode_steps": scene.episode_steps,
                "step_time": scene.sim_latency,
                "times_by": "seed",
            },
            "policy": {
                "type": f"{here}.slow_policy:SlowPolicySettings",
                "policy": {"type": "gaussian"},
                "act": scene.infer_latency,
                "evaluate": scene.train_latency.removeprefix("constant:"),
            },
            "rollout": {
                "simulators": scene.simulators,
                "env_batches": scene.env_batches // scene.simulators,
                "rows": scene.rows,
                "generators": scene.generators,
            },
            "batching": dict(batching),
            "freshness": freshness(scene, mode),
            # One pass over all samples at once, and none before it, so that the update sleeps once.
            "training": {"versions": versions, "mini_batch_samples": scene.samples, "epochs": 1, "minibatch_steps": 0},
            "algorithm": {"proximal": "behavior"},
        }
    )


def cluster(
    scene: StageScenario, mode: Mode, batching: Mapping[str, Any], versions: int, overhead: StageOverhead = NO_OVERHEAD
) -> ClusterSettings:
    """The scene, settled, as a simulated cluster whose messages take no time but what `overhead` says."""
    return ClusterSettings.model_validate(
        {
            "seed": scene.seed,
            "versions": versions,
            "scheduler": {
                "batch_size": scene.samples,
                "seed": scene.seed,
                "batching": batching["type"],
                **_limits(batching),
                **freshness(scene, mode),
            },
            "simulators": [
                {
                    "count": scene.simulators,
                    "env_batches": scene.env_batches // scene.simulators,
                    "rows": scene.rows,
                    "step": _longer(scene.sim_latency, overhead.step_s),
                    "reset": _longer("0ms", overhead.reset_s),
                    "steps": scene.episode_steps,
                    "times_by": "seed",
                }
            ],
            "generators": [
                {
                    "count": scene.generators,
                    "serve": _longer(scene.infer_latency, overhead.pass_s, overhead.row_s),
                    "apply": _longer("0ms", overhead.apply_s),
                }
            ],
            "trainer": {
                "update": _longer(scene.train_latency, overhead.update_s),
                "publish": _longer("0ms", overhead.publish_s),
            },
        }
    )


def _limits(batching: Mapping[str, Any]) -> dict[str, float]:
    """The limits of dynamic batching, in rows and seconds."""
    if batching["type"] != "dynamic":
        return {}
    return {"max_rows": batching["max_rows"], "max_wait_s": batching["max_wait_ms"] / 1000}


def _longer(cost: str, seconds: float, per_unit: float = 0.0) -> Cost:
    """The cost, always so much longer."""
    distribution = parse_cost(cost)
    return Cost(ShiftedDistribution(distribution.base, seconds), distribution.per_unit + per_unit)


def freshness(scene: StageScenario, mode: Mode) -> dict[str, Any]:
    """The freshness rules of the mode."""
    if mode in ("lockstep", "rollout_async"):
        return {"max_lag": 0.0, "on_update": "drain"}
    return {"max_lag": scene.max_lag, "on_update": "continue"}


def simulated(
    scene: StageScenario, mode: Mode, batching: Mapping[str, Any], overhead: StageOverhead = NO_OVERHEAD
) -> float:
    """Transitions per second on the simulated cluster, after a warm-up."""
    published = Publications()
    machine = VirtualCluster(cluster(scene, mode, batching, _WARM_UP + _COUNTED, overhead))
    machine.driver.observer = published.note
    machine.run()
    return _COUNTED * scene.transitions / (published.at[_WARM_UP + _COUNTED] - published.at[_WARM_UP])


class Publications:
    """When each version was published, in seconds of virtual time."""

    def __init__(self) -> None:
        self.at: dict[int, float] = {}

    def note(self, now: float, event: Event, commands: Sequence[Command]) -> None:  # noqa: ARG002 (the driver's)
        if isinstance(event, Published):
            self.at[event.version] = now


def bound(scene: StageScenario) -> float:
    """Transitions per second that no schedule exceeds: min(N/D, 1/D_max) of a closed loop (operational analysis).

    N: env batches; D: a step and a pass for one env batch; D_max: of an env batch's step, at a generator whose passes
    serve all env batches that it could, or at the trainer.
    """
    infer, train = parse_cost(scene.infer_latency), parse_cost(scene.train_latency)
    step_s = parse_distribution(scene.sim_latency).mean
    passes = max(1, -(-scene.env_batches // scene.generators))
    generator_s = infer.mean(passes * scene.rows) / scene.env_batches
    trainer_s = train.mean() / (scene.episode_steps * scene.env_batches)
    slots = scene.env_batches / (step_s + infer.mean(scene.rows))
    return scene.rows * min([slots, *(1 / busy for busy in (generator_s, trainer_s) if busy > 0)])
