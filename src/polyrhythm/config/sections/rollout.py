"""Scheduler settings: simulators, generators, batching, freshness, groups."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag, model_validator

from polyrhythm.config.base import Count, Flag, InvalidSetting, NotNegative, Number, Positive, Section, Whole, type_or


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def parse_sharding(value: Any) -> str | tuple[int, ...]:
    """`whole`, `rows`, `even:n`, `module:function`, or the rows of each slot in order."""
    choices = "use whole, rows, even:N, a list of slot sizes such as [4, 4], or module:function"
    if isinstance(value, list | tuple):
        if value and all(map(_is_count, value)):
            return tuple(value)
        raise InvalidSetting("", value, f"every slot needs at least 1 row; {choices}")
    if not isinstance(value, str):
        raise InvalidSetting("", value, f"not a sharding; {choices}")
    kind, _, argument = value.partition(":")
    if value in ("whole", "rows") or (kind == "even" and argument.isdecimal() and int(argument) >= 1):
        return value
    if kind not in ("even", "whole", "rows") and argument.isidentifier() and all(kind.split(".")):
        return value
    raise InvalidSetting("", value, f"not a sharding; {choices}")


Sharding = Annotated[str | tuple[int, ...], BeforeValidator(parse_sharding)]


def parse_buckets(value: Any) -> str | tuple[int, ...]:
    """`auto`, `none`, `powers`, or row counts in ascending order."""
    choices = "use auto, none, powers, or a list of row counts such as [8, 32, 128], smallest first"
    if isinstance(value, list | tuple):
        if value and all(map(_is_count, value)) and list(value) == sorted(set(value)):
            return tuple(value)
    elif value in ("auto", "none", "powers"):
        return str(value)
    raise InvalidSetting("", value, f"not row counts to pad to; {choices}")


Buckets = Annotated[str | tuple[int, ...], BeforeValidator(parse_buckets)]


class RolloutSettings(Section):
    """Simulators, generators and their requests. Slots = simulators x env_batches x shards."""

    simulators: Whole = 1
    """Simulator stations of the run's own; 0 if all of them join (join.simulators)."""
    env_batches: Count = 1
    """Env batches (vector environments) of each simulator."""
    rows: Count = 8
    """Rows (environments) of each env batch."""
    generators: Count = 1
    """Generator stations, each with its own copy of the policy."""
    sharding: Sharding = "whole"
    """Slots of an env batch: whole, rows, even:N, a list of slot sizes, or module:function (docs/rollout.md)."""
    join: Literal["auto", "all", "none"] = "auto"
    """Slots of an env batch that step together: all, none (each by itself), or auto: none where the env allows it."""
    action_repeat: Count = 1
    """Env steps for which each primitive action is held."""
    segment_steps: Whole = 0
    """Chunk steps after which an unfinished episode is cut into a segment; 0 for whole episodes."""
    routing: Literal["least_loaded", "round_robin", "fixed", "affinity"] = "least_loaded"
    """Generator of a request: any idle one, each in turn, number i mod n for slot i, or the slot's previous one."""
    buckets: Buckets = "auto"
    """Row counts that passes are padded to: powers (of two), a list, none; auto: powers for CUDA graphs, else none."""
    graphs: Literal["auto", "off"] = "auto"
    """On a CUDA device, the forward passes of buckets: auto: captured as CUDA graphs where the policy allows; off."""
    queue_key: Annotated[str, BeforeValidator(lambda value: "" if value is None else value)] = ""
    """module:function from a request to its sort key, lowest served first; empty for the order of arrival."""
    reset_ahead: Whole = 0
    """Spare rows of each env batch, reset for coming episodes while the others step; each takes a row's memory."""
    episode_deadline_s: Positive = 600.0
    """Seconds after which a ticket is cancelled and issued again."""
    max_attempts: Count = 3
    """Attempts before a ticket (with its group) is dropped and replaced."""
    quarantine_after: Whole = 3
    """Failures of one task and seed after which it is set aside, with its whole group; 0 for never."""
    max_dropped: Whole = 1000
    """Samples dropped by faults, since the run began or was resumed, after which the run halts."""

    @model_validator(mode="after")
    def _spares_fit(self) -> RolloutSettings:
        if self.reset_ahead > self.rows:
            raise self.refusal("reset_ahead", f"more than rollout.rows; set at most {self.rows}")
        return self

    @model_validator(mode="after")
    def _shards_fit(self) -> RolloutSettings:
        if isinstance(self.sharding, tuple) and sum(self.sharding) != self.rows:
            sizes = list(self.sharding)
            raise InvalidSetting(
                "sharding", sizes, f"slots of {sum(sizes)} rows, but rollout.rows is {self.rows}; make them equal"
            )
        if isinstance(self.sharding, str) and self.sharding.startswith("even:"):
            parts = int(self.sharding.removeprefix("even:"))
            if parts > self.rows:
                raise self.refusal("sharding", f"more slots than rows; use at most even:{self.rows}")
        if self.queue_key and self.queue_key.count(":") != 1:
            raise self.refusal("queue_key", "write module:function, or leave it empty for order of arrival")
        return self

    @property
    def largest_slot_rows(self) -> int | None:
        """Rows of the largest slot; None if a custom function makes the slots."""
        if isinstance(self.sharding, tuple):
            return max(self.sharding)
        if self.sharding == "whole":
            return self.rows
        if self.sharding == "rows":
            return 1
        if self.sharding.startswith("even:"):
            return -(-self.rows // int(self.sharding.removeprefix("even:")))
        return None


class LockstepBatching(Section):
    """A batch starts when every active slot waits."""

    type: Literal["lockstep"] = "lockstep"


class DynamicBatching(Section):
    """A batch starts when one of its limits is reached, or its oldest request has waited max_wait_ms."""

    type: Literal["dynamic"] = "dynamic"
    max_rows: Count = 64
    """Rows in one forward pass."""
    max_requests: Count = 1_000_000
    """Requests in one forward pass."""
    max_wait_ms: NotNegative = 5.0
    """Milliseconds that the oldest request waits for others."""
    fire_when_all_wait: Flag = True
    """A batch also starts when every live slot that its generator may serve waits; false: by limits and wait alone."""


class AutoBatching(Section):
    """As dynamic, with rows and wait tuned for throughput during the run."""

    type: Literal["auto"] = "auto"
    max_rows: Count = 64
    """Upper limit of the rows in one forward pass, set by memory."""
    max_requests: Count = 1_000_000
    """Requests in one forward pass."""


class StreamsBatching(Section):
    """No batches: each request is answered token by token and ends by itself (continuous batching)."""

    type: Literal["streams"] = "streams"
    max_rows: Count = 64
    """Rows that a generator answers at a time; a request begins as soon as there are places for its rows."""


#: Batching that has limits.
LimitedBatching = DynamicBatching | AutoBatching


Batching = Annotated[
    Annotated[LockstepBatching, Tag("lockstep")]
    | Annotated[DynamicBatching, Tag("dynamic")]
    | Annotated[AutoBatching, Tag("auto")]
    | Annotated[StreamsBatching, Tag("streams")],
    Discriminator(type_or("dynamic")),
]


class FreshnessSettings(Section):
    """How stale a sample may be, and what happens to running episodes when weights change."""

    max_lag: NotNegative = 2.0
    """Versions by which a sample may be older than the trainer when it is trained on (real; 0 is on-policy)."""
    bound: Literal["sample", "mean"] = "sample"
    """Whether max_lag limits every sample, or the mean over samples."""
    on_update: Literal["drain", "continue", "abort"] = "continue"
    """New weights: drain: once no episode runs; continue: between two passes or tokens; abort: streams resume anew."""
    sync_interval: Count = 1
    """Updates per weight publication (K)."""


class GroupSettings(Section):
    """Samples that share task and initial state: group size, filtering by return, redundant groups and members."""

    size: Count = 1
    """Samples per group; 1 for no groups."""
    min_return: Number | None = None
    """Lowest mean return of a group that is trained on; groups below are replaced; null for any."""
    max_return: Number | None = None
    """Highest mean return of a group that is trained on; groups above are replaced; null for any."""
    max_filtered: Count = 100
    """Groups that may be dropped for their return per update."""
    on_max_filtered: Literal["accept", "stop"] = "accept"
    """After max_filtered groups: accept the update's other groups regardless of return, or stop the run."""
    extra_groups: Whole = 0
    """Redundant groups in flight: the first complete ones are trained on, the others cancelled."""
    extra_members: Whole = 0
    """Redundant members per group: the first finished ones are trained on, the others cancelled."""

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> GroupSettings:
        low, high = self.min_return, self.max_return
        if low is not None and high is not None and low > high:
            raise self.refusal("min_return", f"no group is above it and below max_return {high:g}; lower it")
        return self

    @property
    def filters(self) -> bool:
        """Whether groups are filtered by their mean return."""
        return self.min_return is not None or self.max_return is not None
