"""Simulates the trainer, which does one update at a time; publications overlap with updates.

An update that is lent in parts does its first pass part by part, and the rest of its work after the last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from polyrhythm.plugins.virtual.clustersim.driver import Payload, ProtocolError, VirtualDriver
from polyrhythm.plugins.virtual.clustersim.measures import EXCHANGE, SAMPLES, TRAIN
from polyrhythm.plugins.virtual.clustersim.settings import TrainerSettings
from polyrhythm.plugins.virtual.clustersim.station import VirtualStation
from polyrhythm.scheduler import records
from polyrhythm.scheduler.records import Checkpointed, Command, Published, PublishWeights, StartUpdate, TrainerJoined


@dataclass(slots=True)
class GradientStep:
    """An update on shared devices: `left` more steps, each of `seconds` for a rank alone. computing: ranks that are not
    ready yet; part: the pass over a part of the samples, which ends on its own."""

    seconds: float
    left: int
    computing: int = 0
    part: bool = False


class VirtualTrainer(VirtualStation):
    """One incarnation of the trainer; its weights contain `updates` updates when it joins. receivers: number of
    generators that load a version; fail_unheard: called instead of reporting the next written version."""

    states = "trainer"
    at_work = frozenset({TRAIN, EXCHANGE})
    bars: ClassVar = {TRAIN: "update"}

    def __init__(
        self,
        name: str,
        incarnation: int,
        driver: VirtualDriver,
        settings: TrainerSettings,
        updates: int = 0,
        *,
        receivers: int = 1,
    ) -> None:
        super().__init__(name, incarnation, driver, settings, SAMPLES)
        self._settings, self._hosts = settings, settings.host_names
        self.host = self._hosts[0]
        self._receivers = receivers
        self.fail_unheard: Callable[[], None] | None = None
        self._updates = updates
        self._lent: deque[StartUpdate] = deque()
        self._begun: list[StartUpdate] = []  # the parts of the update under way, the last of which may be in its pass
        self._transitions = 0
        self._busy = False
        self._publishing: deque[PublishWeights] = deque()

    def joined(self) -> TrainerJoined:
        return TrainerJoined(self.name, self.incarnation, self._updates)

    def obey(self, command: Command) -> None:
        if not self.alive:
            return
        if isinstance(command, StartUpdate):
            self._lent.append(command)
            if not self._busy:
                self._begin()
        elif isinstance(command, PublishWeights):
            self._publishing.append(command)
            if len(self._publishing) == 1:
                self._publish()
        else:
            raise ProtocolError(f"trainer {self.name} cannot obey {command!r}")

    def _begin(self) -> None:
        self.check_lease()
        self._busy, payloads, samples = True, self.driver.payloads, list[Payload]()
        self._begun.append(command := self._lent.popleft())
        for payload_id in command.payload_ids:
            if payload_id not in payloads:
                raise ProtocolError(f"sample {payload_id!r} is lent but was released, or never finished")
            samples.append(payloads[payload_id])
        network, wait = self.driver.network, 0.0
        if network is not None:  # each of the trainer's hosts fetches its share of the samples
            there = [
                network.fetch(self._hosts[index % len(self._hosts)], sample.host, sample.chunk_steps * network.sample)
                for index, sample in enumerate(samples)
            ]
            wait = network.waits("samples", max(there, default=0.0))
        transitions = sum(sample.transitions for sample in samples)
        if wait:
            self.after(wait, self._start, transitions)
        else:
            self._start(transitions)

    def _start(self, transitions: int) -> None:
        """The samples have arrived: begin the update, or continue with this part."""
        self.enter(TRAIN)
        self._transitions += transitions
        if self._begun[-1].more or len(self._begun) > 1:
            settings = self._settings
            seconds = self._times * settings.streamed * settings.update.per_unit * -(-transitions // settings.size)
            if self.places:
                self._gradient_step(GradientStep(seconds, 1, part=True))
            else:
                self.after(seconds, self._passed, None)
        else:
            self._finish(0.0)

    @property
    def _times(self) -> float:
        """Factor of the cost of the update under way, by its micro-batches."""
        return self._settings.times_with(self._begun[0].micro_batch)

    def _passed(self, _: None) -> None:
        if not self._begun[-1].more:
            self._finish(self._settings.streamed)
            return
        self.enter(SAMPLES)
        self._busy = False
        if self._lent:
            self._begin()

    def _finish(self, passed: float) -> None:
        """Do the rest of the update. passed: the part of the cost per transition that is already spent."""
        settings = self._settings
        units = -(-self._transitions // settings.size)
        seconds = self._times * (settings.update.draw(self.rng, units) - passed * settings.update.per_unit * units)
        if self.places:
            self._gradient_step(GradientStep(seconds / settings.gradient_steps, settings.gradient_steps))
        else:
            together = sum(settings.synchronise.draw(self.rng, settings.size) for _ in range(settings.gradient_steps))
            self.after(seconds + together, self._trained, None)

    def _gradient_step(self, step: GradientStep) -> None:
        """Start each rank's computation on its device; the last one to finish begins the exchange."""
        step.computing = len(self.places)
        for device, occupies in self.places:
            device.begin(self, step.seconds, occupies, self._computed, step)

    def _computed(self, step: GradientStep) -> None:
        step.computing -= 1
        if not step.computing and step.part:
            self._passed(None)
        elif not step.computing:
            self.enter(EXCHANGE)
            self.after(self._settings.synchronise.draw(self.rng, self._settings.size), self._synchronised, step)

    def _synchronised(self, step: GradientStep) -> None:
        step.left -= 1
        if step.left:
            self.enter(TRAIN)
            self._gradient_step(step)
        else:
            self._trained(None)

    def _trained(self, _: None) -> None:
        measures, payloads = self.measures, self.driver.payloads
        for part in self._begun:
            for payload_id in part.payload_ids:
                measures.lags[part.version - payloads[payload_id].oldest] += 1
            measures.updates_since.update(part.updates_since)
            measures.trained_samples += len(part.payload_ids)
        measures.updates += 1
        measures.trained_transitions += self._transitions
        lent, self._begun, self._transitions, self._busy = self._begun[-1], [], 0, False
        self.enter(SAMPLES)
        self._updates = lent.update + 1
        self.emit(records.UpdateDone(self.name, self.incarnation, lent.update))
        every = self._settings.checkpoint_every
        if every and self._updates % every == 0:
            self.emit(Checkpointed(self.name, self.incarnation, self._updates))
        if self._lent:
            self._begin()

    def _publish(self) -> None:
        self.check_lease()
        seconds = self._settings.publish.draw(self.rng, self._receivers)
        self.after(seconds, self._published, (self._publishing[0], seconds))

    def _published(self, published: tuple[PublishWeights, float]) -> None:
        command, seconds = published
        self.measures.publishing += seconds
        self.driver.bus = max(self.driver.bus, command.version)
        if self.fail_unheard is not None:
            self.fail_unheard()
            return
        self.emit(Published(self.name, self.incarnation, command.version))
        self._publishing.popleft()
        if self._publishing:
            self._publish()
