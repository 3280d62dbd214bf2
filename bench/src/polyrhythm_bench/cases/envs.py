"""Environments as a simulator station calls them: step, observation, reset, memory, throughput, the adapter's share.

Each environment has processes of its own, in this Python or in the one that `pythons` names for its type. Times are of
one batch; the bare simulator (`workloads.bare_envs`) is stepped in turn with it, with the same actions. Memory is the
proportional set size of fresh processes with 1 and with `1 + MORE` rows. Throughput: `GRID` of rows × threads ×
processes. Resets ahead (`rollout.reset_ahead`) are measured where a case has `ahead`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from polyrhythm.config.catalog import adapter
from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.simulators.libero.library import DOWNLOAD
from polyrhythm.plugins.simulators.setup import find_python
from polyrhythm_bench.harness.worker import Worker

log = logging.getLogger(__name__)

#: What the design allows an adapter over its simulator: either is enough.
LIMIT_RATIO, LIMIT_US = 1.05, 100.0
#: Further rows whose memory is measured.
MORE = 4
#: Rows, threads, processes.
GRID = ((1, 1, 1), (4, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 2))
#: Seconds of a cell of the grid.
CELL_S = 1.5
#: Of `reset_ahead`: rows of the slot, seconds of waiting after a step.
AHEAD_ROWS, THINK_S = 2, 0.05


class Case(NamedTuple):
    """env: its section; bare: function of `bare_envs` and its arguments; rows: of the batch whose calls are timed;
    ahead: settings laid over env for `reset_ahead`, None to leave it out; besides: what it needs besides packages."""

    env: dict[str, Any]
    bare: list[Any] | None = None
    rows: int = 1
    ahead: dict[str, Any] | None = None
    besides: str = ""


_REACH = {"type": "metaworld", "tasks": ["reach-v3"], "end_on_success": False}
_BOWL = "pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_the_plate"
_LIFT = {"type": "robosuite", "tasks": ["Lift"], "end_on_success": False}
CASES: dict[str, Case] = {
    "cartpole": Case({"type": "gymnasium", "id": "CartPole-v1"}, ["gymnasium", "CartPole-v1"]),
    "cartpole_vector": Case(
        {"type": "gymnasium_vector", "id": "CartPole-v1"}, ["gymnasium_vector", "CartPole-v1", 4], rows=4
    ),
    "metaworld": Case({**_REACH, "observation": "state"}, ["metaworld", "reach-v3"]),
    "metaworld_rgb": Case(_REACH),
    "maniskill": Case({"type": "maniskill", "tasks": ["PickCube-v1"]}, ["maniskill", "PickCube-v1"]),
    "robosuite": Case({**_LIFT, "observation": "state"}, ["robosuite", "Lift"]),
    "robosuite_rgb": Case(_LIFT, ahead={"hard_reset": True}),
    "libero": Case(
        {"type": "libero", "tasks": [_BOWL], "end_on_success": False, "image_size": 128},
        ["libero", _BOWL],
        ahead={},
        besides=f"; then its meshes, if they are not there: {DOWNLOAD}",
    ),
}


def run(
    only: Sequence[str] = (), steps: int = 500, repeats: int = 3, pythons: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Measure the cases whose packages are here, or in the Python of their type. repeats: blocks of `reset_ahead`.

    Returns modes: by case the row of the first table; parts: by case its percentiles (modes), its grid and, among its
    own parts, resets ahead; left_out: a sentence for each case that could not run.
    """
    load = os.getloadavg()[0]
    modes, parts, left_out = dict[str, Any](), dict[str, Any](), list[str]()
    for name in only or CASES:
        case = CASES[name]
        python = (pythons or {}).get(case.env["type"])
        if not python and (sentence := _lacking(case)):
            left_out.append(f"{name}: {sentence}")
            continue
        log.info("envs: %s", name)
        try:
            modes[name], parts[name] = _measure(
                case, steps, repeats, find_python(python, "--pythons") if python else None
            )
        except PolyrhythmError as error:
            left_out.append(f"{name}: {error}")
    return {
        "steps": steps,
        "repeats": repeats,
        "pythons": list(pythons or ()),
        "cores": psutil.cpu_count(),
        "load_before": load,
        "limit_ratio": LIMIT_RATIO,
        "limit_us": LIMIT_US,
        "within_limit": all(mode.get("within_limit", True) for mode in modes.values()),
        "modes": modes,
        "parts": parts,
        "left_out": left_out,
    }


def _lacking(case: Case) -> str:
    """Which package is missing and how to get it; empty if none is."""
    kind = case.env["type"]
    known = adapter("env", kind)
    missing = [need.package for need in known.needs if not need.found]
    if not missing:
        return ""
    return (
        f"the package {missing[0]} is not installed here; run: {known.install}; or polyrhythm envs setup {kind}, with "
        f"--pythons {kind}={kind} here{case.besides}"
    )


def _measure(case: Case, steps: int, repeats: int, python: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The case's row, and its details."""

    def ask(env: Mapping[str, Any] = case.env, **question: Any) -> Any:
        with _worker(env, python) as worker:
            return worker.ask(**question)

    found = ask(do="times", steps=steps, rows=case.rows, bare=case.bare)
    first, more = (ask(do="memory", rows=rows) for rows in (1, 1 + MORE))
    row = {
        "step_ms": found["step"]["p50"],
        "observe_ms": found["observe"]["p50"],
        "reset_ms": found["reset"]["p50"],
        "mb": first,
        "mb_per_row": (more - first) / MORE,
    }
    details: dict[str, Any] = {"rows": case.rows, "modes": {k: v for k, v in found.items() if isinstance(v, dict)}}
    if case.bare:
        row |= {"ratio": found["ratio"], "over_us": found["over_us"]}
        row["within_limit"] = found["ratio"] <= LIMIT_RATIO or found["over_us"] <= LIMIT_US
    details["steps_per_s"] = _throughput(lambda: _worker(case.env, python))
    if case.ahead is not None:
        env = {**case.env, **case.ahead}
        ahead = ask(env, do="reset_ahead", rows=AHEAD_ROWS, think_s=THINK_S, repeats=repeats)
        details["parts"] = {"resets ahead": ahead}
    return row, details


def _throughput(start: Callable[[], Worker]) -> list[dict[str, float]]:
    """Env steps per second by cell of the grid, all processes together."""
    with ExitStack() as stack:
        workers = [stack.enter_context(start()) for _ in range(max(processes for *_, processes in GRID))]
        cells = []
        for rows, threads, processes in GRID:
            for worker in workers[:processes]:
                worker.begin(do="throughput", rows=rows, threads=threads, seconds=CELL_S)
            rates = [worker.answer() for worker in workers[:processes]]
            cells.append({"rows": rows, "threads": threads, "processes": processes, "steps_per_s": sum(rates)})
        return cells


def _worker(env: Mapping[str, Any], python: Path | None) -> Worker:
    return Worker("polyrhythm_bench.cases.envs_worker:worker", python=python, env=dict(env))
