"""Builds a trainer from plain data: its policy, its ranks, and the state that it resumes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.config.sections.learning import TrainingSettings
from polyrhythm.config.sections.placement import ShardSettings
from polyrhythm.errors import RunFolderError, StartError
from polyrhythm.runtime.factories import StationContext
from polyrhythm.runtime.messages import Station
from polyrhythm.scheduler.records import TrainerJoined
from polyrhythm.stations.generator_factory import PolicyFactory, lent_prefixes
from polyrhythm.stations.trainer import Trainer
from polyrhythm.stations.trainer_io import Publisher
from polyrhythm.stations.trainer_states import TrainerStates
from polyrhythm.training.checkpoint import load_state
from polyrhythm.training.learner import Learner
from polyrhythm.training.ranks import Meeting, Ranks, Strategy, open_ranks


@dataclass(frozen=True, slots=True)
class TrainerFactory:
    """A trainer that begins with its newest saved state. The first one begins with the weights of the policy file
    `initial` ("": those of the seed), saves them, and publishes them as `version` unless something is published.

    algorithm, training, shard: these sections of the configuration as plain data. strategy: of several ranks.
    token_versions, sync_interval: as of the learner. lenders: devices of the generators that lend prefixes.
    """

    name: str
    policy: PolicyFactory
    algorithm: dict[str, Any]
    training: dict[str, Any]
    total_updates: int
    states: TrainerStates | None
    initial: str = ""
    version: int = 0
    strategy: Strategy = "replicate"
    shard: dict[str, Any] = field(default_factory=dict)
    token_versions: bool = False
    sync_interval: int = 1
    lenders: tuple[str, ...] = ()

    @property
    def preload(self) -> tuple[str, ...]:
        return (__name__, *self.policy.preload)

    def parts(self, context: StationContext, incarnation: int) -> Sequence[tuple[str, Callable[[], Station]]]:
        return [(f"{self.name}.{incarnation}", lambda: self._make(context, incarnation))]

    def announcements(self, incarnation: int) -> Sequence[TrainerJoined]:
        saved = self.states.paths() if self.states else []
        return [TrainerJoined(self.name, incarnation, TrainerStates.updates(saved[-1]) if saved else 0)]

    def _make(self, context: StationContext, incarnation: int) -> Station:
        weights, ranks = context.weights(), self._meet(context, incarnation)
        # Rank 0 decides: what another one sees of a shared folder may be older.
        states = self.states.paths() if self.states else []
        saved, published = ranks.gather([str(states[-1]) if states else "", weights.newest >= 0])[0]
        learner = Learner(
            self.policy.build(context.device, "train", weights.layout, in_parts=ranks.divides),
            AlgorithmSettings.model_validate(self.algorithm),
            TrainingSettings.model_validate(self.training),
            total_updates=self.total_updates,
            seed=self.policy.seed,
            ranks=ranks,
            token_versions=self.token_versions,
            sync_interval=self.sync_interval,
        )
        if saved:
            try:
                learner.load(Path(saved))
            except ValueError as error:
                raise RunFolderError(f"{saved}: {error}; begin anew, or with its weights by init_from") from error
        else:
            if self.initial:
                try:
                    learner.load_weights(load_state(Path(self.initial), mapped=True)["policy"])
                except (KeyError, ValueError) as error:
                    raise RunFolderError(f"{self.initial}: {error}; begin another run") from error
            if self.states:
                self.states.save(learner).wait()
        if self.lenders and not ranks.divides:
            self._take_prefixes(learner, context)
        publisher = Publisher(weights, learner, context.memory.host if context.memory is not None else "")
        if not published and not context.announced:  # else the conductor commands it
            publisher.prepare()(self.version, None)
        name, arena, channels = self.name, context.arena, context.channels
        return Trainer(name, incarnation, publisher, arena, channels, self.states, overlap=context.overlap)

    def is_lent_to(self, context: StationContext) -> bool:
        """Whether a generator lends prefixes on this rank's device. In one process there is no other rank."""
        return bool(self.lenders) and (context.memory is None or context.seat in self.lenders)

    def _take_prefixes(self, learner: Learner, context: StationContext) -> None:
        """Let generators lend prefixes to the learner; the first rank on a device makes the memory there."""
        host = context.memory.host if context.memory is not None else ""
        own = f"{host} {context.seat} {context.device}"
        first = learner.ranks.gather([own]).index([own]) == learner.ranks.rank
        learner.prefixes = prefixes = lent_prefixes(learner.policy, context.weights().layout, context)
        if prefixes is not None and first and self.is_lent_to(context):
            layout = context.arena.layout
            prefixes.create(layout.blocks * layout.steps, learner.training.precomputed_mib * 2**20)

    def _meet(self, context: StationContext, incarnation: int) -> Ranks:
        """Join the other ranks. StartError: that failed when the run began. TimeoutError: later, when another try may
        succeed."""
        meeting, memory = Meeting(context.rendezvous or Path(), by=context.ready_by), context.memory
        if memory is not None and len(set(memory.ranks)) > 1:
            hosts = [host for host, _ in memory.ranks]
            find = partial(memory.find_meeting, hosts[0], meeting.file.name)
            meeting = replace(meeting, hosts=hosts, address=memory.address, find=find)
        shard = ShardSettings.model_validate(self.shard)
        try:
            return open_ranks(context.rank, context.ranks, meeting, context.device, self.strategy, shard)
        except StartError as error:
            if incarnation == 0:
                raise
            raise TimeoutError(str(error)) from error
