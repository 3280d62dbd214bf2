"""Checks of the environment contract, and the single reset that precedes every training.

All calls go through `CheckedEnv`, which announces each call, so that the caller can apply a timeout, and turns
exceptions into a ContractViolation with the user's source line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from polyrhythm.conformance import ContractCheck, ContractViolation, Finding, Note, run_checks
from polyrhythm.envs.base import BATCH_METHODS, SETTINGS_METHODS, EnvSettings, FullEnvSettings, traits_of
from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.trial.checked_env import Arrays, CheckedEnv
from polyrhythm.readable import counted
from polyrhythm.specs import EnvSpec, split_seed
from polyrhythm.specs.hashing import mix

#: Rows of a checked batch: one to act on, one that must stay unchanged.
ROWS = 2
#: Seconds after which an episode is not run to its end.
_EPISODE_S = 60.0
#: Steps over which equal seeds are compared.
_REPLAYED = 5


def observe_reset(
    settings: EnvSettings,
    rows: int,
    about_to: Callable[[str], None],
    then: Callable[[CheckedEnv, Arrays], None] = lambda *_: None,
) -> tuple[EnvSpec, Arrays]:
    """The spec, and the observation of two rows after a reset, or of one row after two resets if there is only one.

    rows: of an env batch in the run; then: called with the batch and the observation before the batch is closed.
    """
    env = _build(settings, rows, about_to)
    every = range(env.rows)
    seen = []
    try:
        for seed in range(1, 2 if env.rows > 1 else 3):
            env.reset(every, [0] * env.rows, [trial_seed(seed + row) for row in every])
            seen.append(env.observe(every))
        first = {name: np.concatenate([part[name] for part in seen])[:ROWS] for name in env.spec.observation}
        then(env, first)
    except BaseException:
        with suppress(ContractViolation, PolyrhythmError):  # the first error is reported
            env.close()
        raise
    env.close()
    return env.spec, first


def trial_seed(number: int) -> int:
    """A 62-bit seed like those of training, so that an environment that accepts only smaller ones is found before the
    run."""
    return split_seed(mix(number), held_out=False)


def find_memory(
    settings: EnvSettings, env: CheckedEnv, first: Arrays, about_to: Callable[[str], None]
) -> tuple[str, str]:
    """Find a reset whose result depends on earlier episodes.

    Returns the responsible setting ("" for the environment itself) and the problem with its fix, or ("", ""). first:
    observation of `observe_reset`. The environment is not stepped, since that could break what a robot moves; a wrapper
    that remembers rewards is therefore recognized by its name.
    """
    full = cast(FullEnvSettings, settings)
    wrappers = full.wrappers if traits_of(settings).wraps else ()
    for place, wrapper in enumerate(wrappers):
        if wrapper.apply.rpartition(":")[2] == "NormalizeReward":
            return f"env.wrappers.{place} = {wrapper.apply}", (
                "it remembers earlier episodes, so equal seeds give other rewards, and returns are on no fixed scale; "
                "leave it out, and set algorithm.normalize_rewards"
            )
    if not (name := _remembered(env, first)):
        return "", ""
    problem = f"equal task and seed gave another {name!r} in a later episode"
    count = 0
    if wrappers:
        parts = (full.model_copy(update={"wrappers": wrappers[:kept]}) for kept in range(len(wrappers)))
        count = len(wrappers)
        for place, part in enumerate(parts):
            with closing(CheckedEnv(part, env.rows, about_to)) as less:
                if _remembered(less, _begin(less)):
                    count = place
                    break
    if not count:
        fix = "draw the initial state from a generator seeded with the seed at each reset; see polyrhythm check"
        return "", f"{problem}; {fix}"
    return f"env.wrappers.{count - 1} = {wrappers[count - 1].apply}", (
        f"{problem}, as it remembers earlier ones or draws without the seed; leave it out (if it normalises, set "
        "policy.normalize_observations), or have its reset begin anew"
    )


def _remembered(env: CheckedEnv, first: Arrays) -> str:
    """Name of the array in which the last row, reset like row 0 was (`trial_seed(1)`), differs beyond rounding; "" for
    none."""
    last = env.rows - 1
    env.reset(range(env.rows), [0] * env.rows, [trial_seed(1 + last - row) for row in range(env.rows)])
    again = _row(env.observe(range(env.rows)), last)
    for name, array in _row(first, 0).items():
        if not np.allclose(array, again[name], rtol=1e-3, atol=1.0 if array.dtype == np.uint8 else 1e-6):
            return name
    return ""


def check_contract(settings: EnvSettings, rows: int, about_to: Callable[[str], None]) -> Iterator[Finding]:
    """Run all checks; yield each result as soon as it is known. rows: of an env batch in the run."""
    made: list[CheckedEnv] = []

    def build() -> str:
        env = _build(settings, rows, about_to)
        made.append(env)
        return f"{counted(env.rows, 'row')}, {counted(len(env.spec.tasks), 'task')}, max_steps {env.spec.max_steps}"

    yield from run_checks({"build": build})
    if made:
        yield from run_checks(env_checks(made[0]))
        yield from run_checks({"close": made[0].close})


def _build(settings: EnvSettings, rows: int, about_to: Callable[[str], None]) -> CheckedEnv:
    """Build a batch of two rows, or of the run's rows if those are fewer or the environment refuses two."""
    try:
        return CheckedEnv(settings, min(ROWS, rows), about_to)
    except ContractViolation:
        if rows <= ROWS:
            raise
        return CheckedEnv(settings, rows, about_to)


