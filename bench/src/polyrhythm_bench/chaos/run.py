"""Runs a recipe under faults and checks the guarantees."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

from polyrhythm.config.load import load_config, save_config
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError, PolyrhythmError
from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.observe.run_folder import CONFIG_FILE
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.observers.metrics import LagHistogram
from polyrhythm.pipeline.persistence.checkpoints import POLICY_FILE, STATES
from polyrhythm.pipeline.persistence.phases import PhaseJournal
from polyrhythm.pipeline.persistence.resume import prepare_initial_policy
from polyrhythm.pipeline.persistence.saver import RunCheckpointer
from polyrhythm.pipeline.run_loop import Interrupted
from polyrhythm.pipeline.validation.check import ValidatedRun
from polyrhythm.runtime.hosting import process_ids
from polyrhythm_bench.chaos.fault_injector import FaultInjector
from polyrhythm_bench.chaos.faults import NODE_RECOVERY_S, RECOVERY_S, plan, totals
from polyrhythm_bench.chaos.load import of_processes
from polyrhythm_bench.chaos.ticket_audit import TicketAudit

if TYPE_CHECKING:
    from polyrhythm_bench.chaos.nodes import RayNodes

log = logging.getLogger(__name__)

#: Undisturbed seconds in which the usual throughput is measured.
WARM_UP_S = 10.0
#: Defaults that overrides may change: a stopped station is found soon.
_DEFAULTS = ("supervision.heartbeat_s=4",)
#: Settings that overrides cannot change: the run ends after the last fault, and only trains.
_OWN = ("training.versions=1000000", "evaluation.episodes=0", "evaluation.every=0", "resume=never")


def chaos_config(recipe: str, faults: int, overrides: Sequence[str] = (), nodes: RayNodes | None = None) -> RunConfig:
    """The recipe's configuration under faults, on these nodes, if any. ConfigError: nothing to disturb in it."""
    if faults < 1:
        raise ConfigError(f"--faults = {faults}: too few; give 1 or more")
    asked = load_config(recipe, overrides)
    if asked.training.versions == 0:
        raise ConfigError(
            f"training.versions = 0: {recipe} only evaluates; name a recipe that trains, or set training.versions"
        )
    if asked.launcher != "local" and not nodes:
        raise ConfigError(
            f"launcher = {asked.launcher}: its stations are not processes, so they cannot be killed; set launcher=local"
        )
    on: tuple[str, ...] = ()
    if nodes is not None:
        on = ("launcher=ray", f"ray.address={nodes.address}", "ray.strategy=spread")
        on += (f"placement.simulated_devices={nodes.gpus}",) * bool(nodes.gpus)
    patience = (
        "rollout.quarantine_after=0",  # simulators are lost on purpose, and their episodes are innocent
        f"rollout.max_attempts={max(asked.rollout.max_attempts, faults + 1)}",
        f"supervision.max_failures={max(asked.supervision.max_failures, 2 * faults)}",
    )
    return load_config(recipe, [*_DEFAULTS, *patience, *overrides, *on, *_OWN])


def chaos(
    checked: ValidatedRun,
    folder: Path,
    faults: int,
    seed: int,
    warm_up_s: float = WARM_UP_S,
    nodes: RayNodes | None = None,
) -> dict[str, Any]:
    """Run the configuration in `folder` under so many faults; nodes: where it runs, which are hit too.

    {faults: one entry each; totals: over all of them, with the pace, the ledger, the lags and every violation}.
    """
    config = checked.config
    progress = PhaseJournal(folder)
    save_config(config, folder / CONFIG_FILE)
    with MetricsWriter(folder) as metrics:
        version = prepare_initial_policy(checked, folder, progress, metrics)
    before = _children()
    limit_s = config.supervision.start_s + warm_up_s + faults * (2 * RECOVERY_S + NODE_RECOVERY_S * (nodes is not None))
    with _limited(limit_s):
        pipeline = build_pipeline(RunContext(config, folder / POLICY_FILE, folder, version=version), start=False)
        chaos_run = _ChaosRun(config, folder, pipeline, faults, seed, warm_up_s, nodes)
        try:
            chaos_run.run()
        except _Overdue:
            chaos_run.violations.append(f"the run hung: it did not end within {limit_s:.0f} s")
        finally:
            chaos_run.injector.end()
            pipeline.close()
    remains = [*_remains(pipeline, before if nodes is None else None), *(nodes.remains() if nodes is not None else ())]
    return chaos_run.result(remains)


