"""The root of a run's configuration, and the checks between its sections.

A component receives its own section, never the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field, SerializeAsAny, model_validator

from polyrhythm.config.base import LAST_PORT, Count, InvalidSetting, NotNegative, Section, Seed, type_name
from polyrhythm.config.presets import check_objective
from polyrhythm.config.registry import resolve
from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.config.sections.learning import (
    DemonstrationSettings,
    EvaluationSettings,
    SupervisedSettings,
    TrainingSettings,
)
from polyrhythm.config.sections.placement import PlacementSettings, SeatSettings
from polyrhythm.config.sections.rollout import (
    Batching,
    DynamicBatching,
    FreshnessSettings,
    GroupSettings,
    LockstepBatching,
    RolloutSettings,
    StreamsBatching,
)
from polyrhythm.config.sections.running import (
    CheckpointSettings,
    DataPlaneSettings,
    JoinSettings,
    PrometheusSettings,
    RaySettings,
    ScoringSettings,
    SupervisionSettings,
)
from polyrhythm.plugin import table

#: Settings of one tracker.
Tracker = Annotated[SerializeAsAny[BaseModel], BeforeValidator(lambda value: resolve("tracking", value))]

if TYPE_CHECKING:
    LauncherName = str
else:  # plugins add some
    LauncherName = Literal[("local", "inline", *table("launcher"))]


def default_trackers() -> tuple[BaseModel, ...]:
    """TensorBoard; none where the plugin is not there."""
    return (resolve("tracking", "tensorboard"),) if "tensorboard" in table("tracking") else ()


class RunConfig(Section):
    """Configuration of a run."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    """Name of the run's folder under out_dir: letters, digits, _ . - alone; default: the recipe's name."""
    seed: Seed = 0
    """Seed of initial weights, initial states and sampling noise."""
    devices: Count | None = None
    """Devices that the numbers are for, which makes the recipe a row; devices=N scales them; null: not a row."""
    launcher: LauncherName = "local"
    """local: a process per station on this machine; inline: all in this process; ray: processes on a Ray cluster."""
    out_dir: str = "runs"
    """Folder of all runs; this run's is <out_dir>/<name>/<time>."""
    resume: str = "never"
    """never: start a new run; auto: resume the newest unfinished run of this recipe, if any; or the folder of a run."""
    init_from: str = ""
    """Run folder or policy file with the initial weights, replacing the phases before training; empty for none."""
    shutdown_s: NotNegative = 10.0
    """Seconds that the update under way gets after the first Ctrl-C or SIGTERM; then it is abandoned."""
    env: Annotated[SerializeAsAny[BaseModel], BeforeValidator(lambda value: resolve("env", value))]
    """The environment's own settings, by type; gymnasium:ID is short for {type: gymnasium, id: ID}."""
    policy: Annotated[SerializeAsAny[BaseModel], BeforeValidator(lambda value: resolve("policy", value))]
    """The policy's own settings, by type."""
    rollout: RolloutSettings = RolloutSettings()
    """Simulators and generators."""
    batching: Batching = DynamicBatching()
    """When a batch of requests starts."""
    freshness: FreshnessSettings = FreshnessSettings()
    """How stale a sample may be."""
    groups: GroupSettings = GroupSettings()
    """Samples that share an initial state."""
    scoring: ScoringSettings | None = None
    """A reward function in processes of its own; null: rewards are the environment's alone."""
    training: Annotated[TrainingSettings, Field(examples=["{versions: 20, mini_batch_samples: 16}"])]
    """Length of training and structure of an update."""
    objective: str = ""
    """The objective of another system that `algorithm` began with, by name; empty for none."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """From trajectories to a loss."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """Episodes on held-out seeds before and after training."""
    placement: PlacementSettings = PlacementSettings()
    """Devices and threads of the stations."""
    join: JoinSettings = JoinSettings()
    """Simulators that join from elsewhere."""
    ray: RaySettings = RaySettings()
    """The cluster of `launcher: ray`."""
    data_plane: DataPlaneSettings = DataPlaneSettings()
    """Messages between processes."""
    prometheus: PrometheusSettings = PrometheusSettings()
    """Present numbers over HTTP."""
    tracking: tuple[Tracker, ...] = Field(default_factory=default_trackers)
    """Trackers of the run: tensorboard, wandb, mlflow, trackio, swanlab, module:Class, or {type: ..., option: ...}."""
    supervision: SupervisionSettings = SupervisionSettings()
    """Deadlines of stations."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """When states are saved, from which a lost trainer or run is restored."""
    demonstrations: DemonstrationSettings | None = None
    """Episodes of the scripted expert; null for none."""
    supervised: SupervisedSettings | None = None
    """Supervised warm start on the demonstrations; null for none."""

    @property
    def env_type(self) -> str:
        """Type of the environment's settings; "" if a user's class has none."""
        return type_name(self.env)

    @property
    def policy_type(self) -> str:
        """Type of the policy's settings; "" if a user's class has none."""
        return type_name(self.policy)

    @property
    def all_rows(self) -> int:
        """Maximum number of training rows, including those of simulators that join."""
        own, join = self.rollout, self.join
        return own.simulators * own.env_batches * own.rows + join.simulators * (join.rows or own.rows)

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        segments, size = self.rollout.segment_steps, self.groups.size
        check_objective(self.objective, self.algorithm, self.training, segment_steps=segments, group_size=size)
        _check_groups(self)
        _check_join(self)
        for kind in ("simulators", "generators"):
            least, own = getattr(self.ray, f"min_{kind}"), getattr(self.rollout, kind)
            if least is not None and least > own:
                raise self.refusal(f"ray.min_{kind}", f"the run has {own} {kind}; lower it, or raise rollout.{kind}")
        _check_scoring(self)
        _check_slots(self)
        _check_streams(self)
        _check_warm_start(self)
        return self


def _check_groups(config: RunConfig) -> None:
    size, batch, divided = config.groups.size, config.training.batch_size, config.training.step_samples

    def nearest(samples: int) -> str:
        lower = samples // size * size
        return f"make it {f'{lower} or ' if lower else ''}{lower + size}"

    if divided % size:
        why = (
            f"with require_batches {config.training.require_batches} a mini-batch has whole groups (groups.size {size})"
        )
        raise config.refusal("training.mini_batch_samples", f"{why}; {nearest(divided)}")
    if batch % size:
        why = f"batch_size {batch} (mini_batch_samples x require_batches) is not a multiple of it; {nearest(batch)}"
        raise config.refusal("groups.size", why)
    if size > 1 and config.rollout.segment_steps:
        raise config.refusal(
            "rollout.segment_steps",
            "segments and groups exclude each other; set segment_steps to 0 or groups.size to 1",
        )
    for name, value in (("extra_groups", config.groups.extra_groups), ("extra_members", config.groups.extra_members)):
        if value and config.training.order == "ticket":
            why = "with order ticket an update takes the lowest tickets, not the first to finish"
            raise config.refusal(f"groups.{name}", f"{why}; set training.order to arrival, or this to 0")
        if value and config.rollout.segment_steps:
            why = "an episode cut into segments cannot be discarded; set segment_steps or this to 0"
            raise config.refusal(f"groups.{name}", why)
    if config.evaluation.every and config.evaluation.weights == "pause" and config.rollout.segment_steps:
        raise config.refusal(
            "evaluation.weights",
            "an evaluation in the rows of training would discard episodes that are parked between segments; set "
            "it to second_copy or own_generator, or rollout.segment_steps to 0",
        )
    if config.groups.filters and config.rollout.segment_steps:
        raise config.refusal(
            "rollout.segment_steps",
            "groups.min_return and max_return need whole episodes; set segment_steps to 0, or the bounds to null",
        )
    _check_advantage(config)


def _check_advantage(config: RunConfig) -> None:
    algorithm, name = config.algorithm, config.algorithm.advantage.type
    if algorithm.needs_groups and config.groups.size == 1:
        why = f"{name} compares the samples of a group; make it 2 or more, or set algorithm.advantage gae"
        raise config.refusal("groups.size", why)
    warmup = config.training.critic_warmup_updates
    if warmup and not (algorithm.needs_value and algorithm.value.coef):
        reason = f"{name} uses no value function" if algorithm.value.coef else "algorithm.value.coef is 0"
        why = f"{reason}, so there is no critic to warm up; set it to 0"
        raise config.refusal("training.critic_warmup_updates", why)
    value_lr = config.training.optimizer.value_lr
    if value_lr is not None and not algorithm.value.coef:
        raise config.refusal(
            "training.optimizer.value_lr", "algorithm.value.coef is 0, so nothing trains the value; leave it out"
        )
    if algorithm.needs_value and not algorithm.value.coef and config.training.versions:
        why = f"{name} uses a value that nothing would train; raise it, or use grpo, rloo, maxrl, reinforce_plus_plus"
        raise config.refusal("algorithm.value.coef", why)
    if config.rollout.segment_steps and algorithm.bootstrap == "never" and algorithm.needs_value:
        why = "a segment's end is not an episode's end, so its value is needed; use standard, or segment_steps 0"
        raise config.refusal("algorithm.bootstrap", why)
    if config.rollout.segment_steps and not algorithm.needs_value:
        why = f"{name} needs whole episodes; set it to 0, or algorithm.advantage to gae"
        raise config.refusal("rollout.segment_steps", why)


def _check_join(config: RunConfig) -> None:
    join, own = config.join, config.rollout.simulators
    if not own and not join.simulators:
        raise config.refusal("rollout.simulators", "nothing simulates; set it to 1, or join.simulators to 1 or more")
    if join.min_simulators > own + join.simulators:
        raise config.refusal(
            "join.min_simulators",
            f"there are {own} simulators and {join.simulators} may join; lower it, or raise join.simulators",
        )
    if join.port + join.simulators - 1 > LAST_PORT:
        raise config.refusal("join.port", f"{join.simulators} ports from there do not exist; lower it")


def _check_scoring(config: RunConfig) -> None:
    devices = config.placement.scorers.devices
    if config.scoring is None:
        if config.placement.scorers != SeatSettings():
            raise InvalidSetting(
                "placement.scorers", "set", "there are no scorers; set scoring.function, or leave it out"
            )
        return
    if config.rollout.segment_steps:
        raise config.refusal(
            "rollout.segment_steps", "a reward function scores whole episodes; set it to 0, or scoring to null"
        )
    if config.launcher == "inline" and devices not in (None, "cpu"):
        raise config.refusal(
            "placement.scorers.devices",
            "with launcher inline a scorer has no process of its own that could be bound to a device; set it to cpu, "
            "or launcher to local",
        )


def _check_slots(config: RunConfig) -> None:
    batching, largest = config.batching, config.rollout.largest_slot_rows
    if isinstance(batching, LockstepBatching) or largest is None:
        return
    if config.join.simulators:
        largest = max(largest, config.join.rows or config.rollout.rows)
    if batching.max_rows < largest:
        raise config.refusal(
            "batching.max_rows",
            f"a request is never split and the largest slot has {largest} rows; raise this, or set rollout.sharding",
        )


def _check_streams(config: RunConfig) -> None:
    if not isinstance(config.batching, StreamsBatching):
        if config.freshness.on_update == "abort":
            raise config.refusal(
                "freshness.on_update",
                "a one-pass policy has no unfinished generation to cut (only a streaming engine has); use continue, or "
                "batching streams with a policy that generates tokens",
            )
        return
    if config.rollout.buckets not in ("auto", "none"):
        raise config.refusal("rollout.buckets", "batching streams has no passes to pad; set it to none")
    if config.evaluation.weights == "second_copy" and config.evaluation.priority != "turns":
        raise config.refusal(
            "evaluation.priority",
            "with batching streams, training and evaluation decode in turns; set it to turns, or evaluation.weights to "
            "own_generator",
        )


def _check_warm_start(config: RunConfig) -> None:
    training, updates = config.training, config.training.versions * config.freshness.sync_interval
    if config.supervised and not config.demonstrations:
        raise InvalidSetting("supervised", "set", "nothing to imitate; add demonstrations, or set supervised to null")
    if config.demonstrations and not config.supervised:
        raise InvalidSetting(
            "demonstrations", "set", "nothing uses them; add supervised, or set demonstrations to null"
        )
    if updates and training.critic_warmup_updates >= updates:
        raise config.refusal(
            "training.critic_warmup_updates",
            f"all {updates} updates (versions x sync_interval) would train the value head only; give it at most "
            f"{updates - 1}",
        )
