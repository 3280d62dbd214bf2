"""Notes on settings that are valid, but under which policies tend not to learn."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from numpy.typing import NDArray

from polyrhythm.config.load import training_defaults
from polyrhythm.config.presets import OBJECTIVE_PRESETS, is_unchanged
from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.objectives import DecoupledPpoLoss, PpoLoss
from polyrhythm.config.sections.rollout import DynamicBatching
from polyrhythm.config.streaming import why_whole_updates
from polyrhythm.conformance import Finding
from polyrhythm.pipeline.placed import trainer_ranks
from polyrhythm.policies.form import PolicyForm
from polyrhythm.readable import counted
from polyrhythm.specs import EnvSpec

#: Samples and chunk steps below which the gradient of an update is mostly noise.
_FEW_SAMPLES, _FEW_STEPS = 8, 64
#: max_lag from which ppo with a higher upper clip lost least (bench/results/algorithms.md).
_LONG_LAG = 4
#: Magnitude of an observation's entry that saturates the units of a small network.
_LARGE = 10.0


def batching_findings(config: RunConfig) -> Iterator[Finding]:
    """A note if every forward pass waits for requests that cannot come."""
    batching, rows = config.batching, config.all_rows
    if not isinstance(batching, DynamicBatching) or batching.fire_when_all_wait or not batching.max_wait_ms:
        return
    if rows < min(batching.max_rows, batching.max_requests):
        yield Finding(
            "batching",
            "note",
            f"batching.max_rows = {batching.max_rows}: all rows together are {rows}, so every forward pass waits for "
            f"batching.max_wait_ms = {batching.max_wait_ms:g}",
            f"set batching.fire_when_all_wait to true, or batching.max_rows to at most {rows}",
        )


def staleness_findings(config: RunConfig) -> Iterator[Finding]:
    """Notes if the policy loss does not fit the expected age of the weights that acted.

    Rules: docs/objectives.md and measurements in bench/results/algorithms.md. Reads only the configuration.
    """
    algorithm, training, loss = config.algorithm, config.training, config.algorithm.loss
    lag, interval = config.freshness.max_lag, config.freshness.sync_interval
    age = interval * (math.ceil(lag) + 1) - 1
    acted = (
        f"the policy that acted, which may be {counted(age, 'update')} old (freshness.max_lag = {lag:g}, "
        f"sync_interval = {interval})"
    )
    recompute = ["algorithm.proximal=recompute"] * (algorithm.proximal != "recompute")
    if not training.versions:
        return
    if age and algorithm.clips_around_behavior:
        setting, fixes, sibling = "algorithm.proximal", recompute, f"{config.objective}_async"
        if loss.corrects_staleness:  # type: ignore[union-attr]
            setting, fixes = "algorithm.loss.ratio_to", [*recompute, "algorithm.loss.ratio_to=proximal"]
        # Otherwise it would discard the recipe's own settings.
        elif sibling in OBJECTIVE_PRESETS and is_unchanged(config.objective, algorithm):
            fixes = [f"objective={sibling}"]
        yield _lag_note(f"{setting} = behavior: {loss.type} clips around {acted}", fixes)
    elif lag >= _LONG_LAG and (
        isinstance(loss, DecoupledPpoLoss) or (isinstance(loss, PpoLoss) and not _clips_higher(loss))
    ):
        detail = f"freshness.max_lag = {lag:g}: from {_LONG_LAG} on {loss.type} loses more than with clip-higher"
        yield _lag_note(detail, ["algorithm.loss={type: ppo, clip_high: 0.28}", *recompute])
    if loss.type != "vanilla":
        return
    weighted = algorithm.mismatch_cap is not None or algorithm.rollout_correction.weight != "none"
    if age and not weighted:
        detail = f"algorithm.loss = vanilla: it does not correct for {acted}"
        yield _lag_note(detail, ["algorithm.loss=decoupled_ppo", *recompute])
    elif training.epochs > 1 or 0 < training.minibatch_steps < training.batch_size:
        steps = f"training.epochs = {training.epochs}, minibatch_steps = {training.minibatch_steps}"
        detail = f"algorithm.loss = vanilla: it does not correct for the update's own steps ({steps})"
        yield _lag_note(detail, ["algorithm.loss=ppo"])


def _lag_note(detail: str, overrides: list[str]) -> Finding:
    return Finding("loss and lag", "note", detail, f"add {' '.join(map(shlex.quote, overrides))}")


def _clips_higher(loss: PpoLoss) -> bool:
    return loss.clip_high is None or loss.clip_low is None or loss.clip_high > loss.clip_low


def update_findings(config: RunConfig, spec: EnvSpec, form: PolicyForm) -> Iterator[Finding]:
    """Describe an update and the source of its defaults; notes on settings under which policies tend not to learn."""
    training, algorithm = config.training, config.algorithm
    if not training.versions:
        return
    defaults = training_defaults(config.policy)
    declared = _unchanged(defaults, training.model_dump())
    source = f"; as policy {config.policy_type} declares: {', '.join(declared)}" if declared else ""
    cut = f"steps of {training.minibatch_steps} chunk steps" if training.minibatch_steps else "one step"
    if training.require_batches > 1:
        cut = f"{training.require_batches} mini-batches of {training.mini_batch_samples} samples, each in {cut}"
    passes = f"{counted(training.epochs, 'epoch')} in {cut}, lr {training.optimizer.lr:g}"
    yield Finding("updates", "ok", passes + source)
    if training.streaming:
        why = why_whole_updates(config, ranks=trainer_ranks(config), leased=config.placement.sharing == "lease")
        said = f"with all of its samples: {why}" if why else "with the first of its samples"
        yield Finding("streaming", "ok", f"an update begins {said}")
    longest = -(-spec.max_steps // (form.chunk * config.rollout.action_repeat))
    longest = min(longest, config.rollout.segment_steps or longest)
    steps = training.batch_size * longest
    least = training.epochs * training.require_batches * config.freshness.sync_interval  # optimizer steps of a version
    one_pass = least == 1 != defaults.get("epochs")  # language models declare one epoch
    if one_pass and (not training.minibatch_steps or steps <= training.minibatch_steps):
        yield Finding(
            "optimizer steps",
            "note",
            f"training.epochs = 1, minibatch_steps = {training.minibatch_steps}: an update of at most {steps:,} chunk "
            "steps is one optimizer step, so policies learn slowly",
            "set training.epochs to 4 to 10 and training.minibatch_steps to 64 or 256, unless one step is meant",
        )
    if training.batch_size < _FEW_SAMPLES or steps < _FEW_STEPS:
        enough = max(2 * _FEW_SAMPLES, -(-_FEW_STEPS // longest))
        yield Finding(
            "samples",
            "note",
            f"training.mini_batch_samples = {training.mini_batch_samples}: an update has {training.batch_size} samples "
            f"of at most {steps:,} chunk steps together, so its gradient is mostly noise",
            f"raise training.mini_batch_samples to {-(-enough // training.require_batches)} or more",
        )
    if (
        algorithm.value.coef
        and getattr(config.policy, "value_detach", True) is False
        and type(config.policy).model_fields["value_detach"].default  # language models share it by default
    ):
        yield Finding(
            "value loss",
            "note",
            "policy.value_detach = False: the value loss changes the network that acts, which destroyed small policies",
            "set policy.value_detach to true, or lower algorithm.value.coef",
        )


def scale_findings(config: RunConfig, rows: Mapping[str, NDArray[Any]]) -> Iterator[Finding]:
    """A note if observations are large and the policy could normalise them. rows: first observations by name."""
    if getattr(config.policy, "normalize_observations", True):
        return
    sizes = {name: float(abs(x).max()) for name, x in rows.items() if x.dtype.kind == "f" and x.size}
    large = max(sizes, key=lambda name: sizes[name], default="")
    if large and sizes[large] > _LARGE:
        yield Finding(
            "observations",
            "note",
            f"the observation {large} has entries of {sizes[large]:.4g}, from which small networks may learn slowly",
            "try policy.normalize_observations=true",
        )


def _unchanged(declared: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Dotted names of the declared defaults that the configuration keeps."""
    names = []
    for name, value in declared.items():
        if isinstance(value, Mapping):
            names += [f"{name}.{inner}" for inner in _unchanged(value, found[name])]
        elif found[name] == value:
            names.append(name)
    return names