class _ChaosRun:
    """One run, its observers and the violations found."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        pipeline: Pipeline,
        faults: int,
        seed: int,
        warm_up_s: float,
        nodes: RayNodes | None = None,
    ) -> None:
        launcher, loop = pipeline.launcher, pipeline.loop
        assert launcher.folder is not None, "only processes can be killed"
        freshness = config.freshness
        self._config, self._folder, self._pipeline, self._began = config, folder, pipeline, loop.clock()
        self._launcher, self._plan = launcher, (seed, faults)
        self.violations: list[str] = []
        self.audit = TicketAudit(freshness.max_lag, freshness.bound, scored=config.scoring is not None)
        load = of_processes(lambda: process_ids(launcher.hosting).values())
        self.injector = FaultInjector(launcher.hosting, loop.conductor.ledger, load, loop.clock, warm_up_s, nodes)
        self._nodes = nodes

    def run(self) -> None:
        """Start, inject the faults, stop, and compare the audit with the ledger."""
        loop, config = self._pipeline.loop, self._config
        lags, saver = LagHistogram(), None
        loop.add_observers(self.audit, self.injector, lags)
        loop.stop = self.injector.over.is_set
        try:
            loop.start()
            saver = RunCheckpointer(self._folder / STATES, self._pipeline, config.checkpoint, lags, None, loop.clock())
            loop.add_observers(saver)
            processes = list(process_ids(self._launcher.hosting))
            heartbeat_s, nodes = config.supervision.heartbeat_s, self._nodes is not None
            self.injector.start(plan(*self._plan, processes, heartbeat_s, nodes=nodes))
            loop.train_until(config.training.versions)
        except Interrupted:
            if not loop.wind_down(config.supervision.update_s):
                self.violations.append(f"the update under way did not end in {config.supervision.update_s:g} s")
        except PolyrhythmError as error:
            self.violations.append(f"the run ended: {error}")
        if saver is not None:
            saver.wait()
        ledger = loop.conductor.ledger
        # Sharded ranks may have published a version whose state was not written yet (docs/ranks.md).
        early = config.placement.trainer.strategy == "shard"
        self.audit.settle(ledger, may_roll_back=early or config.checkpoint.every_versions > 1)
        kept = {sample.payload_id for sample in loop.conductor.rollout.samples.values() if sample.payload_id}
        if lost := kept - set(self._launcher.payloads.in_flight.finished()):
            self.violations.append(f"payloads of {len(lost)} finished samples are gone")

    def result(self, remains: Sequence[str]) -> dict[str, Any]:
        """The result; `remains`: processes and files left behind, in words."""
        injector, config = self.injector, self._config
        faults = [fault.as_dict(self._began) for fault in injector.faults]
        violations = [*self.violations, *injector.violations, *self.audit.violations]
        violations += [complaint for fault in injector.faults for complaint in fault.complaints()]
        return {
            "recipe": config.name,
            "seed": self._plan[0],
            "heartbeat_s": config.supervision.heartbeat_s,
            "faults": faults,
            "totals": {
                **totals(faults),
                "pace": {"first": round(injector.pace.first, 1), "last": round(injector.pace.usual, 1)},
                "versions": self._pipeline.loop.conductor.versions.trained,
                "ledger": self._pipeline.loop.conductor.ledger.as_dict(),
                "lag": self.audit.lag(),
                "violations": [*violations, *remains],
            },
        }


class _Overdue(BaseException):
    """The time is over. Not an Exception, so that nothing on the way catches it."""


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise _Overdue in the main thread, wherever it waits, when the time is over.

    By an alarm, which works where SIGINT is ignored, as in a shell's background.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        log.error("chaos: the run did not end within %.0f s", seconds)
        raise _Overdue

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _children() -> set[int]:
    return {process.pid for process in psutil.Process(os.getpid()).children(recursive=True)}


def _remains(pipeline: Pipeline, before: set[int] | None) -> Iterator[str]:
    """Processes and files that a closed run left behind, in words. before: the processes that there were, None if nodes
    come and go."""
    if before is not None and (processes := _children() - before):
        yield f"{len(processes)} processes are left: {sorted(processes)}"
    folder = pipeline.launcher.folder
    if folder is not None and folder.exists():
        names = sorted(path.name for path in folder.iterdir())
        yield f"shared memory and sockets are left in {folder}: {', '.join(names)}"