def env_checks(env: CheckedEnv) -> dict[str, ContractCheck]:
    """Checks of a batch by name; each begins with a reset."""
    checks: dict[str, Callable[[CheckedEnv], str | None]] = {
        "observe": check_observe,
        "step": check_step,
        "same seed, same state": check_seeds,
    }
    if env.rows > 1:
        checks |= {
            "rows in the order asked": check_order,
            "rows reset alone": check_reset_rows,
            "rows step alone": check_step_rows,
        }
    checks |= {"end of an episode": check_end, "success": check_success, "tasks": check_tasks, "traits": check_traits}
    return {name: partial(check, env) for name, check in checks.items()}


def check_observe(env: CheckedEnv) -> str:
    """Check that `observe` writes every entry of `out` in place with finite numbers, and repeatably."""
    first = _begin(env)
    again = env.observe(range(env.rows))
    for name, array in first.items():
        if not np.array_equal(array, again[name]):
            return Note(f"{name!r} differs when it is observed again; a lock-step run is then not reproducible")
        if array.dtype == np.uint8 and array.size > 1 and array.max(initial=0) <= 1:
            return Note(f"{name!r} is uint8 and has only 0 and 1: if it is an image, scale it to 0..255")
    return ", ".join(f"{name} {a.dtype} {list(a.shape)}" for name, a in env.spec.observation.items())


def check_step(env: CheckedEnv) -> str:
    """Check that actions at both bounds and between them give finite rewards and flags."""
    _begin(env)
    every = range(env.rows)
    rewards = []
    for turn, actions in enumerate(_bounding_actions(env)):
        result = env.step(every, actions)
        rewards += result.reward.tolist()
        if (result.terminated | result.truncated).any():
            _begin(env, seed=turn + 2)
    env.observe(every)
    return f"rewards {min(rewards):.3g} to {max(rewards):.3g}"


