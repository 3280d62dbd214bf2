"""A recipe's placement problem: what its stations take on so many devices, which values may be chosen, and the answer.

    profile, config, devices ──▶ PlacementProblem.solve ──▶ ranked placements ──▶ what more would buy

The costs of the graph's nodes and the estimate of an arrangement are arithmetic on the profile's means; the judge is
the simulated cluster (`judge`). Invariant: rows in all and samples of an update are the recipe's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import LimitedBatching
from polyrhythm.envs.base import traits_of
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.build import env_settings
from polyrhythm.plugins.planning.arrangement import Arrangement, arranged, arrangement_of
from polyrhythm.plugins.planning.cluster import (
    refuse_incomplete,
    sample_steps,
    share_beside,
    station_memory,
    update_seconds,
)
from polyrhythm.plugins.planning.graph import graph_of_run
from polyrhythm.plugins.planning.judge import FULL, HOST, SHORT, Length, Prediction, host_memory, why_over
from polyrhythm.plugins.planning.judging import Case, Judges
from polyrhythm.plugins.planning.profile import Kind, Profile, StationProfile, WorkName
from polyrhythm.plugins.planning.search import AGAIN, FIRST, MOST, Choices, Schedule, find_schedules, propose, search
from polyrhythm.runtime.devices import CPU, Devices
from polyrhythm.specs import EnvSpec

#: Rows of a pass and chunk steps of a micro-batch that are tried, besides the recipe's.
_SIZES = (8, 16, 32, 64, 128, 256)
#: Rounds in which rows of a pass and throughput are brought into agreement.
_ROUNDS = 6
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
    _updates: dict[tuple[int, int], float] = field(default_factory=dict)
    _memory: dict[tuple[int, ...], dict[str, int]] = field(default_factory=dict)
    _refused: Counter[str] = field(init=False, default_factory=Counter)  # why arrangements could not be judged

    def __post_init__(self) -> None:
        placement = self.config.placement
        nowhere = type(placement)(sharing=placement.sharing)
        base = arrangement_of(self.config.model_copy(update={"placement": nowhere}), self.devices)
        object.__setattr__(self, "base", base)

    # ------------------------------------------------------------ costs of nodes, for a version

    @cached_property
    def samples(self) -> int:
        return self.config.training.batch_size * self.config.freshness.sync_interval

    @cached_property
    def short(self) -> Length:
        """How much is simulated of each placement that is tried. Few samples are no measure of a version."""
        return SHORT if self.samples >= _MANY else self.full

    @cached_property
    def steps(self) -> float:
        """Chunk steps of a version."""
        return self.samples * sample_steps(self.profile, self.config)

    @cached_property
    def cores(self) -> int:
        """Cores of all hosts."""
        return self.profile.machine.cores * max(1, len(self.devices.nodes))

    def on_host(self, node: str) -> bool:
        station = self.profile.stations[node]  # type: ignore[index]
        return station.device == CPU or not self.devices.count

    def seconds(self, node: str, devices: int, parts: int) -> float:
        """Of a node's work on so many devices, with rows in `parts` groups that take turns."""
        rows = max(1.0, self.base.all_rows / parts)
        if node == "simulator":
            each = self._work("simulator", "step", rows / max(1, devices))
            beside = self.cores if not devices else 1
            return self.steps / self.base.all_rows * parts * each / (1 if devices else max(1, min(beside, parts)))
        if node == "generator":
            per_pass = min(rows / max(1, devices), self.base.max_rows or rows)
            return self.steps / max(1, devices) / per_pass * self._work("generator", "pass", per_pass)
        if node == "trainer":
            return self._training_s(max(1, devices))
        return (
            self.samples
            * self._work("scorer", "score", 1)
            / (self.config.scoring.processes if self.config.scoring else 1)
        )

    def memory(self, node: str, devices: int) -> int:
        """Bytes on each device, with the smallest amounts of work that are tried."""
        return self._least_memory(max(1, devices)).get(node, 0)

    @cached_property
    def _simulators_leave(self) -> bool:
        return traits_of(self.config.env).leaves_device

    def switch(self, node: str) -> float:
        """Seconds to leave a device and come back; infinite if it cannot."""
        if node == "simulator" and not self._simulators_leave:
            return 0.0  # it stays; the judge knows
        station = self.profile.stations[node]  # type: ignore[index]
        return self._amount(station, "offload", station.resident) + self._amount(station, "onload", station.resident)

    def _least_memory(self, ranks: int) -> dict[str, int]:
        micro_batch = min(filter(None, self.choices.micro_batch), default=0)
        least = replace(self.base, max_rows=min(self.choices.max_rows), micro_batch=micro_batch)
        needs = self._needs(replace(least, trainer_devices=tuple(range(ranks))))
        return {kind: size for kind, size in needs.items() if not self.on_host(kind)}

    def _training_s(self, ranks: int, micro_batch: int | None = None) -> float:
        """Of a version's updates; infinite if a mini-batch has fewer groups than ranks."""
        training, size = self.config.training, self.config.groups.size
        if training.mini_batch_samples // size < ranks or 0 < training.minibatch_steps < ranks:
            return math.inf
        if micro_batch is not None:
            training = training.model_copy(update={"micro_batch_steps": micro_batch})
        steps = training.batch_size * sample_steps(self.profile, self.config) / ranks
        each = update_seconds(self.profile, training, steps, ranks=ranks)
        return each * self.config.freshness.sync_interval + self._work("trainer", "stage", self.profile.weights)

    def _work(self, kind: Kind, name: WorkName, amount: float) -> float:
        return self._amount(self.profile.stations[kind], name, amount)

    @staticmethod
    def _amount(station: StationProfile, name: WorkName, amount: float) -> float:
        return station.works[name].seconds(round(amount)) if name in station.works else 0.0

    # ------------------------------------------------------------ estimate of an arrangement

    def estimate(self, one: Arrangement) -> float:
        """Seconds of a version: the slowest of rollout, training and each device, but at least a sample's whole way
        over the versions that it may be behind. Infinite if memory or the ranks rule it out."""
        key = (one.ranks, one.micro_batch)
        if key not in self._updates:
            self._updates[key] = self._training_s(*key)
        training = self._updates[key]
        if training == math.inf or not self._fits(one):
            return math.inf
        lag = self.config.freshness.max_lag
        in_flight = min(one.all_rows, math.floor((1 + lag) * self.samples))
        rollout, passes_s, steps_s = self._rollout(one, in_flight)
        loads = self._device_loads(one, passes_s, steps_s, training)
        together = bool({*one.generator_devices} & {*one.trainer_devices})
        if one.sharing == "lease" and together:  # where only some generators leave, the others go on
            alone = {*one.generator_devices} <= {*one.trainer_devices}
            busy = rollout if alone else passes_s
            loads.append(busy + training + self.switch("generator") + self.switch("trainer"))
        sample = in_flight / self.samples * rollout  # mean time of a sample
        least = version = max(rollout, training, *loads)
        for _ in range(_ROUNDS if together and one.sharing == "share" else 1):
            slower = (1 + min(1.0, training / version), 1 + min(1.0, passes_s / version))
            if not together or one.sharing != "share":
                slower = (1.0, 1.0)
            version = max(least, ((rollout + sample / 2) * slower[0] + training * slower[1]) / (1 + lag))
        return version

    def _fits(self, one: Arrangement) -> bool:
        """Whether the hosts and each device hold their stations: all, or the largest of those that take turns."""
        host = {HOST: host_memory(self.profile, one.simulators, one.generators, self.devices)}
        if why_over(self.profile, host):
            return False
        room = self.profile.machine.device_memory
        needs = self._needs(one)
        leaves = {"simulator": self._simulators_leave, "generator": True, "trainer": True}
        stay, turn = dict.fromkeys(one.devices, 0), dict.fromkeys(one.devices, 0)
        for kind, count, devices in (
            ("simulator", one.simulators, one.simulator_devices),
            ("generator", one.generators, one.generator_devices),
            ("trainer", one.ranks, one.trainer_devices),
        ):
            for index in range(count if devices else 0):
                number, size = devices[index % len(devices)], needs.get(kind, 0)
                if one.sharing == "lease" and leaves[kind]:
                    turn[number] = max(turn[number], size)
                else:
                    stay[number] += size
        return not room or all(stay[number] + turn[number] <= room for number in one.devices)

    def _needs(self, one: Arrangement) -> dict[str, int]:
        rollout = (one.rows, one.env_batches, one.slots, one.max_rows, one.max_requests)
        training = (one.micro_batch, one.ranks)  # neither depends on the other's
        for key, other in ((rollout, one), (training, replace(self.base, micro_batch=one.micro_batch))):
            if key not in self._memory:
                found = station_memory(self.profile, arranged(self.config, other), self.spec, one.ranks)
                self._memory[key] = {str(kind): size for kind, size in found.items()}
        return {**self._memory[rollout], "trainer": self._memory[training]["trainer"]}

    def _rollout(self, one: Arrangement, in_flight: int) -> tuple[float, float, float]:
        """Seconds of a version's rollout alone, and busy seconds of each generator and of all simulators together."""
        slot = -(-one.rows // one.slots)
        limit = min(one.max_rows, one.max_requests * slot) if one.max_rows else in_flight
        most = max(slot, min(limit, max(1, in_flight // one.generators)))
        step = self._work("simulator", "step", slot)
        lanes = float(one.simulators * one.env_batches)  # steps at a time
        lanes = min(lanes, max(1, len(one.simulator_devices) or len(self.devices.nodes)) / self._occupies)
        steps_rate = lanes * slot / step if step else math.inf
        per_pass, rate, serve = float(most), 0.0, 0.0
        for _ in range(_ROUNDS):
            serve = self._work("generator", "pass", per_pass) or 1e-9
            rate = min(steps_rate, one.generators * per_pass / serve, in_flight / (step + serve))
            waiting = 0.0 if rate == steps_rate else in_flight - rate * step  # half of a pass waits behind it
            per_pass = min(most, max(slot, rate * serve / one.generators, waiting / 1.5 / one.generators))
        resets = self.samples * self._work("simulator", "reset", 1)
        return (
            self.steps / rate + resets / lanes,
            self.steps / one.generators / per_pass * serve,
            self.steps / slot * step + resets,
        )

    @cached_property
    def _occupies(self) -> float:
        """What a simulator's step takes of its device, or of its host's cores, as `cluster` has it."""
        station = self.profile.stations["simulator"]
        share = share_beside(station)
        if not self.on_host("simulator"):
            return share
        threads = min(1.0, self.config.placement.simulators.threads / self.profile.machine.cores)
        return max(threads, share) if station.beside else threads

    def _device_loads(self, one: Arrangement, passes_s: float, steps_s: float, training: float) -> list[float]:
        """Busy seconds of each device in a version."""
        loads = dict.fromkeys(one.devices, 0.0)
        for index in range(one.generators if one.generator_devices else 0):
            loads[one.generator_devices[index % len(one.generator_devices)]] += passes_s
        for number in one.trainer_devices:
            loads[number] += training
        for number in one.simulator_devices:
            loads[number] += steps_s * self._occupies / len(one.simulator_devices)
        return list(loads.values())

    # ------------------------------------------------------------ the search

    @cached_property
    def choices(self) -> Choices:
        """What may be tried: divisors of the rows, the recipe's own values and powers of two."""
        base, rows, training = self.base, self.base.all_rows, self.config.training
        divisors = tuple(n for n in (1, 2, 4, 8, 16) if rows % n == 0)
        on_host = self.on_host("simulator")
        counts = [n for n in range(1, min(rows, self.cores) + 1) if rows % n == 0]
        counts = sorted({base.simulators, *counts[-3:], counts[0]}, reverse=True)
        largest = training.minibatch_steps or math.ceil(self.steps)
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
        found = propose(self.base, self.schedules(), self.choices, self.estimate)
        own = self._as_it_is(found)
        return found if own is None else [own, *(one for one in found if one != own)]

    def _as_it_is(self, proposals: Sequence[Arrangement]) -> Arrangement | None:
        """The recipe's arrangement; its values on the best seats if the devices that it names are not the profile's."""
        with suppress(ConfigError):
            own = arrangement_of(self.config, self.devices)
            if self.measured_there(own):
                return own if self.estimate(own) < math.inf else None
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
        return self._fits(one) and (one.sharing == "share" or bool(together))

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
        if why:
            return (
                f"--gpus = {self.devices.count}: no placement can run: {why}; see `polyrhythm plan {self.config.name} "
                "--memory` for settings that take less"
            )
        return (
            f"--gpus = {self.devices.count}: no placement fits on {self.devices.count} devices of {room:.3g} GB (at "
            f"least: {needs}); add devices, or see `polyrhythm plan {self.config.name} --memory` for settings that "
            "take less"
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
