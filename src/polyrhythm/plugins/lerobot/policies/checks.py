"""Refuses to train a policy of LeRobot that only acts, and asks for LeRobot's Python, before anything is started."""

import importlib.util

from polyrhythm.checks import Check, CheckContext
from polyrhythm.errors import ConfigError, MissingError


def check_use(context: CheckContext) -> str | tuple[()]:
    """ConfigError: the recipe trains it; MissingError: its Python or its folder is missing."""
    policy = context.config.policy
    if context.config.policy_type not in ("lerobot", "lerobot_flow"):
        return ()
    from polyrhythm.plugins.lerobot.policies.folder import Description, has_no_flow, no_flow_head, not_trained
    from polyrhythm.plugins.lerobot.policies.settings import LerobotSettings, find_python
    from polyrhythm.policies.traits import released_folder
    from polyrhythm.sources import local_folder

    checkpoint = released_folder(policy)
    kind = Description.of(local_folder(checkpoint, what="policy.checkpoint")).kind
    if not isinstance(policy, LerobotSettings):
        if has_no_flow(kind):
            raise ConfigError(no_flow_head(checkpoint, kind))
        if importlib.util.find_spec("lerobot") is None:
            raise MissingError(
                "policy.type = lerobot_flow: this Python has no lerobot; install Polyrhythm in one that has "
                "lerobot[smolvla], and run it there"
            )
        return f"{kind} in this Python"
    if context.config.training.versions or context.config.supervised is not None:
        raise ConfigError(not_trained(checkpoint, kind))
    return f"{kind} in {find_python(policy.python)}"


CHECKS = (Check("policy of LeRobot", "policy", "machine", check_use),)