def check_seeds(env: CheckedEnv) -> str:
    """Check that equal (task, seed) give equal initial states in any row and after any history, then equal rewards."""
    seed = 2**63 - 1
    first, last = range(env.rows), env.rows - 1
    env.reset(first, [0] * env.rows, [seed + row - last for row in first])  # the last row has `seed`
    initial, rewards = _row(env.observe(first), last), _replay(env, last)
    env.reset(first, [0] * env.rows, [seed - row for row in first])  # now the first row has `seed`
    again = _row(env.observe(first), 0)
    if name := _differing(initial, again):
        raise ContractViolation(
            f"the same task and seed gave another {name!r} in another row or after other episodes",
            "draw the initial state from a generator seeded with the seed at each reset",
        )
    if _replay(env, 0) != rewards:
        return Note("the same seed and actions gave other rewards: steps use randomness that reset does not seed")
    states = env.spec.initial_states
    other = (seed + 1) % states if states else 7  # another one of fixed initial states
    env.reset(first, [0] * env.rows, [other + row for row in first])
    if not _differing(initial, _row(env.observe(first), 0)):
        return Note("another seed gave the same state: is the seed used?")
    return ""


def check_order(env: CheckedEnv) -> None:
    """Check that observe(rows) writes row rows[i] at i."""
    forward = _begin(env)
    backward = env.observe(range(env.rows - 1, -1, -1))
    fix = "write row rows[i] to out[name][i]"
    if name := _differing(forward, {name: array[::-1] for name, array in backward.items()}):
        raise ContractViolation(f"observe writes {name!r} of the wrong rows", fix)
    last = env.rows - 1
    if name := _differing(_row(forward, last), _row(env.observe([last]), 0)):
        raise ContractViolation(f"observe([{last}]) writes {name!r} of another row", fix)


def check_reset_rows(env: CheckedEnv) -> str:
    """Check that resetting a row does not change the others."""
    return _check_alone(env, "reset", lambda: env.reset([0], [0], [trial_seed(99)]), alone=env.spec.reset_rows)


def check_step_rows(env: CheckedEnv) -> str:
    """Check that stepping a row does not change the others."""
    return _check_alone(env, "step", lambda: env.step([0], _actions(env, 1)), alone=env.spec.step_rows)


def _check_alone(env: CheckedEnv, call: str, change: Callable[[], object], *, alone: bool) -> str:
    if not alone:
        return f"the batch {call}s as a whole"
    before = _row(_begin(env), 1)
    change()
    if name := _differing(before, _row(env.observe(range(env.rows)), 1)):
        raise ContractViolation(
            f"{call}([0]) changes {name!r} of row 1", f"{call} only these rows, or set {call}_rows False in the spec"
        )
    return ""


def check_end(env: CheckedEnv) -> str:
    """Run an episode to its end; check that the row then stays unchanged while others step, and can be reset."""
    initial = _row(_begin(env), 0)
    every, began = range(env.rows), time.monotonic()
    rng = np.random.default_rng(0)
    running, steps, how = np.ones(env.rows, bool), 0, "max_steps"
    while running[0] and steps < env.spec.max_steps:
        rows = np.flatnonzero(running) if env.spec.step_rows else np.arange(env.rows)
        result = env.step(rows, _actions(env, len(rows), rng))
        steps += 1
        if result.terminated[0] or result.truncated[0]:
            how = "terminated" if result.terminated[0] else "truncated"
        running[rows[result.terminated | result.truncated]] = False
        if time.monotonic() - began > _EPISODE_S:
            return Note(f"{steps} steps took {_EPISODE_S:g} s; the end of an episode was not checked")
    final = _row(env.observe(every), 0)
    _check_stays(env, final)
    if steps > 1 and not _differing(initial, final):
        before = _row(_begin(env), 0)
        env.step(every, _actions(env, env.rows))
        if _differing(before, _row(env.observe(every), 0)):  # a step changes what is observed
            raise ContractViolation(
                f"after its end (step {steps}) a row shows its first observation again",
                "switch autoreset off: a row that ended is unchanged until reset",
            )
    if not env.spec.step_rows:
        env.step(every, _actions(env, env.rows))  # a row that ended gets no-ops while others run
    if env.spec.reset_rows:
        env.reset([0], [0], [trial_seed(1)])
    else:
        _begin(env)
    if name := _differing(initial, _row(env.observe(every), 0)):
        raise ContractViolation(f"after an episode the same seed gave another {name!r}", "restore all state in reset")
    return f"{how} after {steps} steps"


