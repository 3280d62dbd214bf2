"""Makes one Gymnasium environment from a registered id, without Gymnasium's checks, and applies user wrappers."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyrhythm.conformance import own_place, raised
from polyrhythm.errors import ConfigError

if TYPE_CHECKING:
    import gymnasium


def find_registered(env_id: str, where: str) -> gymnasium.envs.registration.EnvSpec:
    """Gymnasium's spec of an id. Raises ConfigError, beginning with the setting `where`, if there is none."""
    import gymnasium

    try:
        # An id of the form module:id imports the module first, which registers it.
        module, _, name = env_id.rpartition(":")
        if module:
            __import__(module)
        return gymnasium.spec(name)
    except ImportError as error:
        fix = f"install {module}, or run this in the folder of {module.partition('.')[0]}.py"
        raise ConfigError(f"{where}: {module} cannot be imported ({error}); {fix}") from error
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(env_id, gymnasium.registry, n=1, cutoff=0.0)[0]
        raise ConfigError(f"{where}: no such Gymnasium environment ({error}); the nearest is {near}") from error


def make_registered(env_id: str, kwargs: Mapping[str, Any], max_steps: int, where: str) -> gymnasium.Env[Any, Any]:
    """Make one environment, truncated after `max_steps`, the registered limit if 0, and checked (`CheckedForms`).
    Raises ConfigError, beginning with the setting `where`, for an unknown id or bad kwargs."""
    import gymnasium

    from polyrhythm.envs.gymnasium_forms import checked_inside

    spec = find_registered(env_id, where)
    try:
        env: gymnasium.Env[Any, Any] = gymnasium.make(
            spec.id, max_episode_steps=max_steps or None, disable_env_checker=True, **kwargs
        )
    except (gymnasium.error.Error, TypeError) as error:
        raise ConfigError(f"{where}: cannot be made with kwargs {dict(kwargs)} ({error})") from error
    return checked_inside(env, where)


def apply_wrapper(
    env: gymnasium.Env[Any, Any], address: str, kwargs: Mapping[str, Any], where: str
) -> gymnasium.Env[Any, Any]:
    """Apply the wrapper `module:function` or `module:Class` to `env`. Raises ConfigError, beginning with `where`."""
    import gymnasium

    module, _, name = address.partition(":")
    try:
        wrapper = getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"{where} = {address}: cannot be imported ({type(error).__name__}: {error}){own_place(error)}; write "
            "an importable module:function or module:Class"
        ) from error
    try:
        found = wrapper(env, **kwargs)
    except Exception as error:
        raise ConfigError(f"{where} = {address}: it {raised(error)}; correct it, or its kwargs") from error
    if not isinstance(found, gymnasium.Env):
        raise ConfigError(f"{where} = {address}: it returned {type(found).__name__}; return an environment")
    return found
