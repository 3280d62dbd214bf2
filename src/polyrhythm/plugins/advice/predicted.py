"""What changes would do to the throughput: the simulated cluster with the run's own measured times, as it was and
changed.

A factor is the ratio of two simulations with the same seed. It counts only if the simulation of the run as it was comes
close to what was measured; otherwise the bounds stay, and the finding says why. Changes of what a profile does not
have, such as one thread for all stations, keep their bounds too.

A run alone has measured one amount of each work, and other amounts are simulated to take as long. So a change to a
larger amount than was measured has its factor as a bound, and one to a smaller amount keeps the bound of its rule. It
has means of many units, too, not their spread. So what a change of the batching gains is a bound: passes wait for the
slowest of the steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import DynamicBatching
from polyrhythm.errors import ConfigError, PolyrhythmError
from polyrhythm.plugins.advice.findings import Change, Effect, Finding, worthwhile
from polyrhythm.plugins.advice.measures import Line
from polyrhythm.plugins.advice.order import DRIFTS, with_setting
from polyrhythm.plugins.advice.speed import more
from polyrhythm.plugins.planning.costs import mini_batch, sample_steps
from polyrhythm.plugins.planning.from_run import measured_updates, profile_of, updated
from polyrhythm.plugins.planning.judge import Length, predict
from polyrhythm.plugins.planning.profile import Kind, Profile, WorkName, load_profile
from polyrhythm.readable import three_digits
from polyrhythm.runtime.devices import devices_here

#: Largest relative error of the simulation of the run as it was; factor from which a change that no rule proposes is
#: added.
_TRUSTED, _ADDED = 0.25, 1.1
#: Most cores that are simulated.
_CORES = 1024
#: Versions that are counted.
_COUNTED = 8
#: Settings, or sections, of what is simulated.
_SIMULATED = (
    *("rollout.simulators", "rollout.generators", "rollout.rows", "batching.", "freshness."),
    *("training.mini_batch_samples", "training.epochs", "training.micro_batch_steps", "placement.trainer.ranks"),
)


class Predictor:
    """Simulates changes of one run. seconds: that it may take."""

    def __init__(self, config: RunConfig, summary: Mapping[str, Any], lines: Sequence[Line], seconds: float) -> None:
        self._config, self._summary, self._lines = config, summary, lines
        self._until = time.monotonic() + seconds
        self._has_spread = False

    def predict(self, findings: Sequence[Finding]) -> list[Finding]:
        """The findings with predicted effects where there are any. To what limits the throughput, changes are added
        that no rule proposes and that are predicted to gain much; those that gain nothing are left out."""
        if self._config.launcher == "inline":
            return _noted(findings, "bounds, no predictions: the simulated cluster has a process for each station")
        if not (updates := measured_updates(self._lines)):
            return _noted(findings, "bounds, no predictions: the run has no metrics of times")
        try:
            self._profile = self._awake(self._best(profile_of(self._config, self._summary, updates)))
            present, measured = self._simulated(self._config), self._measured()
            deviation = abs(present / measured - 1.0)
        except PolyrhythmError as error:
            return _noted(findings, f"bounds, no predictions: {error}")
        except (LookupError, ArithmeticError, ValueError) as error:  # such as a summary without a throughput
            told = f"{type(error).__name__}: {error}"
            return _noted(findings, f"bounds, no predictions: the run's measurements have gaps ({told})")
        if deviation > _TRUSTED:
            rates = f"{three_digits(present)} samples/s, measured were {three_digits(measured)}"
            told = f"simulating the run as it was gives {rates}"
            return _noted(findings, f"bounds, no predictions: {told}")
        drifts = any(finding.name in DRIFTS for finding in findings)
        return [self._predicted(finding, present, drifts=drifts) for finding in findings]

    def _best(self, own: Profile) -> Profile:
        """The run's own profile, with the amounts of one that `polyrhythm profile` has left in this folder."""
        path = Path(f"{self._config.name}.profile.json")
        if path.is_file():
            with suppress(ConfigError):  # of other settings, or of another machine
                found = updated(load_profile(path), own, self._config)
                self._has_spread = True
                return found
        return own

    def _awake(self, profile: Profile) -> Profile:
        """The profile on as many cores as its stations would fill: a station that is busy may sleep or wait, and then
        leaves its core to others."""
        busy = sum(share for name, share in self._summary["utilisation"].items() if not name.endswith("-evaluation"))
        used = [line["cpu/own"] for line in self._lines if line.get("cpu/own")]
        if not used or busy <= 0:
            return profile
        cores = profile.machine.cores
        awake = min(1.0, fmean(used) * cores / busy)
        machine = profile.machine.model_copy(update={"cores": min(_CORES, round(cores / awake))})
        stations = {kind: station.model_copy(update={"awake": 1.0}) for kind, station in profile.stations.items()}
        return profile.model_copy(update={"machine": machine, "stations": stations})

    def _predicted(self, finding: Finding, present: float, *, drifts: bool) -> Finding:
        changes = list(self._effects(finding.changes, present))
        if finding.kind == "stability":
            return replace(finding, changes=tuple(changes))
        proposed = [change.setting for change in changes]
        others = [one for one in more(self._config) if one.setting not in proposed and not (one.unstable and drifts)]
        added = [one for one in self._effects(others, present) if (one.effect.factor or 0.0) >= _ADDED]
        changes += sorted(added, key=lambda one: -(one.effect.factor or 0.0))
        return worthwhile(replace(finding, changes=tuple(changes)))

    def _effects(self, changes: Sequence[Change], present: float) -> Iterator[Change]:
        """The changes, with predicted effects as long as there is time."""
        for change in changes:
            if change.setting.startswith(_SIMULATED) and time.monotonic() < self._until:
                with suppress(PolyrhythmError):  # such as a number that does not divide
                    changed = with_setting(self._config, change)
                    larger, smaller = self._beyond(changed)
                    if not smaller:
                        factor = self._simulated(changed) / present
                        bound = larger or (change.setting.startswith("batching.") and not self._has_spread)
                        yield replace(change, effect=Effect("at most" if bound else "predicted", factor))
                        continue
            yield change

    def _beyond(self, changed: RunConfig) -> tuple[bool, bool]:
        """Whether any work has a larger, or a smaller, amount than those that were measured and the run's."""
        now, then = _amounts(self._profile, self._config), _amounts(self._profile, changed)
        measured = list[tuple[float, float, float]]()
        for kind, name in now:
            if kind in self._profile.stations and (work := self._profile.stations[kind].works.get(name)):
                amounts = [*(timing.amount for timing in work.timings), now[kind, name]]
                measured.append((min(amounts), then[kind, name], max(amounts)))
        return any(amount > high for _, amount, high in measured), any(amount < low for low, amount, _ in measured)

    def _simulated(self, config: RunConfig) -> float:
        """Trained samples per second."""
        count = self._profile.machine.devices
        return predict(self._profile, config, devices_here(count), length=Length(_COUNTED)).samples_per_s

    def _measured(self) -> float:
        """Trained samples per second of the run."""
        steps = [line["env/sample_env_steps"] for line in self._lines if line.get("env/sample_env_steps")]
        return float(self._summary["transitions_per_s"]) / fmean(steps)


def _amounts(profile: Profile, config: RunConfig) -> dict[tuple[Kind, WorkName], float]:
    """Amounts of work: rows of a slot's step; most rows of a pass; chunk steps of a rank's update and micro-batch."""
    rollout, training, batching = config.rollout, config.training, config.batching
    most = batching.max_rows if isinstance(batching, DynamicBatching) else config.all_rows
    ranks = config.placement.trainer.ranks or 1
    steps = training.batch_size * sample_steps(profile, config) / ranks
    mini, parts = mini_batch(training, steps, ranks)
    return {
        ("simulator", "step"): rollout.largest_slot_rows or rollout.rows,
        ("generator", "pass"): min(most, config.all_rows),
        ("trainer", "prepare"): steps,
        ("trainer", "micro_batch"): mini / parts,
    }


def _noted(findings: Sequence[Finding], note: str) -> list[Finding]:
    """The findings, the one on the throughput with this note if it proposes anything."""
    return [
        replace(finding, note=note) if finding.kind == "throughput" and finding.changes else finding
        for finding in findings
    ]
