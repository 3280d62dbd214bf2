"""The weights that a run is told to begin with (`init_from`), and whether they are of its policy."""

from __future__ import annotations

from pathlib import Path

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import RunFolderError
from polyrhythm.pipeline.persistence.checkpoints import load_policy
from polyrhythm.pipeline.persistence.resume_rules import differences
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.runtime.memory.tensors import apply_state


def load_init_weights(config: RunConfig, policy: Policy) -> None:
    """Give the policy the weights in `init_from`.

    Raises RunFolderError if there are none, or they are of a policy with other settings; then nothing has changed.
    """
    path = Path(config.init_from)
    if not path.exists():
        raise RunFolderError(f"init_from = {path} is not there; name the folder of a run or its policy.pt")
    theirs, weights, _ = load_policy(path)
    found, wanted = (section.model_dump(mode="json") for section in (theirs.policy, config.policy))
    differing = differences(found, wanted, "policy.")
    if differing:
        key, has, asked = differing[0]
        raise RunFolderError(
            f"init_from = {path}: {key} is {asked} here but {has} in the policy that those weights belong to; "
            "make that equal, or name other weights"
        )
    try:
        apply_state(as_module(policy), weights)
    except ValueError as error:
        raise RunFolderError(f"init_from = {path}: {error}; name weights of a policy for this environment") from error
