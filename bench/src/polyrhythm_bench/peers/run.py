"""Compares other systems with ours on the same work, one at a time, in interleaved turns (`bench peers`).

Every turn of every system is a fresh run in fresh processes: it starts, warms up, is measured over a number of updates,
and ends before the next one starts. Each system has the settings with which it was fastest here (`systems`), in its own
virtual environment (`venvs`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.virtual.clustersim.costs import parse_cost
from polyrhythm_bench.cases import overlap
from polyrhythm_bench.peers import process, venvs
from polyrhythm_bench.peers.ours import as_scene
from polyrhythm_bench.peers.workload import Sleeping, ZeroCost

log = logging.getLogger(__name__)

#: Baseline of the speedups: a synchronous loop in one process, written by hand.
FIRST = "plain_loop"
OURS = "polyrhythm"
#: Updates before the measurement; length of the measurement.
WARM_UP, SLEEPING_UPDATES, ZERO_COST_TRANSITIONS = 3, 16, 260_000
ROWS = (16, 256)
#: Most seconds of a turn, its start included.
DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class System:
    """A system: the module that runs it, its virtual environment ("" for ours), and its settings."""

    module: str
    venv: str = ""
    choice: Mapping[str, Any] = field(default_factory=dict)


#: A system's answer to a question.
Ask = Callable[[System, dict[str, Any]], dict[str, Any]]


def sleeping_systems(batching: Mapping[str, Any]) -> dict[str, System]:
    """Systems for the workload that sleeps; ours uses the `batching` settings."""
    return {
        FIRST: System("ours", choice={"way": "plain"}),
        "sb3": System("peer_sb3", "sb3"),
        "sb3_fork": System("peer_sb3", "sb3", {"start_method": "fork"}),
        "torchrl": System("peer_torchrl", "torchrl"),
        "sample_factory": System("peer_sample_factory", "sample_factory"),
        OURS: System("ours", choice={"way": "local", "batching": dict(batching)}),
    }


#: Systems for the workload that computes next to nothing.
ZERO_COST_SYSTEMS = {
    FIRST: System("ours", choice={"way": "plain"}),
    "sb3": System("peer_sb3", "sb3"),
    "torchrl": System("peer_torchrl", "torchrl", {"workers": 0}),
    "sample_factory": System("peer_sample_factory", "sample_factory"),
    OURS: System("ours", choice={"way": "inline"}),
    f"{OURS}_local": System("ours", choice={"way": "local"}),
}


def run(
    turns: int = 3,
    folder: Path | None = None,
    limit: float | None = None,
    only: Sequence[str] = (),
    deadline_s: float = DEADLINE_S,
) -> dict[str, Any]:
    """Measure all systems in `turns` interleaved turns; only: these systems and the plain loop.

    folder: for the peers' virtual environments. limit: transitions per second of the sleeping workload, by default the
    simulated ones. deadline_s: of a turn, including its start. Returns the settled settings of the sleeping
    workload, `limit`, and `parts`: by workload (`sleeping`, `zero_cost_<rows>`) what `summarise` returns. ConfigError:
    unknown system. StartError, RunHalted: a peer cannot be installed, or fails.
    """
    chosen(sleeping_systems({}), only)  # raises for an unknown name
    scene = as_scene(Sleeping()).model_copy(update={"train_latency": "30%"}).settled()
    batching, simulated = overlap.best_batching(scene)
    work = Sleeping(train_s=parse_cost(scene.train_latency.removeprefix("constant:")).mean())
    limit = limit or simulated
    sleeping = chosen(sleeping_systems(batching), only)
    zero_cost = chosen(ZERO_COST_SYSTEMS, only)
    pythons = _pythons([*sleeping.values(), *zero_cost.values()], folder or venvs.default_folder())

    def ask(system: System, question: dict[str, Any]) -> dict[str, Any]:
        return process.ask(pythons[system.venv], system.module, question, deadline_s)

    parts = {"sleeping": summarise(_turns(ask, "sleeping", asdict(work), SLEEPING_UPDATES, sleeping, turns), limit)}
    for rows in ROWS:
        nothing = ZeroCost(rows)
        updates = max(4, ZERO_COST_TRANSITIONS // nothing.transitions)
        found = _turns(ask, "zero_cost", asdict(nothing), updates, zero_cost, turns)
        parts[f"zero_cost_{rows}"] = summarise(found, None)
    return {"turns": turns, "limit": limit, "batching": batching, "sleeping": asdict(work), "parts": parts}


def chosen(systems: Mapping[str, System], only: Sequence[str]) -> dict[str, System]:
    known = (*systems, *ZERO_COST_SYSTEMS)
    unknown = sorted(set(only) - set(known))
    if unknown:
        raise ConfigError(f"--only {unknown[0]}: no such system; use {', '.join(dict.fromkeys(known))}")
    return {name: system for name, system in systems.items() if not only or name in (FIRST, *only)}


def _pythons(systems: Sequence[System], folder: Path) -> dict[str, Path]:
    """The Python of each environment; ours by the name ""."""
    wanted = {system.venv for system in systems if system.venv}
    return {"": Path(sys.executable), **{name: venvs.python_of(name, folder) for name in sorted(wanted)}}


def _turns(
    ask: Ask,
    workload: str,
    settings: Mapping[str, Any],
    updates: int,
    systems: Mapping[str, System],
    turns: int,
) -> dict[str, list[dict[str, Any]]]:
    """The answers of each system, turn by turn."""
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for turn in range(turns):
        for name, system in systems.items():
            question = {
                "workload": workload,
                "settings": dict(settings),
                "warm_up": WARM_UP,
                "updates": updates,
                "choice": dict(system.choice),
            }
            answers[name].append(ask(system, question))
            rate = answers[name][-1]["transitions_per_s"]
            log.info("turn %d, %s, %s: %.0f transitions/s", turn + 1, workload, name, rate)
    return answers


def summarise(answers: Mapping[str, Sequence[Mapping[str, Any]]], limit: float | None) -> dict[str, Any]:
    """Medians over the turns, by system in `modes`; and the peers that ours is `behind`.

    Of each: transitions_per_s; speedup over the plain loop in the same turn; fraction_of_limit, where there is one;
    cpu_s_per_million transitions; pss_mb of all processes; rates_by_turn; settings and versions as it said itself.
    """
    modes: dict[str, dict[str, Any]] = {}
    for name, own in answers.items():
        rates = [one["transitions_per_s"] for one in own]
        first = [one["transitions_per_s"] for one in answers[FIRST]]
        modes[name] = {
            "transitions_per_s": median(rates),
            "speedup": median(mine / theirs for mine, theirs in zip(rates, first, strict=True)),
            **({"fraction_of_limit": median(rates) / limit} if limit else {}),
            "cpu_s_per_million": median(one["cpu_s_per_million"] for one in own),
            "pss_mb": median(one["pss_mb"] for one in own),
            "rates_by_turn": rates,
            "settings": own[-1]["settings"],
            "versions": own[-1]["versions"],
        }
    return {"behind": _behind(modes), "modes": modes}


def _behind(modes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Peers that are at least as fast as ours or need no more memory, with the quantity."""
    ours = modes.get(OURS)
    if ours is None:
        return []
    peers = {name: mode for name, mode in modes.items() if name != FIRST and not name.startswith(OURS)}
    slower = [f"{name}: speed" for name, it in peers.items() if ours["transitions_per_s"] <= it["transitions_per_s"]]
    return slower + [f"{name}: memory" for name, it in peers.items() if ours["pss_mb"] >= it["pss_mb"]]
