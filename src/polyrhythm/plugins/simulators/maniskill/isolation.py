"""Resets of several rows of one ManiSkill environment by one call, each as if its row were reset alone.

ManiSkill draws the initial states of rows that are reset together from one generator, which has the seed of the first
row, and lets a task change what belongs to other rows. Within `RowDraws` every row draws from generators of its own,
on the host, so that a seed means the same on the CPU and on a GPU. `OtherRows` puts back what a reset changed of rows
that it does not reset: counters of the task, targets of controllers.

Invariant: the state of a row after a reset follows from its seed and episode number alone; a row that is not reset is
unchanged. `World` verifies both when it is built, for its task.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode


class NotByRowError(Exception):
    """A task draws numbers that do not belong to single rows; the message names the draw."""


#: Draws of a given shape, and the same with the shape of a tensor.
_SHAPED = {torch.rand: torch.rand, torch.randn: torch.randn, torch.randint: torch.randint}
_LIKE = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}
#: Draws into a tensor.
_IN_PLACE = {Tensor.uniform_: "uniform_", Tensor.normal_: "normal_"}
_OTHER = (torch.randperm, torch.normal, torch.bernoulli, torch.multinomial, torch.poisson, torch.randint_like)


class RowDraws(TorchFunctionMode):
    """While active, torch's draws are made row by row: a draw [b, ...] for b rows has one part [1, ...] of each row's
    generator, as if that row were reset alone. seeds: of the rows, in their order in the environment; generators: as
    many at least, to be seeded; none: new ones."""

    def __init__(self, seeds: Sequence[int], generators: Sequence[torch.Generator] = ()) -> None:
        super().__init__()
        self._seeds = [int(seed) for seed in seeds]
        self._generators = list(generators[: len(seeds)]) or [torch.Generator() for _ in seeds]
        for generator, seed in zip(self._generators, self._seeds, strict=True):
            generator.manual_seed(seed)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if given.get("generator") is not None:
            return func(*args, **given)
        if func in _SHAPED:
            shape = tuple(func(*args, **{**given, "device": "meta"}).shape)
            return self._draw(func, shape, _bounds(func, args, given), given)
        if func in _LIKE:
            like = args[0]
            return self._draw(_LIKE[func], tuple(like.shape), (), {"dtype": like.dtype, "device": like.device, **given})
        if func in _IN_PLACE:
            target, *bounds = args
            self._check(func.__name__, tuple(target.shape))
            drawn = [torch.empty(1, *target.shape[1:], dtype=target.dtype) for _ in self._generators]
            for part, generator in zip(drawn, self._generators, strict=True):
                getattr(part, _IN_PLACE[func])(*bounds, **given, generator=generator)
            return target.copy_(torch.cat(drawn))
        if func in _OTHER:
            raise NotByRowError(f"torch.{func.__name__}")
        return func(*args, **given)

    def __enter__(self) -> Self:
        from mani_skill.envs.utils.randomization import UniformPlacementSampler

        original = UniformPlacementSampler.sample
        self._sampler, self._original = UniformPlacementSampler, original
        UniformPlacementSampler.sample = lambda *given, **named: self._place(original, *given, **named)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._sampler.sample = self._original

    def _place(
        self, original: Any, sampler: Any, radius: Any, max_trials: int, append: bool = True, **_: Any
    ) -> Tensor:
        """In place of ManiSkill's sampler of positions apart from each other, which draws for all rows until each has
        one: a row stops at its own first."""
        before, rows, every = sampler.fixture_positions, [], self._generators
        if sampler.batch_size != len(every):
            raise NotByRowError(f"{sampler.batch_size} positions for {len(every)} rows")
        for row, generator in enumerate(every):
            one = copy.copy(sampler)
            one.batch_size, one.fixture_positions = 1, None if before is None else before[:, row : row + 1]
            self._generators = [generator]
            rows.append(original(one, radius, max_trials, append=False))
        self._generators = every
        drawn = torch.cat(rows)
        if append:
            radii = torch.as_tensor(radius, dtype=torch.float32).reshape(1)
            sampler.fixture_positions = drawn[None] if before is None else torch.cat([before, drawn[None]])
            sampler.fixtures_radii = radii if before is None else torch.cat([sampler.fixtures_radii, radii])
        return drawn

    def _draw(self, func: Any, shape: tuple[int, ...], bounds: tuple[Any, ...], given: Mapping[str, Any]) -> Tensor:
        self._check(func.__name__, shape)
        own = (1, *shape[1:])
        parts = [func(*bounds, own, dtype=given.get("dtype"), generator=generator) for generator in self._generators]
        drawn, device = torch.cat(parts), given.get("device")
        return drawn if device is None else drawn.to(device)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if not shape or shape[0] != len(self._generators):
            raise NotByRowError(f"{name} of {list(shape)} numbers for {len(self._generators)} rows")

    def begin(self, env: Any, rows: Sequence[int]) -> None:
        """In place of ManiSkill's `_set_episode_rng`: seed numpy's generators of these rows alone. New ones would cost
        more than all else, as numpy seeds each from the system first."""
        env._episode_seed = np.array(env._episode_seed, np.int64)
        env._episode_seed[list(rows)] = self._seeds
        states = [env._batched_episode_rng[int(row)] for row in rows]
        for state, seed in zip(states, self._seeds, strict=True):
            state.seed(seed)
        env._episode_rng = _RowRandom(states)


def _bounds(func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[Any, ...]:
    """low and high of a `randint`; () for the others."""
    if func is not torch.randint:
        return ()
    found = args if "size" in given else args[:-1]
    named = tuple(given[name] for name in ("low", "high") if name in given)
    return (*found, *named)


class _RowRandom:
    """numpy's RandomState for draws [b, ...] of b rows, each row's part from its own."""

    #: Position of `size` among the arguments.
    _SIZES: Mapping[str, int] = {"normal": 2, "uniform": 2, "randint": 2, "choice": 1, "random_sample": 0, "random": 0}

    def __init__(self, states: Sequence[np.random.RandomState]) -> None:
        self._states = states

    def __getattr__(self, name: str) -> Callable[..., NDArray[Any]]:
        if name not in self._SIZES:
            raise NotByRowError(f"_episode_rng.{name}")

        def draw(*args: Any, **given: Any) -> NDArray[Any]:
            at = self._SIZES[name]
            size = given.pop("size", args[at] if len(args) > at else None)
            shape = tuple(np.atleast_1d(size)) if size is not None else ()
            if not shape or shape[0] != len(self._states):
                raise NotByRowError(f"_episode_rng.{name} of size {size} for {len(self._states)} rows")
            own = (1, *shape[1:])
            return np.concatenate([getattr(state, name)(*args[:at], size=own, **given) for state in self._states])

        return draw


#: Largest part of a row, in bytes, of a tensor that is put back. Larger ones, such as photographs behind a scene, are
#: not counters; a copy of them at each reset would cost more than the reset.
_LARGEST = 4096
#: Attributes of an environment that are no state of its rows.
_NOT_STATE = frozenset({"_init_raw_obs", "_init_raw_state", "_last_obs"})


def row_tensors(env: Any) -> dict[str, Tensor]:
    """Tensors [rows, ...] that the task and its controllers keep, by their path: what a state of the scene lacks."""
    found: dict[str, Tensor] = {}
    _collect(found, "", {name: value for name, value in vars(env).items() if name not in _NOT_STATE}, env.num_envs)
    controller = getattr(env.agent, "controller", None)
    for name, one in getattr(controller, "controllers", {"": controller}).items():
        if one is not None:
            _collect(found, f"controller.{name}.", vars(one), env.num_envs)
    return found


def _collect(found: dict[str, Tensor], prefix: str, values: Mapping[str, Any], rows: int) -> None:
    from mani_skill.utils.structs import Pose

    for name, value in values.items():
        if isinstance(value, dict):
            _collect(found, f"{prefix}{name}.", {str(key): one for key, one in value.items()}, rows)
            continue
        tensor = value.raw_pose if isinstance(value, Pose) else value
        by_row = isinstance(tensor, Tensor) and tensor.ndim and len(tensor) == rows
        if by_row and tensor[0].numel() * tensor.element_size() <= _LARGEST:
            found[prefix + name] = tensor


class OtherRows:
    """Keeps `row_tensors` of rows that a reset is not to change."""

    def __init__(self, env: Any, rows: Sequence[int]) -> None:
        self._others = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
        self._others[list(rows)] = False
        self._kept = {name: tensor.clone() for name, tensor in row_tensors(env).items()}

    def restore(self, env: Any) -> None:
        put_rows(env, self._kept, self._others)


def put_rows(env: Any, kept: Mapping[str, Tensor], mask: Tensor) -> None:
    """Write the rows of `mask` [rows] of kept `row_tensors` back in place."""
    for name, now in row_tensors(env).items():
        before = kept.get(name)
        if before is not None and before.shape == now.shape:
            at = mask.to(now.device)
            now[at] = before.to(now.device, now.dtype)[at]


def sim_state(env: Any) -> Tensor:
    """Positions and velocities of all rows, [rows, N]."""
    parts = env.get_state_dict()
    found = [*parts.get("actors", {}).values(), *parts.get("articulations", {}).values()]
    return torch.hstack(found) if found else torch.zeros(env.num_envs, 0)


def use_own_turns(env: Any) -> None:
    """Have RLinf's `_reset_bbox` read each object's turn in its own row; as it is, the i-th row that is reset gets that
    of row i of the scene, and with it a wrong box for its success."""
    original = getattr(env, "_reset_bbox", None)
    if original is None:
        return

    def reset_boxes(env_idx: Tensor, carrots: Sequence[Any], plates: Sequence[Any], *names: Any) -> None:
        def own(actors: Sequence[Any]) -> list[Any]:
            turns = [actor.pose.q[row] for actor, row in zip(actors, env_idx.tolist(), strict=True)]
            return [SimpleNamespace(pose=SimpleNamespace(q={place: turn})) for place, turn in enumerate(turns)]

        original(env_idx, own(carrots), own(plates), *names)

    env._reset_bbox = reset_boxes


def first_differing(before: Mapping[str, Tensor], after: Mapping[str, Tensor], rows: slice) -> str:
    """Name of the first tensor that differs in these rows by more than the rounding of places in a scene; "" for none.
    One that a reset has made for other rows than all is no state."""
    for name, tensor in before.items():
        if (other := after.get(name)) is not None and other.shape == tensor.shape:
            one, two = tensor[rows].double(), other[rows].double()
            if not torch.allclose(one, two, atol=1e-3, equal_nan=True):
                return name
    return ""
