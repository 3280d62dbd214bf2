"""A recipe's placement problem: what its stations take on so many devices, which values may be chosen, and the answer.

    profile, config, devices ──▶ PlacementProblem.solve ──▶ ranked placements ──▶ what more would buy

Invariant: rows in all and samples of an update are the recipe's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from polyrhythm.config.recipes import recipe_word
from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import LimitedBatching
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.build import env_settings
from polyrhythm.plugins.planning.arrangement import Arrangement, arranged, arrangement_of
from polyrhythm.plugins.planning.costs import refuse_incomplete
from polyrhythm.plugins.planning.estimate import Estimator
from polyrhythm.plugins.planning.graph import graph_of_run
from polyrhythm.plugins.planning.judge import FULL, HOST, SHORT, Length, Prediction, host_memory, why_over
from polyrhythm.plugins.planning.judging import Case, Judges
from polyrhythm.plugins.planning.profile import Profile
from polyrhythm.plugins.planning.search import AGAIN, FIRST, MOST, Choices, Schedule, find_schedules, propose, search
from polyrhythm.runtime.devices import CPU, Devices
from polyrhythm.specs import EnvSpec

#: Rows of a pass and chunk steps of a micro-batch that are tried, besides the recipe's.
_SIZES = (8, 16, 32, 64, 128, 256)
#: Samples of a version from which on a single one tells placements apart.
_MANY = 256


@dataclass(frozen=True, slots=True)
class RankedPlacement:
    """A judged placement."""

    arrangement: Arrangement
    prediction: Prediction


@dataclass(frozen=True)
class PlacementProblem:
    """Find the fastest placement of a recipe. base: whose rows are kept; spec: of the environment; full: how much is
    simulated of the best placements."""

    profile: Profile
    config: RunConfig
    devices: Devices
    spec: EnvSpec
    full: Length = FULL
    base: Arrangement = field(init=False)
    _refused: Counter[str] = field(init=False, default_factory=Counter)  # why arrangements could not be judged

    def __post_init__(self) -> None:
        placement = self.config.placement
        nowhere = type(placement)(sharing=placement.sharing)
        base = arrangement_of(self.config.model_copy(update={"placement": nowhere}), self.devices)
        object.__setattr__(self, "base", base)

    # ------------------------------------------------------------ costs of nodes (`search.Costs`)

    @cached_property
    def estimator(self) -> Estimator:
        return Estimator(self.profile, self.config, self.devices, self.spec, self.base)

    def seconds(self, node: str, devices: int, parts: int) -> float:
        return self.estimator.seconds(node, devices, parts)

    def switch(self, node: str) -> float:
        return self.estimator.switch(node)

    def on_host(self, node: str) -> bool:
        return self.estimator.on_host(node)

    def memory(self, node: str, devices: int) -> int:
        """Bytes on each device, with the smallest amounts of work that are tried."""
        return self._least_memory(max(1, devices)).get(node, 0)

    def _least_memory(self, ranks: int) -> dict[str, int]:
        micro_batch = min(filter(None, self.choices.micro_batch), default=0)
        least = replace(self.base, max_rows=min(self.choices.max_rows), micro_batch=micro_batch)
        needs = self.estimator.needs(replace(least, trainer_devices=tuple(range(ranks))))
        return {kind: size for kind, size in needs.items() if not self.on_host(kind)}

    # ------------------------------------------------------------ the search

    @cached_property
    def short(self) -> Length:
        """How much is simulated of each placement that is tried. Few samples are no measure of a version."""
        return SHORT if self.estimator.samples >= _MANY else self.full

    @cached_property
    def choices(self) -> Choices:
        """What may be tried: divisors of the rows, the recipe's own values and powers of two."""
        base, rows, training = self.base, self.base.all_rows, self.config.training
        divisors = tuple(n for n in (1, 2, 4, 8, 16) if rows % n == 0)
        on_host = self.on_host("simulator")
        counts = [n for n in range(1, min(rows, self.estimator.cores) + 1) if rows % n == 0]
        counts = sorted({base.simulators, *counts[-3:], counts[0]}, reverse=True)
        largest = training.minibatch_steps or math.ceil(self.estimator.steps)
        micro = {training.micro_batch_steps, *(n for n in _SIZES if n < largest)}
        sharing = {"lease", base.sharing if base.sharing == "mps" else "share"}
        return Choices(
            sharing=tuple(sorted(sharing, reverse=True)) if self.devices.count else ("share",),
            simulators=tuple(counts) if on_host else (1,),
            generators=(1,) if self.devices.count else tuple(sorted({1, base.generators})),
            env_batches=tuple(sorted({*divisors[:4], base.env_batches})),
            slots=tuple(sorted({1, 2, base.slots})),
            max_rows=tuple(sorted({base.max_rows, *(n for n in _SIZES if n <= rows)})) if base.max_rows else (0,),
            max_requests=tuple(sorted({base.max_requests, 1_000_000})) if base.max_rows else (0,),
            micro_batch=tuple(sorted(micro)) if self._micro_batch_matters else (training.micro_batch_steps,),
        )

    @property
    def _micro_batch_matters(self) -> bool:
        """Whether the profile has several micro-batches; with one, a smaller one has no known cost or memory."""
        return len(self.profile.stations["trainer"].works["micro_batch"].timings) > 1

    def schedules(self) -> list[Schedule]:
        return find_schedules(
            graph_of_run(self.config),
            self.devices.count,
            self,
            room=self.profile.machine.device_memory,
            ahead=self.config.freshness.max_lag,
            pieces=self.config.freshness.sync_interval if self.config.training.streaming else 1,
            kept=12,
        )

    def proposals(self) -> list[Arrangement]:
        """The recipe as it is if it can be, then all arrangements of the best schedules, the fastest ones first."""
        found = propose(self.base, self.schedules(), self.choices, self.estimator.estimate)
        own = self._as_it_is(found)
        return found if own is None else [own, *(one for one in found if one != own)]

    def _as_it_is(self, proposals: Sequence[Arrangement]) -> Arrangement | None:
        """The recipe's arrangement; its values on the best seats if the devices that it names are not the profile's."""
        with suppress(ConfigError):
            own = arrangement_of(self.config, self.devices)
            if self.measured_there(own):
                return own if self.estimator.estimate(own) < math.inf else None
        names = ("simulators", "env_batches", "slots", "max_rows", "max_requests")
        same = (one for one in proposals if all(getattr(one, name) == getattr(self.base, name) for name in names))
        return next(same, None)

    def measured_there(self, one: Arrangement) -> bool:
        """Whether the profile's times are of where the stations are: of a GPU, or of the host."""
        seats = {"simulator": one.simulator_devices, "generator": one.generator_devices, "trainer": one.trainer_devices}
        return all(bool(devices) != self.on_host(kind) for kind, devices in seats.items())

    def judge(
        self, those: Sequence[Arrangement], length: Length | None = None, judges: Judges | None = None
    ) -> list[Prediction | None]:
        """Each one's prediction; None if memory rules it out, or the run could not go on. length: `full` if not given;
        judges: may have processes."""
        possible = [one for one in those if self._possible(one)]
        length, judges = length or self.full, judges or Judges()
        cases = [Case(self.profile, arranged(self.config, one), self.devices, self.spec, length) for one in possible]
        found = dict(zip(possible, judges.predict(cases), strict=True))
        self._refused.update(why for one in found.values() if (why := one.over or one.halted))
        return [one if (one := found.get(which)) and not (one.over or one.halted) else None for which in those]

    def _possible(self, one: Arrangement) -> bool:
        together = {*one.generator_devices, *one.simulator_devices} & {*one.trainer_devices}
        return self.estimator.fits(one) and (one.sharing == "share" or bool(together))

    def solve(
        self,
        *,
        first: int = FIRST,
        most: int = MOST,
        again: int = AGAIN,
        also: Arrangement | None = None,
        judges: Judges | None = None,
    ) -> list[RankedPlacement]:
        """The fastest placements, in order: at most `most` are judged by short simulations, and the best `again` of
        them by full ones. also: one that is judged in any case. ConfigError: nothing fits."""
        judges = judges or Judges()
        proposals = [*([] if also is None else [also]), *self.proposals()]

        def briefly(those: Sequence[Arrangement]) -> list[Prediction | None]:
            return self.judge(those, self.short, judges)

        found = search(proposals, self.choices, briefly, lambda one: one.samples_per_s, first=first, most=most)
        if self.short == self.full and found:
            return [RankedPlacement(*one) for one in found]
        best = [one for one, _ in found[:again]]
        if also is not None and also not in best and also in dict(found):
            best.append(also)
        ranked = [
            RankedPlacement(one, prediction)
            for one, prediction in zip(best, self.judge(best, judges=judges), strict=True)
            if prediction is not None
        ]
        if not ranked:
            raise ConfigError(self._why_nothing())
        return sorted(ranked, key=lambda one: -one.prediction.samples_per_s)

    def _why_nothing(self) -> str:
        needs = ", ".join(
            f"{kind} {size / 1e9:.3g} GB" for kind, size in self._least_memory(self.devices.count).items()
        )
        room = self.profile.machine.device_memory / 1e9
        host = {HOST: host_memory(self.profile, min(self.choices.simulators), 1, self.devices)}
        why = why_over(self.profile, host) or next((why for why, _ in self._refused.most_common(1)), "")
        see = f"see `polyrhythm plan {recipe_word(self.config.name)} --memory` for settings that take less"
        if why:
            return f"--gpus = {self.devices.count}: no placement can run: {why}; {see}"
        return (
            f"--gpus = {self.devices.count}: no placement fits on {self.devices.count} devices of {room:.3g} GB (at "
            f"least: {needs}); add devices, or {see}"
        )


def problem_of(profile: Profile, config: RunConfig, devices: Devices, spec: EnvSpec | None = None) -> PlacementProblem:
    """ConfigError: the batching cannot be judged, the profile lacks a station, or the devices are too few for what it
    has on devices."""
    if not isinstance(config.batching, LimitedBatching) and config.batching.type != "lockstep":
        raise ConfigError(
            f"batching.type = {config.batching.type}: a profile has passes, not streams, so no placement can be "
            "judged; set it to dynamic, or place the stations yourself (docs/placement.md)"
        )
    refuse_incomplete(profile, config)
    if not devices.count and (placed := [kind for kind, own in profile.stations.items() if own.device != CPU]):
        raise ConfigError(
            f"--gpus = 0: the profile has its {' and '.join(placed)} on devices; write how many there are, 1 or more"
        )
    if devices.count and all(own.device == CPU for own in profile.stations.values()):
        raise ConfigError(
            f"--gpus = {devices.count}: the profile was measured without a GPU; measure it on a machine that has "
            "one, or write --gpus 0"
        )
    return PlacementProblem(profile, config, devices, env_settings(config).spec() if spec is None else spec)
