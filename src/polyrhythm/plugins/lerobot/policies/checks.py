"""Refuses to train a policy of LeRobot, and asks for its Python, before anything is started."""

from polyrhythm.checks import Check, CheckContext
from polyrhythm.errors import ConfigError


def check_use(context: CheckContext) -> str | tuple[()]:
    """ConfigError: the recipe trains it; MissingError: its Python or its folder is missing."""
    if context.config.policy_type != "lerobot":
        return ()
    from polyrhythm.plugins.lerobot.policies.settings import LerobotSettings, find_python, not_trained

    policy = context.config.policy
    assert isinstance(policy, LerobotSettings)
    description = policy.description()
    if context.config.training.versions or context.config.supervised is not None:
        raise ConfigError(not_trained(policy, description))
    return f"{description.kind} in {find_python(policy.python)}"


CHECKS = (Check("policy of LeRobot", "policy", "machine", check_use),)
