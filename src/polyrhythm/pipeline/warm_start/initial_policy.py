"""Prepares a run's initial weights once, from `init_from` or from demonstrations; a resumed run reads its folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from polyrhythm.errors import RunFolderError
from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.pipeline.persistence.checkpoints import DEMONSTRATIONS_FILE, POLICY_FILE, load_policy, save_policy
from polyrhythm.pipeline.persistence.phases import PhaseJournal
from polyrhythm.pipeline.validation.check import ValidatedRun
from polyrhythm.pipeline.warm_start.demos import dataset_format, record
from polyrhythm.pipeline.warm_start.init_from import load_init_weights
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.form import load_published, published_state
from polyrhythm.training.sft import Demonstrations, SupervisedLearner
from polyrhythm.training.steps import finish

log = logging.getLogger(__name__)

#: Seconds between two log lines on the progress of the warm start.
_TELL_S = 15.0


def prepare_initial_policy(checked: ValidatedRun, folder: Path, progress: PhaseJournal, metrics: MetricsWriter) -> int:
    """Load or learn the policy's initial weights; return their version."""
    config, spec, policy = checked
    file = folder / POLICY_FILE
    if progress.result("warm_start") is not None:
        _, weights, version = load_policy(file)
        give_weights(policy, weights, file)
        return version
    learned: dict[str, float] = {}
    if config.init_from:
        load_init_weights(config, policy)
        log.info("initial weights: %s", config.init_from)
    elif config.demonstrations is not None and config.supervised is not None:
        if folder_of_checkpoint := getattr(config.policy, "checkpoint", ""):
            words = "supervised training begins from the checkpoint %s; without it: supervised=null demonstrations=null"
            log.info(words, folder_of_checkpoint)
        demonstrations = _demonstrations(checked, folder, progress)
        with progress.phase("supervised"):
            steps = SupervisedLearner(policy, config.supervised, seed=config.seed).steps(demonstrations)
            tell, of = Teller("supervised: %d of %d steps"), config.supervised.steps
            learned = finish(steps, lambda done: tell(done, of))
            metrics.log(0, learned, progress.summary()["total"])
    save_policy(published_state(as_module(policy)), config, file, 0, spec)
    progress.commit("warm_start", learned)
    return 0


class Teller:
    """Logs progress every `_TELL_S` seconds; `words` has a %d for the count and one for the total."""

    def __init__(self, words: str) -> None:
        self._words, self._told = words, time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_S and done < of:
            log.info(self._words, done, of)
            self._told = now


def give_weights(policy: Policy, weights: Mapping[str, Tensor], origin: Path) -> None:
    """Load weights of the policy's own run, read from `origin`. RunFolderError: they no longer fit."""
    try:
        load_published(as_module(policy), weights)
    except ValueError as error:
        raise RunFolderError(
            f"{origin}: {error}; if you changed the code of the policy, undo that, or start another run"
        ) from error


def _demonstrations(checked: ValidatedRun, folder: Path, progress: PhaseJournal) -> Demonstrations:
    config, spec, policy = checked
    file = folder / DEMONSTRATIONS_FILE
    if progress.result("demonstrations") is not None:
        return Demonstrations.load(file)
    assert config.demonstrations is not None
    if config.demonstrations.dataset is not None:
        dataset = config.demonstrations.dataset
        with progress.phase("demonstrations"):
            layout = dataset_format(dataset)
            found = layout.read_demonstrations(dataset, spec, policy.chunk, config.rollout.action_repeat)
            found.save(file)
        progress.commit("demonstrations", {"file": dataset.folder, "decisions": len(found)})
        return found
    with progress.phase("demonstrations"):
        recorded = record(config, config.demonstrations, policy.chunk, Teller("demonstrations: %d of %d episodes"))
        recorded.demonstrations.save(file)
    progress.commit("demonstrations", recorded.summary())
    return recorded.demonstrations