def check_success(env: CheckedEnv) -> str:
    """Say where the steps of all checks so far reported success, or how it can be reported."""
    if env.spec.reports_success is False:
        return "none: only the return is known"
    if not env.stepped:
        _begin(env)
        env.step(range(env.rows), _actions(env, env.rows))
    from_info = hasattr(env.settings, "success")
    if env.reports:
        key = getattr(env.inner, "success_key", "")
        return f"reported by {key} in info" if key else "reported by the steps"
    fix = "put success into info, or set env.success=KEY" if from_info else "return it in StepResult.success"
    return Note(f"the environment does not report success in any step, so only the return is known; {fix}")


def _check_stays(env: CheckedEnv, final: Arrays) -> None:
    """Check that row 0, which has ended with `final`, is unchanged after another row was reset and stepped."""
    if env.rows < 2 or not (env.spec.step_rows and env.spec.reset_rows):
        return
    env.reset([1], [0], [trial_seed(2)])
    env.step([1], _actions(env, 1))
    if name := _differing(final, _row(env.observe(range(env.rows)), 0)):
        raise ContractViolation(
            f"a row that ended changes {name!r} while another row begins and steps",
            "leave a row that ended unchanged until it is reset",
        )


def check_tasks(env: CheckedEnv) -> str:
    """Check that every task can be reset and observed."""
    for task in range(len(env.spec.tasks)):
        try:
            _begin(env, task=task)
        except ContractViolation as violation:
            problem = f"task {env.spec.tasks[task].name!r}: {violation.problem}"
            raise ContractViolation(problem, violation.fix) from violation
    return f"{counted(len(env.spec.tasks), 'task')} reset"


def check_traits(env: CheckedEnv) -> str:
    """Check that the declared methods of settings and batch exist, and that their traits hold."""
    declared, has = asdict(env.declared), asdict(env.traits)
    for what, methods in ((env.settings, SETTINGS_METHODS), (env.inner, BATCH_METHODS)):
        for trait, names in methods.items():
            lacking = [name for name in names if not callable(getattr(what, name, None))]
            if lacking and (declared[trait] or (what is env.inner and has[trait])):
                raise ContractViolation(
                    f"the trait {trait} is declared, but {type(what).__name__} has no {', '.join(lacking)}",
                    "add it, or leave the trait out",
                )
    if env.traits.async_steps and not env.spec.chunk:
        raise ContractViolation("the trait async_steps needs spec.chunk, which is 0", "set it, or leave the trait out")
    if env.traits.expert:
        _begin(env)
        found = env.expert_actions(range(env.rows))
        expected = _actions(env, env.rows).shape
        if found is not None and found.shape != expected:
            raise ContractViolation(f"the expert's actions are {found.shape}, not {expected}", "return [n,A]")
    if env.traits.discards_rows:
        env.discard(0)
        _begin(env)
    if env.traits.observes_on_device or env.traits.leaves_device:
        _check_device(env)
    if env.declared.resets_ahead:
        _check_resets_ahead(env)
    return ", ".join(name for name in declared if declared[name] or has[name]) or "none"


def _check_device(env: CheckedEnv) -> None:
    """Check that the device shows what `observe` does, and that leaving it changes nothing."""
    every = range(env.rows)
    _begin(env)
    env.step(every, _actions(env, env.rows))
    shown = env.observe(every)
    if _differing(shown, env.observe(every)):
        return  # not repeatable, so a comparison means nothing
    if env.traits.observes_on_device:
        there = env.observe_on_device(every)
        if there.keys() != shown.keys() or (name := _differing(shown, there)):
            what = "other arrays" if there.keys() != shown.keys() else f"another {name!r}"
            raise ContractViolation(f"observe_on_device gives {what} than observe", "return the same, as tensors")
    if env.traits.leaves_device:
        env.leave_device()
        if name := _differing(shown, env.observe(every)):
            raise ContractViolation(
                f"a row shows another {name!r} after suspend and resume", "bring the state back unchanged"
            )


