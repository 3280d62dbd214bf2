"""Whether training is stable enough for more speed: the alarms, and what the metrics of a run that learns show too.

Faster wrong updates are worse than slow ones, so these findings come before those of the throughput (RLinf's guide to
asynchronous PPO, section 12.1). Where samples are too old or steps too large, the order is its section 12.3: lag, the
threshold of the behaviour weight, learning rate, clip, epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.hooks import Alarm
from polyrhythm.plugins.advice.findings import Change, Finding
from polyrhythm.plugins.advice.measures import Line, newest_mean

_MISMATCH, _STALE_KL = "train/actor/mismatch_kl", "train/actor/behav_approx_kl"
_MASKED, _CLIPPED = "train/actor/behav_clip_fraction", "train/actor/clip_fraction"
_UPDATE_KL, _LAG = "train/actor/proximal_approx_kl", "staleness/lag_mean"
#: Divergence in nats that rounding makes; of staleness, and of one update's steps, from which they are too large; share
#: of entries that are masked, or clipped, likewise.
_ROUNDING, _TOO_STALE, _TOO_LARGE, _MOSTLY_MASKED, _MOSTLY_CLIPPED = 5e-5, 0.05, 0.1, 0.2, 0.5

Rule = Callable[[Sequence[Line], RunConfig], Finding | None]


def unstable(lines: Sequence[Line], alarms: Sequence[Alarm], config: RunConfig) -> list[Finding]:
    """Findings about what is learned, the first cause first. lines: of metrics; alarms: of the same lines."""
    measured = [found for rule in _RULES if (found := rule(lines, config)) is not None]
    newest = {alarm.name: alarm for alarm in alarms}
    known = [_of_alarm(newest[name], config) for name in _OF_ALARM if name in newest]
    names = {finding.name for finding in measured}
    return [*measured, *(finding for finding in known if finding.name not in names)]


def _mismatch(lines: Sequence[Line], config: RunConfig) -> Finding | None:
    """Generators and trainer disagree about the same weights by more than an update changes them."""
    found = [(line[_MISMATCH], line.get(_UPDATE_KL) or 0.0) for line in lines if line.get(_MISMATCH) is not None]
    between, update = (sum(values) / len(found) for values in zip(*found, strict=True)) if found else (0.0, 0.0)
    if between < max(_ROUNDING, update):
        return None
    cap = config.algorithm.mismatch_cap
    changes = (Change("algorithm.mismatch_cap", cap, 2.0, "a little bias"),) if cap is None else ()
    measured = f"{_MISMATCH} = {between:.2g}: generators compute other log-probs from the trainer's weights"
    return Finding(
        "stability", "mismatch", measured, changes, remedy="compare with polyrhythm check, or a float32 engine"
    )


def _stale(lines: Sequence[Line], config: RunConfig) -> Finding | None:
    """Samples are of policies far from the one that is trained."""
    lag = newest_mean(lines, _LAG) or 0.0
    drift, masked = newest_mean(lines, _STALE_KL) or 0.0, newest_mean(lines, _MASKED) or 0.0
    if lag <= 0 or (drift < _TOO_STALE and masked < _MOSTLY_MASKED):
        return None
    measured = f"samples are {lag:.1f} versions old, and {_STALE_KL} = {drift:.2g}"
    measured += f", {_MASKED} = {masked:.2f}" * (masked >= _MOSTLY_MASKED)
    return Finding("stability", "stale", f"{measured}: old samples dominate the updates", tuple(_calmer(config)))


def _large_updates(lines: Sequence[Line], config: RunConfig) -> Finding | None:
    """One update moves the policy far."""
    divergence, clipped = newest_mean(lines, _UPDATE_KL) or 0.0, newest_mean(lines, _CLIPPED) or 0.0
    if divergence < _TOO_LARGE and clipped < _MOSTLY_CLIPPED:
        return None
    measured = f"{_UPDATE_KL} = {divergence:.2g} and {_CLIPPED} = {clipped:.2f}: an update changes the policy too much"
    most = config.training.max_kl
    first = [Change("training.max_kl", most, _MAX_KL, "updates end early")] if (most or 1.0) > _MAX_KL else []
    steps = tuple(change for change in _calmer(config) if not change.setting.startswith("freshness"))
    return Finding("stability", "large-updates", measured, (*first, *steps))


_RULES: Sequence[Rule] = (_mismatch, _stale, _large_updates)


def _calmer(config: RunConfig) -> Iterator[Change]:
    """RLinf's order against instability."""
    lag, loss, training = config.freshness.max_lag, config.algorithm.loss, config.training
    if lag > 0:
        yield Change("freshness.max_lag", lag, 1 if lag > 1 else 0, "waiting")
    if (threshold := getattr(loss, "behave_weight_threshold", None)) is not None and threshold > 1:
        yield Change(
            "algorithm.loss.behave_weight_threshold", threshold, max(1.0, threshold / 2), "more masked entries"
        )
    yield _rate(config, 1 / 3)
    if (clip := getattr(loss, "clip_high", None)) is not None:
        yield Change("algorithm.loss.clip_high", clip, round(clip / 2, 4), "smaller steps")
    if training.epochs > 1:
        yield Change("training.epochs", training.epochs, training.epochs // 2, "less learned from a sample")


def _rate(config: RunConfig, factor: float) -> Change:
    rate = config.training.optimizer.lr
    cost = "slower learning" if factor < 1 else "instability"
    return Change("training.optimizer.lr", rate, float(f"{rate * factor:.2g}"), cost)


def _older(config: RunConfig) -> Iterator[Change]:
    """Against samples that the loss cannot use: as above, with a loss for stale samples before the learning rate."""
    interval = config.freshness.sync_interval
    if interval > 1:
        yield Change("freshness.sync_interval", interval, interval // 2, "weights are published more often")
    for change in _calmer(config):
        if change.setting == "training.optimizer.lr" and config.algorithm.loss.type != "decoupled_ppo":
            yield Change("algorithm.loss", config.algorithm.loss.type, "decoupled_ppo", "one forward pass per update")
        yield change


def _collapsed(config: RunConfig) -> Iterator[Change]:
    yield _rate(config, 1 / 3)
    yield from (change for change in _calmer(config) if change.setting == "freshness.max_lag")
    if not config.algorithm.kl.coef:
        yield Change("algorithm.kl.coef", 0.0, 0.01, "a reference policy; slower learning")


def _entropy(config: RunConfig) -> Iterator[Change]:
    if config.algorithm.entropy_coef < _ENTROPY:
        yield Change("algorithm.entropy_coef", config.algorithm.entropy_coef, _ENTROPY, "a noisier policy")
    yield _rate(config, 1 / 3)


def _values(config: RunConfig) -> Iterator[Change]:
    rate, samples = config.training.optimizer.value_lr, config.training.mini_batch_samples
    raised = float(f"{3 * (rate or config.training.optimizer.lr):.2g}")
    yield Change("training.optimizer.value_lr", rate, raised, "noisier values")
    yield Change("training.mini_batch_samples", samples, 2 * samples, "longer updates")


def _one_step(config: RunConfig) -> Iterator[Change]:
    training = config.training
    if training.epochs < _EPOCHS:
        yield Change("training.epochs", training.epochs, _EPOCHS, "longer updates")
    if not training.minibatch_steps:
        yield Change("training.minibatch_steps", 0, _MINIBATCH, "longer updates")


def _still(config: RunConfig) -> Iterator[Change]:
    yield _rate(config, 3)
    yield Change("training.epochs", config.training.epochs, 2 * config.training.epochs, "longer updates")


def _equal_groups(config: RunConfig) -> Iterator[Change]:
    yield Change("groups.size", config.groups.size, 2 * config.groups.size, "more samples per update")


def _longer(config: RunConfig) -> Iterator[Change]:
    training = config.training
    yield Change("training.versions", training.versions, 2 * training.versions, "time")
    yield Change("training.mini_batch_samples", training.mini_batch_samples, 2 * training.mini_batch_samples, "time")


def _nothing(config: RunConfig) -> Iterator[Change]:  # noqa: ARG001
    return iter(())


#: Limit of an update's KL, entropy coefficient, epochs and chunk steps of an optimizer step that are proposed.
_MAX_KL, _ENTROPY, _EPOCHS, _MINIBATCH = 0.02, 0.01, 4, 64
_REWARD = "give a reward that grows on the way to success, or a first policy from demonstrations"
#: Alarm → row of the table, changes, and what helps besides; the first cause first.
_OF_ALARM: Mapping[str, tuple[str, Callable[[RunConfig], Iterator[Change]], str]] = {
    "same": ("equal-returns", _nothing, _REWARD),
    "no signal": ("no-signal", _equal_groups, "take easier or harder tasks"),
    "collapse": ("collapse", _collapsed, "evaluate best.pt, which the run has with evaluation.every"),
    "old": ("stale", _older, ""),
    "entropy": ("entropy", _entropy, ""),
    "values": ("values", _values, ""),
    "one step": ("one-step", _one_step, ""),
    "still": ("still", _still, ""),
    "no progress": ("no-progress", _longer, _REWARD),
}


def _of_alarm(alarm: Alarm, config: RunConfig) -> Finding:
    row, changes, remedy = _OF_ALARM[alarm.name]
    measured = alarm.text.partition("; ")[0]
    return Finding("stability", row, measured, tuple(changes(config)), remedy=remedy, alarm=alarm.text)
