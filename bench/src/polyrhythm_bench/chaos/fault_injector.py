"""Applies the planned faults to a running pipeline, each after the one before is recovered from, and times them.

    warm-up → (pause → fault → noticed → joined again → throughput back)* → over

A fault of a node is recovered from once all its stations have joined again, there or elsewhere, and throughput is back.

A thread of its own applies them, so that a fault falls anywhere, also while the main process decides; the run is
observed by its events alone. Recovered: the station has joined again (or is no longer slowed), and the throughput of
the latest window, which may include the disturbance, is `ENOUGH` of the usual throughput before it. A window that
begins after the disturbance is compared with the share of it that other processes leave CPU for (`load`).

Invariant: at most one fault is applied before throughput is back or the seconds that are allowed are over.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.pipeline.observers.base import ALL_RECORDS, Observer
from polyrhythm.runtime.hosting import Hosting, process_ids
from polyrhythm.runtime.messages import TRAINER, station_of
from polyrhythm.scheduler import records
from polyrhythm.scheduler.samples.groups import SampleLedger
from polyrhythm_bench.chaos.faults import NODE_RECOVERY_S, Fault, Kind, PlannedFault
from polyrhythm_bench.chaos.load import CpuContention
from polyrhythm_bench.chaos.throughput_window import WINDOW_S, ThroughputWindow

if TYPE_CHECKING:
    from polyrhythm_bench.chaos.nodes import ChaosNode, RayNodes

log = logging.getLogger(__name__)

#: Fraction of the usual throughput that counts as recovered.
ENOUGH = 0.9
#: Most seconds to wait for a station to join again, and for throughput after the last fault.
_LATE_S = 30.0
#: Most seconds to wait for a node that can be hit; until a new one comes in place of one that is lost.
_NODE_LATE_S, _AWAY_S = 60.0, 5.0


class FaultInjector(Observer):
    """An observer of a run, with a thread that disturbs it. faults: those applied; over: set after the last.

    violations: in words, those that only an observer sees: a ledger that did not balance, a loss that no fault caused.
    """

    hears: ClassVar[tuple[type, ...]] = ALL_RECORDS

    def __init__(
        self,
        hosting: Hosting,
        ledger: SampleLedger,
        load: CpuContention,
        clock: Callable[[], float],
        warm_up_s: float,
        nodes: RayNodes | None = None,
    ) -> None:
        self.faults: list[Fault] = []
        self.violations: list[str] = []
        self.over = threading.Event()
        self.pace = ThroughputWindow()
        self._hosting, self._ledger, self._load = hosting, ledger, load
        self._clock, self._warm_up_s = clock, warm_up_s
        self._nodes = nodes
        self._standing: set[str] = set()
        self._stations: set[str] = set()  # all that there are
        self._calm_since = float("inf")
        self._changed = threading.Condition()
        self._ended = False
        self._thread: threading.Thread | None = None

    def start(self, planned: Sequence[PlannedFault]) -> None:
        """Apply these faults, one after another; the stations are ready."""
        self._thread = threading.Thread(target=self._disturb, args=(planned,), name="chaos", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Apply no more faults; a station that is being slowed continues at once."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # ------------------------------------------------------------ as observer

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        if self._ledger.imbalance and not self.violations:
            after, said = type(event).__name__, self._ledger.as_dict()
            self.violations.append(f"after {after} the ledger does not balance: {said}")
        self._load.look(now)
        with self._changed:
            self._hear(now, event)
            for fault in self.faults:
                if fault.recovered_at is None:
                    self._look(now, fault)
            if self.pace.take(now, self._calm_since):
                self._load.keep()
                self._changed.notify_all()

    def _hear(self, now: float, event: records.Event) -> None:
        match event:
            case records.RequestArrived(rows=rows):
                self.pace.hear(now, rows)
            case records.SimulatorJoined(simulator=name):
                self._join(now, name)
            case records.GeneratorJoined(generator=name):
                self._join(now, name)
            case records.TrainerJoined(trainer=name):
                self._join(now, name)
            case records.ScorerJoined(scorer=name):
                self._join(now, name)
            case records.StationLost(station=name, reason=reason, moves=moves):
                self._leave(name)
                if not moves:
                    self._lose(now, name, reason)
            case records.UpdateDone() if not self.faults:
                self._calm_since = min(self._calm_since, now)

    def _join(self, now: float, name: str) -> None:
        self._standing.add(name)
        self._stations.add(name)
        self._changed.notify_all()
        self._settle(now)
        for fault in self.faults:
            if (
                not fault.planned.of_node
                and fault.planned.station == name
                and fault.planned.kind is not Kind.SLOW
                and fault.noticed_at is not None
            ):
                fault.over_at = now if fault.over_at is None else fault.over_at

    def _leave(self, name: str) -> None:
        self._standing.discard(name)
        if self._nodes is not None:
            self._calm_since = float("inf")

    def _lose(self, now: float, name: str, reason: str) -> None:
        around = [fault for fault in self.faults if fault.planned.of_node and now < fault.at + NODE_RECOVERY_S]
        for fault in around:
            fault.noticed_at = now if fault.noticed_at is None else fault.noticed_at
        own = [fault for fault in self.faults if fault.planned.station == name and fault.recovered_at is None]
        if not own and not around:
            self.violations.append(f"{name} was lost, though no fault was applied to it: it {reason}")
        for fault in own:
            if fault.planned.kind is Kind.SLOW:
                fault.given_up = reason
            elif fault.noticed_at is None:
                fault.noticed_at = now

    def _look(self, now: float, fault: Fault) -> None:
        """Note whether the fault is recovered from."""
        if fault.over_at is None and fault.planned.of_node and self._stations <= self._standing:
            healed = fault.healed_at is not None and fault.planned.kind is Kind.PARTITION
            fault.over_at = now if healed or fault.noticed_at is not None else None
        if fault.over_at is None:
            return
        # While the run stood still, other processes used its share; that does not measure contention.
        share = self._load.share() if now >= fault.over_at + WINDOW_S else 1.0
        if self.pace.rate(now) >= ENOUGH * fault.pace * share:
            fault.recovered_at, fault.share = now, share
            self._changed.notify_all()
            self._settle(now)

    def _settle(self, now: float) -> None:
        """Undisturbed from now on, if all stations are there and all faults are recovered from."""
        if self.faults and self._stations <= self._standing and all(f.recovered_at is not None for f in self.faults):
            self._calm_since = min(self._calm_since, now)

    # ------------------------------------------------------------ the thread

    def _disturb(self, plan: Sequence[PlannedFault]) -> None:
        """Consumes: the plan. Waits for: recovery, and the pause before each fault. Unblocked by: events, time, `end`.
        Produces: faults; sets `over`."""
        self._wait(lambda: self.pace.calm_s >= self._warm_up_s)
        for planned in plan:
            self._wait(lambda: False, planned.pause_s)
            if not self._wait(lambda: self._stations <= self._standing, _LATE_S):
                self.violations.append(f"not there {_LATE_S:g} s later: {sorted(self._stations - self._standing)}")
                break
            fault = self._apply_to_node(planned) if planned.of_node else self._apply(planned)
            if fault is not None:
                self._wait(lambda fault=fault: fault.recovered_at is not None, planned.allowed_s)  # type: ignore[misc]
        self._wait(lambda: all(fault.recovered_at is not None for fault in self.faults), _LATE_S)
        self.over.set()

    def _wait(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Until the condition holds, or all is to end; False if neither came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended or condition(), seconds)

    def _apply(self, planned: PlannedFault) -> Fault:
        number = signal.SIGKILL if planned.kind is Kind.KILL else signal.SIGSTOP
        while True:
            process = process_ids(self._hosting).get(planned.process, 0)
            with self._changed:
                fault = Fault(planned, self._clock(), self.pace.usual)
                if self._ended:
                    return fault
                self.faults.append(fault)
                self._calm_since = float("inf")
            # 0: its actor has not answered yet (it would be this process's own group)
            if process and _signal(process, number):
                break
            with self._changed:  # it moves to another node, say
                self.faults.remove(fault)
            self._wait(lambda: False, 1.0)
            # What is done to one that is being started is no loss to the conductor, so it could not be noticed here.
            self._wait(lambda: station_of(planned.process) in self._standing, _LATE_S)
        log.info("chaos: %s %s (process %d), fault %d", planned.kind, planned.process, process, len(self.faults))
        if planned.kind is Kind.SLOW:
            self._wait(lambda: False, planned.slow_s)
            _signal(process, signal.SIGCONT)
            with self._changed:
                fault.over_at = self._clock()
        return fault

    # ------------------------------------------------------------ nodes

    def _apply_to_node(self, planned: PlannedFault) -> Fault | None:
        """Cut off or lose a node that has stations, but not the trainer's rank 0; None if none comes to have some."""
        assert self._nodes is not None, "faults of nodes need nodes"
        chosen = self._choose_node()
        if chosen is None:
            return None
        node, stations = chosen
        with self._changed:
            fault = Fault(planned, self._clock(), self.pace.usual, where=node.name, stations=stations)
            self.faults.append(fault)
            self._calm_since = float("inf")
        log.info("chaos: %s of %s (%s), fault %d", planned.kind, node.name, ", ".join(stations), len(self.faults))
        if planned.kind is Kind.PARTITION:
            self._nodes.cut(node)
            self._wait(lambda: False, planned.slow_s)
            self._nodes.mend(node)
        else:
            self._nodes.lose(node)
            self._wait(lambda: False, _AWAY_S)
            self._nodes.start_node(node)
        with self._changed:
            fault.healed_at = self._clock()
        return fault

    def _choose_node(self) -> tuple[ChaosNode, set[str]] | None:
        """A node with stations and without the trainer's rank 0, whose loss ends a run; the one that was hit longest
        ago. Its stations are all ready: the loss of one that is being started is no loss to the conductor, so it could
        not be noticed here."""
        assert self._nodes is not None, "faults of nodes need nodes"
        until = self._clock() + _NODE_LATE_S
        while not self._ended:
            self._nodes.revive()
            here = {name: self._nodes.node_of(pid) for name, pid in process_ids(self._hosting).items()}
            hit = {fault.where: fault.at for fault in self.faults}
            for node in sorted(self._nodes.nodes.values(), key=lambda node: hit.get(node.name, 0.0)):
                own = {name for name, where in here.items() if where is node}
                if own and {*map(station_of, own)} <= self._standing and TRAINER not in own:
                    return node, own
            if self._clock() > until:
                self.violations.append(f"no node without {TRAINER} has stations, {_NODE_LATE_S:g} s after a fault")
                return None
            self._wait(lambda: False, 1.0)
        return None


def _signal(process: int, number: signal.Signals) -> bool:
    """Send a signal; False if there is no such process any more."""
    try:
        os.kill(process, number)
    except ProcessLookupError:
        log.info("chaos: process %d has gone by itself", process)
        return False
    return True