def _check_resets_ahead(env: CheckedEnv) -> None:
    """Check that a row is not affected by a thread that resets another row."""
    if env.rows < 2:
        return
    if not (env.spec.step_rows and env.spec.reset_rows):
        raise ContractViolation("the trait resets_ahead needs rows that reset and step alone", "leave it out")
    shown = []
    for beside in (False, False, True):
        _begin(env)
        actions = np.random.default_rng(7)
        with env.resetting(1, trial_seed(3)) if beside else nullcontext():
            for _ in range(_REPLAYED):
                result = env.step([0], _actions(env, 1, actions))
                if result.terminated[0] or result.truncated[0]:
                    break
        shown.append(env.observe([0]))
    repeatable = not _differing(*shown[:2])  # otherwise the comparison means nothing
    if repeatable and (name := _differing(*shown[1:])):
        raise ContractViolation(
            f"row 0 shows another {name!r} while a thread resets row 1", "leave the trait resets_ahead out"
        )


# ------------------------------------------------------------ helpers


def _begin(env: CheckedEnv, *, seed: int = 1, task: int = 0) -> Arrays:
    every = range(env.rows)
    env.reset(every, [task] * env.rows, [trial_seed(seed + row) for row in every])
    return env.observe(every)


def _replay(env: CheckedEnv, row: int) -> list[float]:
    """Rewards of a row over some steps of fixed actions, until an episode ends."""
    rng, rewards = np.random.default_rng(5), []
    for _ in range(_REPLAYED):
        result = env.step(range(env.rows), np.repeat(_actions(env, 1, rng), env.rows, axis=0))
        rewards.append(float(result.reward[row]))
        if (result.terminated | result.truncated).any():
            break
    return rewards


def _actions(env: CheckedEnv, rows: int, rng: np.random.Generator | None = None) -> NDArray[Any]:
    """Random actions: [rows,A], or [rows,C,A] if a step takes a chunk."""
    rng, action, chunk = rng or np.random.default_rng(0), env.spec.action, env.spec.chunk
    shape = (rows, chunk, action.dim) if chunk else (rows, action.dim)
    if action.kind == "discrete":
        return rng.integers(action.counts, size=shape)
    low, high = _finite_bounds(env)
    return rng.uniform(low, high, size=shape).astype(np.float32)


def _bounding_actions(env: CheckedEnv) -> Iterator[NDArray[Any]]:
    between, action = _actions(env, env.rows), env.spec.action
    bounds = (np.zeros(action.dim), np.array(action.counts) - 1) if action.kind == "discrete" else _finite_bounds(env)
    yield from (np.broadcast_to(bound, between.shape).astype(between.dtype) for bound in bounds)
    yield between


def _finite_bounds(env: CheckedEnv) -> tuple[NDArray[Any], NDArray[Any]]:
    """The bounds of a continuous action, ±1 for infinite ones."""
    low, high = np.array(env.spec.action.low), np.array(env.spec.action.high)
    return np.where(np.isfinite(low), low, -1.0), np.where(np.isfinite(high), high, 1.0)


def _row(arrays: Arrays, row: int) -> Arrays:
    return {name: array[row] for name, array in arrays.items()}


def _differing(left: Mapping[str, NDArray[Any]], right: Mapping[str, NDArray[Any]]) -> str:
    """Name of the first array that differs, or ""."""
    return next((name for name, array in left.items() if not np.array_equal(array, right[name])), "")
