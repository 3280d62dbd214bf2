"""Makes one Gymnasium environment from a registered id, without Gymnasium's checks, and applies user wrappers."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyrhythm.conformance import own_place, raised
from polyrhythm.envs.mujoco import offer_gl_backend
from polyrhythm.errors import ConfigError, pip_install

if TYPE_CHECKING:
    import gymnasium


#: Minimum similarity of a suggested name, 0..1.
_NEAR = 0.7
#: Module → its package, and the prefixes of the ids that it registers without a namespace.
_HOMES = {
    "minigrid": ("minigrid", ("MiniGrid-", "BabyAI-")),
    "panda_gym": ("panda-gym", ("Panda",)),
    "gymnasium_robotics": (
        "gymnasium-robotics",
        ("Fetch", "HandReach", "HandManipulate", "AdroitHand", "AntMaze", "PointMaze", "FrankaKitchen"),
    ),
    "ale_py": ("ale-py", ("ALE/",)),
    "shimmy": ("shimmy[dm-control]", ("dm_control/",)),
}


def find_registered(env_id: str, where: str) -> gymnasium.envs.registration.EnvSpec:
    """Gymnasium's spec of an id. ConfigError, beginning with the setting `where`: there is none."""
    import gymnasium

    offer_gl_backend()  # before a module imports MuJoCo
    # An id of the form module:id imports the module first, which registers it.
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            __import__(module)
        return gymnasium.spec(name)
    except ImportError as error:
        fix = f"install {module}, or run this in the folder of {module.partition('.')[0]}.py"
        raise ConfigError(f"{where}: {module} cannot be imported ({error}); {fix}") from error
    except gymnasium.error.Error as error:
        raise ConfigError(f"{where}: no such Gymnasium environment ({error}); {_near(module, name)}") from error


def _near(module: str, name: str) -> str:
    """Remedy for an unregistered id: the nearest registered one, or the module to import."""
    import gymnasium

    names = {
        known.rpartition("/")[2]: known for known in sorted(gymnasium.registry, key=lambda known: "/" not in known)
    }
    near = difflib.get_close_matches(name.rpartition("/")[2], names, n=1, cutoff=_NEAR)
    if module:
        return f"the nearest is {names[near[0]]}" if near else f"{module} registers no similar one"
    namespace = name.rpartition("/")[0]
    homes = ((home, package) for home, (package, begins) in _HOMES.items() if name.startswith(begins))
    home, package = next(homes, (namespace.replace("-", "_"), namespace.replace("_", "-")))
    if home.isidentifier() and importlib.util.find_spec(home) is not None:
        return f"write {home}:{name}, so that {home} is imported, which registers it"
    if home:
        return f"install the package that registers it, such as by {pip_install(package)}, and write {home}:{name}"
    if near:
        return f"the nearest is {names[near[0]]} (or write module:ID with the module that registers it)"
    return (
        "write module:ID with the module that registers it (what a script registers itself is unknown to the run's "
        "processes, unless launcher=inline)"
    )


def make_registered(env_id: str, kwargs: Mapping[str, Any], max_steps: int, where: str) -> gymnasium.Env[Any, Any]:
    """Make one environment, truncated after `max_steps` (0: the registered limit) and checked (`CheckedForms`).

    ConfigError, beginning with the setting `where`: the id is unknown, or kwargs do not fit.
    """
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
    """Apply the wrapper `module:function` or `module:Class` to `env`. ConfigError, beginning with `where`: it fails."""
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
