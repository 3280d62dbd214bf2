"""Prepares a run's initial weights once, from `init_from` or by its warm start; a resumed run reads its folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import RunFolderError
from polyrhythm.observe import MetricsWriter
from polyrhythm.pipeline.persistence.checkpoints import POLICY_FILE, load_policy, read_policy_settings, save_policy
from polyrhythm.pipeline.persistence.phases import PhaseJournal
from polyrhythm.pipeline.persistence.resume_rules import as_written, differences
from polyrhythm.plugin import load
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import load_published, published_state
from polyrhythm.policies.traits import policy_traits
from polyrhythm.specs import EnvSpec

log = logging.getLogger(__name__)


def prepare_initial_policy(
    checked: tuple[RunConfig, EnvSpec, Policy], folder: Path, progress: PhaseJournal, metrics: MetricsWriter
) -> int:
    """Load or learn the policy's initial weights; return their version."""
    config, spec, policy = checked
    file = folder / POLICY_FILE
    if progress.result("warm_start") is not None:
        _, weights, version = load_policy(file)
        give_weights(policy, weights, file)
        return version
    learned: dict[str, float] = {}
    if config.init_from:
        load_init_weights(config, policy)
        log.info("initial weights: %s", config.init_from)
    elif config.supervised is not None:
        learned = load("pipeline", "demonstrations").learn(checked, folder, progress, metrics)
    save_policy(published_state(as_module(policy)), config, file, 0, spec)
    progress.commit("warm_start", learned)
    return 0


def give_weights(policy: Policy, weights: Mapping[str, Tensor], origin: Path) -> None:
    """Load weights of the policy's own run, read from `origin`. RunFolderError: they no longer fit."""
    try:
        load_published(as_module(policy), weights)
    except ValueError as error:
        raise RunFolderError(
            f"{origin}: {error}; if you changed the code of the policy, undo that, or start another run"
        ) from error


def check_init_settings(config: RunConfig) -> None:
    """Raise RunFolderError if the existing weights of `init_from` belong to other settings; reads no weights."""
    path = Path(config.init_from)
    _refuse_other_settings(config, validate(read_policy_settings(path), origin=str(path)))


def _refuse_other_settings(config: RunConfig, theirs: RunConfig) -> None:
    saved, current = (section.model_dump(mode="json") for section in (theirs.policy, config.policy))
    differing = differences(saved, current, "policy.", frozenset())
    if differing:
        key, has, own = differing[0]
        raise RunFolderError(
            f"init_from = {config.init_from}: {key} is {as_written(own)} here but {as_written(has)} in the policy of "
            "those weights; make them equal, or name other weights"
        )


def load_init_weights(config: RunConfig, policy: Policy) -> None:
    """Load the weights of `init_from` into the policy.

    Frozen tensors that the file lacks come from the checkpoint, or from the seed. RunFolderError, with the policy
    unchanged: there are no weights, or they belong to other settings.
    """
    path = Path(config.init_from)
    if not path.exists():
        raise RunFolderError(f"init_from = {path}: it does not exist; name the folder of a run or its policy.pt")
    theirs, weights, _ = load_policy(path)
    _refuse_other_settings(config, theirs)
    part = policy_traits(policy).publishes_part and len(weights) < len(policy.state_dict())
    if part and not getattr(config.policy, "checkpoint", "") and theirs.seed != config.seed:
        raise RunFolderError(
            f"init_from = {path}: seed is {config.seed} here but {theirs.seed} there, and that file lacks the frozen "
            "tensors, which are drawn from the seed; make the seeds equal, or give both runs a policy.checkpoint"
        )
    try:
        load_published(as_module(policy), weights)
    except ValueError as error:
        raise RunFolderError(f"init_from = {path}: {error}; name weights of a policy for this environment") from error
