"""One environment in a process of its own: times of its calls, its memory, its throughput, resets ahead.

It imports no torch, so that it runs in the Python of an environment (`env.python`) too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.config.registry import resolve
from polyrhythm.envs.base import EnvBatch, EnvSettings
from polyrhythm.specs import ActionSpec
from polyrhythm.stations.simulator.reset_ahead import ResetAhead
from polyrhythm_bench.harness import resources
from polyrhythm_bench.harness.worker import Answer
from polyrhythm_bench.workloads import bare_envs
from polyrhythm_bench.workloads.bare_envs import Bare

#: Steps before the clock starts, and env steps of an episode of `reset_ahead`.
WARM_UP, EPISODE = 20, 50
#: Turns of a block of `reset_ahead`.
BLOCK = 3
#: Env steps after which all rows are reset while their steps are timed.
RESET_EVERY = 25


@contextmanager
def worker(env: Mapping[str, Any]) -> Iterator[Answer]:
    """Answers questions about the environment of this section; `do` names the function."""
    settings = resolve("env", dict(env))
    assert isinstance(settings, EnvSettings), "one of the cases"
    questions: dict[str, Callable[..., Any]] = {
        "times": times,
        "memory": memory,
        "throughput": throughput,
        "reset_ahead": reset_ahead,
    }
    yield lambda do, **given: questions[do](settings, **given)


class Player:
    """Random actions for one batch, and resets of rows whose episodes ended."""

    def __init__(self, batch: EnvBatch, seed: int = 0) -> None:
        self.batch, self.every = batch, np.arange(batch.rows)
        self.out = {
            name: np.zeros((batch.rows, *array.shape), array.dtype) for name, array in batch.spec.observation.items()
        }
        self._rng, self._seed = np.random.default_rng(seed), 1000 * seed
        self._over = np.zeros(batch.rows, bool)

    def reset(self, rows: NDArray[np.intp] | None = None) -> None:
        """Begin episodes in these rows, or in all."""
        rows = self.every if rows is None else rows
        seeds = [self._seed + i for i in range(len(rows))]
        self._seed += len(rows)
        self.batch.reset(rows, [0] * len(rows), seeds)
        self._over[rows] = False

    def actions(self) -> NDArray[Any]:
        return random_actions(self.batch.spec.action, self.batch.rows, self._rng)

    def step(self, actions: NDArray[Any]) -> None:
        result = self.batch.step(self.every, actions)
        self._over |= result.terminated | result.truncated

    def observe(self) -> None:
        self.batch.observe(self.every, self.out)

    def reset_ended(self) -> bool:
        """Reset rows whose episodes ended, all at once where the batch resets only so; whether there were any."""
        due = self._over.any() if self.batch.spec.reset_rows else self._over.all()
        if due:
            self.reset(np.flatnonzero(self._over))
        return bool(due)


def random_actions(spec: ActionSpec, rows: int, rng: np.random.Generator) -> NDArray[Any]:
    """Uniform actions [rows,A]."""
    if spec.kind == "discrete":
        return rng.integers(0, spec.choices, (rows, spec.dim))
    return rng.uniform(spec.low, spec.high, (rows, spec.dim)).astype(np.float32)


def times(settings: EnvSettings, steps: int, rows: int, bare: list[Any] | None) -> dict[str, Any]:
    """Ms of a step, an observation and a reset, p50, p95, p99. bare: function of `bare_envs` and its arguments, timed
    in turn with the adapter; with it ratio and over_us: the adapter's step and observation over the bare step, at the
    median; bare_reset."""
    player = Player(settings.build(rows))
    other: Bare | None = getattr(bare_envs, bare[0])(*bare[1:]) if bare else None
    whole = bare is not None and len(bare) > 2  # a vector environment takes all rows
    found: dict[str, list[float]] = {name: [] for name in ("step", "observe", "reset", "both", "bare", "bare_reset")}
    for step in range(-WARM_UP, steps):
        if (step + WARM_UP) % RESET_EVERY == 0:
            found["reset"].append(_seconds(player.reset))
            player.observe()  # the first picture of a new model makes a renderer
            if other is not None:
                found["bare_reset"].append(_seconds(lambda seed=step + WARM_UP: other.reset(seed)))  # type: ignore[misc]
        actions = player.actions()
        plain = 0.0
        if other is not None:
            plain = _seconds(lambda a=actions if whole else actions[0]: other.step(a))  # type: ignore[misc]
        stepped = _seconds(lambda a=actions: player.step(a))  # type: ignore[misc]
        observed = _seconds(player.observe)
        if player.reset_ended() and other is not None and not whole:  # a vector environment does it by itself
            other.reset(step + WARM_UP)
        if step >= 0:
            found["step"].append(stepped)
            found["observe"].append(observed)
            found["both"].append(stepped + observed)
            found["bare"].append(plain)
    player.batch.close()
    said: dict[str, Any] = {name: _percentiles(found[name]) for name in ("step", "observe", "reset")}
    if other is not None:
        other.close()
        own, theirs = (float(np.median(found[name])) for name in ("both", "bare"))
        said |= {"bare": _percentiles(found["bare"]), "bare_reset": _percentiles(found["bare_reset"])}
        said |= {"ratio": own / theirs, "over_us": 1e6 * (own - theirs)}
    return said


def memory(settings: EnvSettings, rows: int) -> float:
    """Proportional set size, MB, of this process after a batch of these rows has reset, stepped and observed."""
    player = Player(settings.build(rows))
    player.reset()
    player.step(player.actions())
    player.observe()
    found = resources.pss_mb()
    player.batch.close()
    return found


def throughput(settings: EnvSettings, rows: int, threads: int, seconds: float) -> float:
    """Env steps per second of `threads` threads, each with a batch of `rows`, with observations and resets."""
    ready, steps, failures = threading.Barrier(threads + 1, timeout=120), [0] * threads, list[BaseException]()
    spans = [0.0] * threads

    def play(thread: int) -> None:
        try:
            player = Player(settings.build(rows), seed=thread)
            player.reset()
            player.observe()
            ready.wait()
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                player.step(player.actions())
                player.observe()
                player.reset_ended()
                steps[thread] += rows
            spans[thread] = time.monotonic() - began
            player.batch.close()
        except BaseException as error:
            failures.append(error)
            ready.abort()
            raise

    running = [threading.Thread(target=play, args=(thread,)) for thread in range(threads)]
    for thread in running:
        thread.start()
    ready.wait()
    for thread in running:
        thread.join(seconds + 120)
    if failures:
        raise failures[0]
    return sum(count / span for count, span in zip(steps, spans, strict=True))


def reset_ahead(settings: EnvSettings, rows: int, think_s: float, repeats: int) -> dict[str, Any]:
    """A slot whose rows begin and end together, with a spare row for each: a turn is an episode of `EPISODE` steps,
    each followed by `think_s` of waiting (for actions that come from elsewhere). Blocks of `BLOCK` turns, of which the
    first does not count, reset the next episodes ahead or not, alternately.

    Medians by way of seconds: turn, reset, first_observation; share: of both in the turn. Raises ValueError if an
    episode's first observation differs between the two.
    """
    batch = ResetAhead(settings.build(2 * rows), rows)
    player = Player(batch)
    found: dict[str, list[tuple[float, float, float]]] = {"in place": [], "ahead": []}
    firsts: dict[int, bytes] = {}
    seeds = [range(rows * turn, rows * (turn + 1)) for turn in range(repeats * BLOCK + 1)]
    for block in range(repeats):
        for way, turns in found.items():
            for turn in range(block * BLOCK, (block + 1) * BLOCK):
                began = time.perf_counter()
                batch.reset(player.every, [0] * rows, list(seeds[turn]))
                reset, first = time.perf_counter() - began, _seconds(player.observe)
                seen = b"".join(array.tobytes() for array in player.out.values())
                if firsts.setdefault(turn, seen) != seen:
                    raise ValueError(f"episodes of the seeds {list(seeds[turn])} begin differently {way}")
                batch.prepare([(0, seed) for seed in seeds[turn + 1]] if way == "ahead" else [], [])
                for _ in range(EPISODE):
                    player.step(player.actions())
                    player.observe()
                    time.sleep(think_s)
                if turn % BLOCK:
                    turns.append((time.perf_counter() - began, reset, first))
    batch.close()
    return {"rows": rows, "think_ms": 1e3 * think_s, "modes": {way: _medians(turns) for way, turns in found.items()}}


def _medians(turns: list[tuple[float, float, float]]) -> dict[str, float]:
    turn, reset, first = (float(np.median(part)) for part in zip(*turns, strict=True))
    share = float(np.median([(reset + first) / turn for turn, reset, first in turns]))
    return {"turn_s": turn, "reset_s": reset, "first_observation_s": first, "share": share}


def _percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{q}": 1e3 * float(np.percentile(values, q)) for q in (50, 95, 99)}


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
