"""Loads the initial weights given by `init_from` and checks that they fit the policy."""

from __future__ import annotations

from pathlib import Path

from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import RunFolderError
from polyrhythm.pipeline.persistence.checkpoints import load_policy, read_policy_settings
from polyrhythm.pipeline.persistence.resume_rules import as_written, differences
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import load_published
from polyrhythm.policies.traits import policy_traits


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
