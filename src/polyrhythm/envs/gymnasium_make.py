"""Makes one Gymnasium environment from a registered id, without Gymnasium's checks, applies user wrappers, and checks
the form of what its reset and step return. Imports Gymnasium."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from polyrhythm.conformance import own_place, raised
from polyrhythm.envs.gymnasium_spaces import Observations
from polyrhythm.envs.mujoco import offer_gl_backend
from polyrhythm.errors import ConfigError, MissingError, pip_install

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
    """Gymnasium's spec of an id. ConfigError, beginning with the setting `where`: there is none; MissingError: its
    package is known and not installed."""
    offer_gl_backend()  # before a module imports MuJoCo
    # An id of the form module:id imports the module first, which registers it.
    module, _, name = env_id.rpartition(":")
    try:
        if module:
            __import__(module)
        return gymnasium.spec(name)
    except ImportError as error:
        package, _ = _HOMES.get(module, ("", ()))
        if package and isinstance(error, ModuleNotFoundError) and error.name == module:
            command = pip_install(shlex.quote(package))
            raise MissingError(f"{where}: the package {package} is not installed; run: {command}") from error
        fix = f"install {module}, or run this in the folder of {module.partition('.')[0]}.py"
        raise ConfigError(f"{where}: {module} cannot be imported ({error}); {fix}") from error
    except gymnasium.error.Error as error:
        raise ConfigError(f"{where}: no such Gymnasium environment ({error}); {_near(module, name)}") from error


def _near(module: str, name: str) -> str:
    """Remedy for an unregistered id: the nearest registered one, or the module to import."""
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
    spec = find_registered(env_id, where)
    try:
        env: gymnasium.Env[Any, Any] = gymnasium.make(
            spec.id, max_episode_steps=max_steps or None, disable_env_checker=True, **kwargs
        )
    except (gymnasium.error.Error, TypeError) as error:
        raise ConfigError(f"{where}: cannot be made with kwargs {dict(kwargs)} ({error})") from error
    return checked_inside(env, where)


def import_address(address: str, where: str) -> Any:
    """What `module:NAME` names. ConfigError, beginning with the setting `where`: it cannot be imported."""
    module, _, name = address.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"{where} = {address}: cannot be imported ({type(error).__name__}: {error}){own_place(error)}; write "
            "an importable module:function or module:Class"
        ) from error


def apply_wrapper(
    env: gymnasium.Env[Any, Any], address: str, kwargs: Mapping[str, Any], where: str
) -> gymnasium.Env[Any, Any]:
    """Apply the wrapper `module:function` or `module:Class` to `env`. ConfigError, beginning with `where`: it fails."""
    wrapper = import_address(address, where)
    try:
        found = wrapper(env, **kwargs)
    except Exception as error:
        raise ConfigError(f"{where} = {address}: it {raised(error)}; correct it, or its kwargs") from error
    if not isinstance(found, gymnasium.Env):
        raise ConfigError(f"{where} = {address}: it returned {type(found).__name__}; return an environment")
    return found


#: Most characters quoted of a returned value.
_QUOTED = 80


class CheckedForms(gymnasium.Wrapper[Any, Any, Any, Any]):  # type: ignore[misc]
    """Wrapper that raises ConfigError for results that violate Gymnasium's interface.

    where: setting that begins the error. A reward is one number, a flag one bool or 0 or 1; each may be a numpy scalar,
    or an array of shape () or (1,). observations: compare them with the observation space, except those of `drop`, and
    convert them to its dtypes.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], where: str, *, observations: bool = False, drop: Sequence[str] = ()
    ) -> None:
        super().__init__(env)
        self._where = where
        self._observations = Observations(env.observation_space, where, drop=drop) if observations else None
        try:
            inspect.signature(env.reset).bind(seed=0, options=None)
        except TypeError:
            raise ConfigError(
                f"{where}: its reset does not take seed and options, as in the old gym; define reset(self, *, "
                "seed=None, options=None) and seed its random numbers there"
            ) from None
        except ValueError:
            pass  # compiled code has no signature

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        found = self.env.reset(seed=seed, options=options)
        if not (isinstance(found, tuple | list) and len(found) == 2 and _is_info(found[1])):
            raise self._unlike("reset", found, "(observation, info)")
        observation, info = found
        if self._observations is not None:
            observation = self._observations.declared(observation)
        return observation, info or {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        found = self.env.step(action)
        if not (isinstance(found, tuple | list) and len(found) == 5 and _is_info(found[4])):
            raise self._unlike("step", found, "(observation, reward, terminated, truncated, info)")
        observation, reward, terminated, truncated, info = found
        reward = self._one("reward", reward, "biuf") if type(reward) is not float else reward
        terminated = self._flag("terminated", terminated) if type(terminated) is not bool else terminated
        truncated = self._flag("truncated", truncated) if type(truncated) is not bool else truncated
        if self._observations is not None:
            observation = self._observations.declared(observation)
        return observation, reward, terminated, truncated, info or {}

    def _one(self, name: str, value: Any, kinds: str) -> Any:
        if isinstance(value, np.floating):
            return float(value)
        try:
            array = np.asarray(value)
        except (TypeError, ValueError):
            array = np.asarray(None)
        if array.shape not in ((), (1,)) or array.dtype.kind not in kinds:
            what = "one number" if name == "reward" else "True or False"
            raise ConfigError(f"{self._where}: step returned {name} = {_quoted(value)}; return {what}")
        return array.item()

    def _flag(self, name: str, value: Any) -> bool:
        if isinstance(value, np.bool_):
            return bool(value)
        found = self._one(name, value, "biu")
        if found not in (0, 1):
            raise ConfigError(f"{self._where}: step returned {name} = {_quoted(value)}; return True or False")
        return bool(found)

    def _unlike(self, call: str, found: Any, form: str) -> ConfigError:
        what = f"{len(found)} values: " if isinstance(found, tuple | list) else ""
        what += _quoted(found)
        return ConfigError(f"{self._where}: {call} returned {what}; return {form}, not the form of the old gym")


def checked_inside(env: gymnasium.Env[Any, Any], where: str) -> gymnasium.Env[Any, Any]:
    """Insert `CheckedForms` below the wrappers of `gymnasium.make`, which would themselves fail on other forms."""
    layer = env
    while isinstance(layer, gymnasium.Wrapper) and not isinstance(layer, gymnasium.wrappers.OrderEnforcing):
        layer = layer.env
    if not isinstance(layer, gymnasium.Wrapper):
        return CheckedForms(env, where)
    layer.env = CheckedForms(layer.env, where)
    return env


def _is_info(value: Any) -> bool:
    return type(value) is dict or value is None or isinstance(value, Mapping)


def _quoted(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"
