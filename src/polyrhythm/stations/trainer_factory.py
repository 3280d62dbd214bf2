"""How a trainer is made from plain data, and where its state is kept.

    <folder>/trainer-<updates>.pt      policy, optimizer, updates; whole or absent

Invariant: the newest `keep` states are there; the highest number is the newest.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.config.sections.learning import TrainingSettings
from polyrhythm.errors import RunFolderError
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.runtime.factories import StationContext
from polyrhythm.runtime.memory.offload import store_of
from polyrhythm.runtime.memory.tensors import apply_state
from polyrhythm.runtime.messages import Station
from polyrhythm.scheduler.records import TrainerJoined
from polyrhythm.stations.generator_factory import PolicyFactory
from polyrhythm.stations.trainer import Trainer
from polyrhythm.training.checkpoint import load_state, save_state
from polyrhythm.training.learner import Learner


@dataclass(frozen=True, slots=True)
class TrainerStates:
    """The saved states of a trainer in `folder`; one is saved before every `every_versions`-th publication, and before
    that of the version `last`, from which a run is extended."""

    pattern: ClassVar[str] = "trainer-*.pt"
    folder: str
    every_versions: int = 1
    keep: int = 2
    last: int = 0

    def due(self, version: int) -> bool:
        return version % self.every_versions == 0 or version == self.last

    def save(self, learner: Learner) -> None:
        path = Path(self.folder) / f"trainer-{learner.updates:08d}.pt"
        path.parent.mkdir(exist_ok=True)
        try:
            save_state(learner.state_dict(), path)
        except OSError as error:
            raise RunFolderError(f"{path} cannot be written ({error}); make room, then go on with resume") from error
        for old in self.paths()[: -self.keep]:
            old.unlink()

    @staticmethod
    def updates(path: Path) -> int:
        """Updates that the state in this file contains."""
        return int(path.stem.removeprefix("trainer-"))

    def reset(self, state: Path | None) -> None:
        """Begin again with this state, of whatever folder, or with none; the others are gone."""
        for path in self.paths():
            path.unlink()
        if state is None:
            return
        updates = int(load_state(state)["updates"])
        path = Path(self.folder) / f"trainer-{updates:08d}.pt"
        try:
            path.parent.mkdir(exist_ok=True)
            shutil.copyfile(state, path)
        except OSError as error:
            raise RunFolderError(f"{path} cannot be written ({error.strerror}); make room there") from error

    def paths(self) -> list[Path]:
        """All states, oldest first."""
        return sorted(
            path
            for path in Path(self.folder).glob(self.pattern)
            if path.stem.removeprefix("trainer-").isdecimal() and path.is_file()
        )


@dataclass(frozen=True, slots=True)
class TrainerFactory:
    """A trainer that begins with its newest saved state. The first one begins with the weights of the policy file
    `initial` ("": those of the seed), saves them, and publishes them as `version` unless something is published.

    algorithm, training: these sections of the configuration as plain data.
    """

    name: str
    policy: PolicyFactory
    algorithm: dict[str, Any]
    training: dict[str, Any]
    total_updates: int
    states: TrainerStates | None
    initial: str = ""
    version: int = 0

    def parts(self, context: StationContext, incarnation: int) -> Sequence[tuple[str, Callable[[], Station]]]:
        def make() -> Station:
            weights = context.weights()
            policy = self.policy.build(context.device, "train", weights.layout)
            learner = Learner(
                policy,
                AlgorithmSettings.model_validate(self.algorithm),
                TrainingSettings.model_validate(self.training),
                total_updates=self.total_updates,
                seed=self.policy.seed,
            )
            saved = self.states.paths() if self.states else []
            if saved:
                self._resume(learner, saved[-1])
            else:
                if self.initial:
                    self._load_initial(policy)
                if self.states:
                    self.states.save(learner)
            if weights.newest < 0 and context.offload is None:  # else the conductor says when
                weights.publish(self.version, as_module(policy).state_dict())
            trainer = Trainer(
                self.name,
                incarnation,
                learner,
                context.arena,
                weights,
                context.channels,
                self.states,
                overlap=context.overlap,
            )
            trainer.store = store_of(context)
            return trainer

        return [(f"{self.name}.{incarnation}", make)]

    def announcements(self, incarnation: int) -> Sequence[TrainerJoined]:
        saved = self.states.paths() if self.states else []
        return [TrainerJoined(self.name, incarnation, TrainerStates.updates(saved[-1]) if saved else 0)]

    def _load_initial(self, policy: Policy) -> None:
        try:
            apply_state(as_module(policy), load_state(Path(self.initial))["policy"])
        except (KeyError, ValueError) as error:
            raise RunFolderError(f"{self.initial}: {error}; begin another run") from error

    @staticmethod
    def _resume(learner: Learner, path: Path) -> None:
        try:
            learner.load_state_dict(load_state(path))
        except ValueError as error:
            raise RunFolderError(f"{path}: {error}; begin anew, or with its weights by init_from") from error
