"""A scene of agents: episodes of several turns, each an answer by an engine that sleeps and a step of an environment
that sleeps; once for live processes and the simulated cluster."""

from __future__ import annotations

from typing import Any, Literal

from polyrhythm.config.base import Count, NotNegative, Section, Whole
from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings


class TurnScene(Section):
    """`groups` groups of `group` episodes an update. Training has devices of its own."""

    groups: Count = 8
    """Groups of an update."""
    group: Count = 8
    """Episodes of a group."""
    extra_groups: Whole = 0
    """Redundant groups."""
    extra_members: Whole = 0
    """Redundant episodes of a group."""
    turns: Count = 10
    """Turns of every episode."""
    step: str = "constant:0ms"
    """Distribution of an environment's step."""
    tokens: str = "constant:1steps"
    """Distribution of an answer's length."""
    decode: str = "0ms"
    """Cost of a decode step, by the answers under way."""
    generators: Count = 1
    """Generator stations."""
    update_ms: Count = 1
    """Milliseconds of an update."""
    together: bool = False
    """Whether an answer begins only when all environments wait for theirs."""
    max_lag: NotNegative = 0.0
    """Lag allowed, in versions; above 0 training overlaps with rollout."""
    seed: int = 0
    """Seed of the run."""

    @property
    def samples(self) -> int:
        """Episodes of an update."""
        return self.groups * self.group

    @property
    def environments(self) -> int:
        """Environments, each on its own."""
        return (self.groups + self.extra_groups) * (self.group + self.extra_members)

    @property
    def on_update(self) -> Literal["drain", "continue"]:
        """What becomes of answers under way when weights come."""
        return "continue" if self.max_lag else "drain"


def live(scene: TurnScene, versions: int) -> RunConfig:
    """The scene as a run of real processes that sleep."""
    streams = {"type": "streams", "max_rows": scene.environments}
    return validate(
        {
            "name": "turns",
            "seed": scene.seed,
            "env": {
                "type": "latency",
                "episode_steps": scene.turns,
                "step_time": scene.step,
                "times_by": "chance",
                "observation_shape": [1],
                "action_dim": 1,
            },
            "policy": {
                "type": "polyrhythm_bench.workloads.sleeping_engine:SleepingLmSettings",
                "policy": {"type": "gaussian"},
                "tokens": scene.tokens,
                "decode": scene.decode,
                "evaluate": f"{scene.update_ms}ms",
            },
            "rollout": {"env_batches": scene.environments, "rows": 1, "generators": scene.generators},
            "batching": {"type": "lockstep"} if scene.together else streams,
            "groups": {"size": scene.group, "extra_groups": scene.extra_groups, "extra_members": scene.extra_members},
            "freshness": {"max_lag": scene.max_lag, "on_update": scene.on_update},
            # One pass over all samples at once, and none before it, so that the update sleeps once.
            "training": {
                "versions": versions,
                "mini_batch_samples": scene.samples,
                "epochs": 1,
                "minibatch_steps": scene.samples * scene.turns,
            },
            "algorithm": {"proximal": "behavior"},
        }
    )


def cluster(scene: TurnScene, versions: int) -> ClusterSettings:
    """The scene as a simulated cluster whose messages take no time."""
    scheduler: dict[str, Any] = {
        "batch_size": scene.samples,
        "group_size": scene.group,
        "extra_groups": scene.extra_groups,
        "extra_members": scene.extra_members,
        "seed": scene.seed,
        "batching": "lockstep" if scene.together else "streams",
        "max_rows": scene.environments,
        "max_lag": scene.max_lag,
        "on_update": scene.on_update,
    }
    return ClusterSettings.model_validate(
        {
            "seed": scene.seed,
            "versions": versions,
            "scheduler": scheduler,
            "simulators": [
                {
                    "env_batches": scene.environments,
                    "step": scene.step.removeprefix("constant:"),
                    "steps": scene.turns,
                    "tokens": scene.tokens,
                }
            ],
            "generators": [{"count": scene.generators, "decode": scene.decode}],
            "trainer": {"update": f"{scene.update_ms}ms"},
        }
    )
