"""Estimates what nodes and arrangements take: arithmetic on the means of a profile, for a version.

`search` proposes by it; what is predicted is judged by the simulated cluster (`judge`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from polyrhythm.config.schema import RunConfig
from polyrhythm.envs.base import traits_of
from polyrhythm.plugins.planning.arrangement import Arrangement, arranged
from polyrhythm.plugins.planning.costs import sample_steps, share_beside, update_seconds
from polyrhythm.plugins.planning.judge import HOST, host_memory, why_over
from polyrhythm.plugins.planning.memory import station_memory
from polyrhythm.plugins.planning.profile import Kind, Profile, StationProfile, WorkName
from polyrhythm.runtime.devices import CPU, Devices
from polyrhythm.specs import EnvSpec

#: Rounds in which rows of a pass and throughput are brought into agreement.
_ROUNDS = 6


@dataclass(frozen=True)
class Estimator:
    """What a recipe's work takes. base: the recipe's own arrangement, whose rows are kept; spec: of the environment."""

    profile: Profile
    config: RunConfig
    devices: Devices
    spec: EnvSpec
    base: Arrangement
    _updates: dict[tuple[int, int], float] = field(default_factory=dict)
    _memory: dict[tuple[int, ...], dict[str, int]] = field(default_factory=dict)

    @cached_property
    def samples(self) -> int:
        return self.config.training.batch_size * self.config.freshness.sync_interval

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
            return self.training_s(max(1, devices))
        return (
            self.samples
            * self._work("scorer", "score", 1)
            / (self.config.scoring.processes if self.config.scoring else 1)
        )

    @cached_property
    def _simulators_leave(self) -> bool:
        return traits_of(self.config.env).leaves_device

    def switch(self, node: str) -> float:
        """Seconds to leave a device and come back; infinite if it cannot."""
        if node == "simulator" and not self._simulators_leave:
            return 0.0  # it stays; the judge knows
        station = self.profile.stations[node]  # type: ignore[index]
        return self._amount(station, "offload", station.resident) + self._amount(station, "onload", station.resident)

    def training_s(self, ranks: int, micro_batch: int | None = None) -> float:
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
            self._updates[key] = self.training_s(*key)
        training = self._updates[key]
        if training == math.inf or not self.fits(one):
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

    def fits(self, one: Arrangement) -> bool:
        """Whether the hosts and each device hold their stations: all, or the largest of those that take turns."""
        host = {HOST: host_memory(self.profile, one.simulators, one.generators, self.devices)}
        if why_over(self.profile, host):
            return False
        room = self.profile.machine.device_memory
        needs = self.needs(one)
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

    def needs(self, one: Arrangement) -> dict[str, int]:
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
        threads = min(1.0, self.config.placement.simulators.threads / self.profile.machine.cores) * station.awake
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
