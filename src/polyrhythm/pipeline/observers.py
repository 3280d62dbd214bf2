"""Who watches a run: metrics of every update, lags, and a timeline for Perfetto."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from polyrhythm.flow import records
from polyrhythm.flow.ledger import SampleLedger
from polyrhythm.observe import MetricsWriter, TraceWriter
from polyrhythm.runtime.messages import Report

log = logging.getLogger(__name__)


class UpdateMetrics:
    """Writes the figures of each update, with the ledger and the pace beside them."""

    def __init__(
        self, writer: MetricsWriter, ledger: SampleLedger, transitions: Callable[[], float], began: float
    ) -> None:
        self._writer, self._ledger, self._transitions = writer, ledger, transitions
        self._began, self._last = began, (began, transitions())

    def decided(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        pass

    def reported(self, now: float, report: Report) -> None:
        values = dict(report.values)
        counts = self._ledger.as_dict()
        values |= {f"samples/{state}": float(count) for state, count in counts.items() if isinstance(count, int)}
        values |= {f"samples/dropped/{reason}": float(count) for reason, count in self._ledger.dropped.items()}
        before, done_before = self._last
        done = self._transitions()
        values["throughput/transitions_per_s"] = (done - done_before) / max(now - before, 1e-9)
        self._last = (now, done)
        self._writer.log(report.step, values, now - self._began)


class Lags:
    """How far behind the trainer each sample was when it was lent. `counts`: lag → samples."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def decided(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        for command in commands:
            if isinstance(command, records.LendSamples):
                self.counts.update(command.version - oldest for oldest in command.oldest)

    def reported(self, now: float, report: Report) -> None:
        pass

    def summary(self) -> dict[str, Any]:
        """mean and max over all lent samples, 0 before the first; counts: samples by lag."""
        total = self.counts.total()
        mean = sum(lag * count for lag, count in self.counts.items()) / total if total else 0.0
        counts = {str(lag): count for lag, count in sorted(self.counts.items())}
        return {"mean": mean, "max": max(self.counts, default=0), "counts": counts}


class Progress:
    """Says in the log how far the run is, every `every_s` seconds at most."""

    def __init__(self, updates: int, began: float, every_s: float = 5.0) -> None:
        self._updates, self._every_s, self._said = updates, every_s, began

    def decided(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        pass

    def reported(self, now: float, report: Report) -> None:
        if now - self._said < self._every_s and report.step + 1 < self._updates:
            return
        self._said = now
        values = report.values
        log.info(
            "update %d of %d: return %.2f, success %.2f, lag %.1f",
            report.step + 1,
            self._updates,
            values["env/return"],
            values["env/success_once"],
            values["staleness/lag_mean"],
        )


class Timeline:
    """Bars for forward passes, updates, publications, and for each slot's waiting and stepping.

    Made from the decisions alone, so it looks the same under every launcher. It ends after `limit` bars, with a mark
    that says so: viewers do not like more.
    """

    def __init__(self, writer: TraceWriter, began: float, limit: int = 50_000) -> None:
        self._writer, self._began, self._left = writer, began, limit
        self._since: dict[str, float] = {}
        self._batches: dict[int, records.Batch] = {}

    def reported(self, now: float, report: Report) -> None:
        pass

    def decided(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        if self._left <= 0:
            return
        self._hear(now - self._began, event)
        for command in commands:
            self._say(now - self._began, command)
        if self._left <= 0:
            self._writer.instant("run", "timeline", "the timeline ends here, the run goes on", now - self._began)

    def _hear(self, now: float, event: records.Event) -> None:
        match event:
            case records.RequestArrived(slot=slot):
                self._bar("slots", slot, "step", f"step {slot}", now)
                self._since[f"wait {slot}"] = now
            case records.BatchDone(generator=generator, batch=number):
                batch = self._batches.pop(number, None)
                for request in batch.requests if batch else ():
                    self._since[f"step {request.slot}"] = now
                self._bar("generators", generator, f"{len(batch.requests) if batch else 0} requests", f"b{number}", now)
            case records.UpdateDone(trainer=trainer, update=update):
                self._bar("trainer", trainer, f"update {update}", "update", now)
            case records.Published(trainer=trainer, version=version):
                self._bar("trainer", trainer, f"publish {version}", "publish", now)
            case records.WeightsApplied(generator=generator, version=version):
                self._bar("generators", generator, f"apply {version}", f"apply {generator}", now)

    def _say(self, now: float, command: records.Command) -> None:
        match command:
            case records.Serve(batch=batch):
                self._batches[batch.number] = batch
                self._since[f"b{batch.number}"] = now
                for request in batch.requests:
                    self._bar("slots", request.slot, "wait", f"wait {request.slot}", now)
            case records.LendSamples():
                self._since["update"] = now
            case records.PublishWeights():
                self._since["publish"] = now
            case records.ApplyWeights(generator=generator):
                self._since[f"apply {generator}"] = now

    def _bar(self, process: str, thread: str, name: str, key: str, now: float) -> None:
        begin = self._since.pop(key, None)
        if begin is not None:
            self._writer.complete(process, thread, name, begin, now)
            self._left -= 1
