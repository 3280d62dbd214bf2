"""`placement.moves` in real processes that sleep, beside two fixed operations, while the cost of a pass changes.

    device 0   generator-0
    device 1   generator-1 and the trainer

A device is a lock, held for a pass or a gradient step (`workloads.device_lock`). While passes are cheap the trainer is
faster without generator-1 on its device; once they take three times as long, generation needs both. Each run goes
through three phases of equal numbers of versions: cheap, dear, cheap.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from polyrhythm.conductors import build_conductor
from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.plugins.lease.conductor import LeasedConductor
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler import records
from polyrhythm.scheduler.conductor import AnyConductor, Conductor
from polyrhythm.scheduler.settings import MoveRules
from polyrhythm_bench.harness import resources
from polyrhythm_bench.harness.running import running
from polyrhythm_bench.workloads.scene import Publications

#: Versions after a change of costs that are not counted: moves have followed it by then.
FOLLOWED = 20
#: Factor of a pass's cost in each phase.
PHASES = (1.0, 3.0, 1.0)
#: Rows of all env batches, samples of a version, gradient steps of an update.
ENV_BATCHES, ROWS, SAMPLES, STEPS = 8, 2, 16, 16
OFF = ("generator-1",)


def config(folder: Path, versions: int, seed: int, *, moves: bool) -> RunConfig:
    """The scene. versions: of all phases together."""
    here = "polyrhythm_bench.workloads"
    return validate(
        {
            "name": "moves",
            "seed": seed,
            "env": {"type": "latency", "episode_steps": 8, "step_time": "lognormal:80ms:0.3"},
            "policy": {
                "type": f"{here}.device_policy:DevicePolicySettings",
                "policy": {
                    "type": f"{here}.slow_policy:SlowPolicySettings",
                    "policy": {"type": "gaussian"},
                    "act": "4ms+6ms",
                    "factor_file": str(folder / "factor"),
                },
                "folder": str(folder),
                "generators": (0, 1),
                "trainer": (1,),
                "evaluate_ms": 75.0,
            },
            "rollout": {"simulators": 2, "env_batches": ENV_BATCHES // 2, "rows": ROWS, "generators": 2},
            "batching": {"type": "dynamic", "max_rows": 8, "max_wait_ms": 0.0},
            "freshness": {"max_lag": 2.0, "on_update": "continue"},
            "training": {
                "versions": versions,
                "mini_batch_samples": SAMPLES,
                "epochs": STEPS,
                "minibatch_steps": 0,
                "streaming": True,
            },
            "algorithm": {"proximal": "behavior"},
            "checkpoint": {"every_versions": versions},
            "placement": {
                "simulated_devices": 2,
                "generators": {"devices": "0,1"},
                "trainer": {"devices": "1"},
                "moves": moves,
            },
        }
    )


class PhaseClock(Observer):
    """Changes the factor after each `length` versions. at: time of each version; chosen: moves, with the version."""

    hears: ClassVar[tuple[type, ...]] = (records.Published, records.MoveChosen)

    def __init__(self, factor: Path, length: int) -> None:
        self._factor, self._length = factor, length
        self.at: dict[int, float] = {}
        self.chosen: list[tuple[int, records.MoveChosen]] = []

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        if isinstance(event, records.Published):
            self.at[event.version] = now
            phase = min(event.version // self._length, len(PHASES) - 1)
            part = self._factor.with_suffix(".new")
            part.write_text(str(PHASES[phase]), encoding="utf-8")
            part.replace(self._factor)
        latest = max(self.at, default=0)
        self.chosen += [(latest, command) for command in commands if isinstance(command, records.MoveChosen)]

    def rates(self) -> list[float]:
        """Samples per second of each phase, once moves have followed, and of the whole run."""
        length = self._length
        parts = [(phase * length + FOLLOWED, (phase + 1) * length - 1) for phase in range(len(PHASES))]
        last = len(PHASES) * length - 4
        parts[-1] = (parts[-1][0], last)
        return [(to - since) * SAMPLES / (self.at[to] - self.at[since]) for since, to in (*parts, (1, last))]


def one(length: int, seed: int, kind: str) -> PhaseClock:
    """A run of one kind: both generators `on`, one `off`, or `moves`."""
    with tempfile.TemporaryDirectory(prefix="polyrhythm-devices-") as folder:
        factor = Path(folder, "factor")
        factor.write_text(str(PHASES[0]), encoding="utf-8")
        versions = len(PHASES) * length
        own = config(Path(folder), versions, seed, moves=kind == "moves")
        # Not validated: a trial pass in this process would have no station, and so no device.
        with running(own, validated=False) as pipeline:
            clock = PhaseClock(factor, length)
            pipeline.loop.add_observers(clock)
            if kind == "off":
                assert isinstance(pipeline.loop.conductor, Conductor)
                pipeline.loop.conductor.operate(OFF, own.freshness.max_lag)
            pipeline.loop.train_until(versions)
    return clock


#: Costs that change in the simulated cluster: name → (cost, factors of the three phases).
SIMULATED = {
    "passes x3": ("serve", (1.0, 3.0, 1.0)),
    "passes /3": ("serve", (1.0, 1 / 3, 1.0)),
    "steps x3": ("step", (1.0, 3.0, 1.0)),
    "updates x3": ("update", (1.0, 3.0, 1.0)),
    "updates /3": ("update", (1.0, 1 / 3, 1.0)),
}
#: Seconds of virtual time of a phase.
PHASE_S = 80.0


def cluster(cost: str, factors: Sequence[float], *, moves: bool) -> ClusterSettings:
    """Such a scene in the simulated cluster, where passes and updates on one device slow each other down."""
    found = ClusterSettings.model_validate(
        {
            "versions": 10**9,
            "max_time": f"{len(factors) * PHASE_S:g}s",
            "scheduler": {"batch_size": 32, "max_lag": 2.0, "max_rows": 16, "max_wait_s": 0.0},
            "simulators": [{"env_batches": 4, "slots": 2, "rows": 4, "step": "lognormal:100ms:0.3", "steps": 8}],
            "generators": [{"serve": "6ms+3ms", "devices": "0"}, {"serve": "6ms+3ms", "devices": "1"}],
            "trainer": {"update": "1000ms", "devices": "1"},
            "changes": [{"at": f"{n * PHASE_S:g}s", "cost": cost, "times": by} for n, by in enumerate(factors)],
        }
    )
    rules = MoveRules({"generator-0": (0,), "generator-1": (1,), "trainer": (1,)}) if moves else None
    return found.model_copy(update={"scheduler": replace(found.scheduler, moves=rules)})


def published(settings: ClusterSettings, operate: Callable[[AnyConductor], None] | None = None) -> dict[int, float]:
    """Virtual time of each version. operate: puts another operation into force at the beginning."""
    conductor = build_conductor(settings.scheduler)
    machine, found = VirtualCluster(settings, conductor), Publications()
    if operate is not None:
        machine.driver.clock.at(0.1, lambda _: operate(conductor))
    machine.driver.observer = found.note
    machine.run()
    return found.at


def off(conductor: AnyConductor) -> None:
    assert isinstance(conductor, Conductor)
    conductor.operate(OFF, conductor.settings.max_lag)


def simulated(cost: str, factors: Sequence[float], kind: str) -> list[float]:
    """Samples per second of each phase, once 20 versions of it are trained, and of the whole run."""
    at = published(cluster(cost, factors, moves=kind == "moves"), off if kind == "off" else None)
    rates = []
    for phase in range(len(factors)):
        own = [version for version, time in at.items() if phase * PHASE_S <= time < (phase + 1) * PHASE_S]
        first, last = own[min(FOLLOWED, len(own) - 2)], own[-1]
        rates.append((last - first) * 32 / (at[last] - at[first]))
    return [*rates, max(at) * 32 / at[max(at)]]


def on_one_device(*, moves: bool, trainer: dict[str, Any], **changes: Any) -> ClusterSettings:
    """A generator and a trainer that lease one device, with micro-batches of 8 chunk steps. trainer, changes: settings
    of the trainer and of the cluster."""
    beside = {"devices": "0", "resident_gb": 1.0}
    found = ClusterSettings.model_validate(
        {
            "versions": 120,
            "scheduler": {"batch_size": 32, "max_lag": 2.0, "max_rows": 16, "max_wait_s": 0.0},
            "simulators": [{"env_batches": 4, "slots": 2, "rows": 4, "step": "lognormal:100ms:0.3", "steps": 8}],
            "generators": [{"serve": "4ms+2ms", **beside}],
            "trainer": {"update": "800ms", "micro_batch": 8, **beside, **trainer},
            "sharing": "lease",
            "lease": {"min_hold": "300ms", "host_gb_per_s": 5.0},
            **changes,
        }
    )
    lease = found.scheduler.lease
    assert lease is not None
    rules = MoveRules(dict(lease.devices), 8, (2, 4, 8, 16, 32, 64), together=True) if moves else None
    return found.model_copy(update={"scheduler": replace(found.scheduler, moves=rules)})


#: Settings of the trainer and of the cluster, and the best of the operations that moves can lead to: (micro-batch,
#: whether the device is shared).
STATIC: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, bool]]] = {
    "a share is faster": ({}, {}, (8, True)),
    "a share is slower: two passes at once take five times as long": ({}, {"switching": 3.0}, (8, False)),
    "larger micro-batches are faster": ({"update": "2400ms", "by_passes": 0.5}, {}, (64, True)),
    "smaller micro-batches are faster": ({"update": "2400ms", "by_passes": -0.5}, {}, (2, True)),
    "updates x4 after 50 s, larger are faster": (
        {"update": "250ms", "by_passes": 0.5},
        {"changes": [{"at": "50s", "cost": "update", "times": 4.0}]},
        (64, True),
    ),
}


def with_leases() -> list[dict[str, Any]]:
    """Samples per second of the last 20 of 120 versions: at the start, with the best fixed operation and with moves;
    and of the whole run with moves over that of the start. versions: until moves are within 5% of the best, from the
    beginning or the change of costs on."""
    rows = []
    for name, (trainer, changes, (size, together)) in STATIC.items():

        def best(conductor: AnyConductor, size: int = size, *, together: bool = together) -> None:
            conductor.share_devices(together=together)
            assert isinstance(conductor, LeasedConductor)
            conductor.inner.operate((), conductor.settings.max_lag, size)

        fixed = on_one_device(moves=False, trainer=trainer, **changes)
        runs = {"start": published(fixed), "best": published(fixed, best)}
        at = runs["moves"] = published(on_one_device(moves=True, trainer=trainer, **changes))
        rates = {kind: 20 * 32 / (own[118] - own[98]) for kind, own in runs.items()}
        whole = runs["start"][118] / at[118]
        changed = max((change.at for change in fixed.changes), default=0.0)
        begin = min(version for version, time in at.items() if time >= changed)
        found = [v - begin for v in range(begin + 1, 113) if 5 * 32 / (at[v + 5] - at[v]) >= 0.95 * rates["best"]]
        rows.append({"scene": name, **rates, "moves_to_best": rates["moves"] / rates["best"], "whole": whole})
        rows[-1]["versions"] = float(found[0]) if found else None
    return rows


def in_the_cluster() -> list[dict[str, Any]]:
    """What moves reach of the better fixed operation in each phase, and of the start in the whole run."""
    rows = []
    for name, (cost, factors) in SIMULATED.items():
        found = {kind: simulated(cost, factors, kind) for kind in ("on", "off", "moves")}
        phases = [own / max(on, off) for own, on, off in zip(found["moves"], found["on"], found["off"], strict=True)]
        whole = {kind: rates[-1] for kind, rates in found.items()}
        row = {f"phase_{number + 1}": share for number, share in enumerate(phases[:-1])}
        rows.append({"costs": name, **row, **whole, "moves_to_on": whole["moves"] / whole["on"]})
    return rows


def run(versions: int = 40, repeats: int = 1, *, tiny: bool = False) -> dict[str, Any]:
    """In the simulated cluster (`simulated`: shares of the better fixed operation; `leases`: as `with_leases`), and
    unless `tiny` in processes.

    Interleaved turns. versions: of a phase. `phases`: samples per second by kind of run and phase (medians), and what
    moves reach of the better fixed one, in the whole run of the start; `moves`: those of each turn.
    """
    if versions < FOLLOWED + 6 and not tiny:
        least = FOLLOWED + 6
        raise ConfigError(f"--versions {versions}: {FOLLOWED} of a phase are not measured; make it at least {least}")
    cluster_rows = in_the_cluster()
    leases = with_leases()
    if tiny:
        return {"simulated": cluster_rows, "leases": leases}
    found: dict[str, list[list[float]]] = {"on": [], "off": [], "moves": []}
    chosen: list[dict[str, Any]] = []
    before = resources.read_cpu()
    for turn in range(repeats):
        for kind, turns in found.items():
            clock = one(versions, turn, kind)
            turns.append(clock.rates())
            chosen += [
                {"turn": turn + 1, "version": version, "outcome": move.outcome, "move": move.move}
                | {"expected": move.expected, "measured": move.measured}
                for version, move in clock.chosen
            ]
    others = resources.others_cores(before, resources.read_cpu())
    names = [f"{number + 1}, passes times {factor:g}" for number, factor in enumerate(PHASES)] + ["whole run"]
    phases = []
    for place, name in enumerate(names):
        rates = {kind: median(own[place] for own in turns) for kind, turns in found.items()}
        better = max(rates["on"], rates["off"]) if place < len(PHASES) else rates["on"]
        phases.append({"phase": name, **rates, "moves_to_better": rates["moves"] / better})
    return {
        "versions_of_a_phase": versions,
        "repeats": repeats,
        "others_cores": others,
        "simulated": cluster_rows,
        "leases": leases,
        "phases": phases,
        "moves": chosen,
    }
