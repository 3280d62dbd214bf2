"""Wall-clock time per version of the quickstart's workload in four modes.

    lockstep        all slots wait for each other, and the rollout for the update
    rollout_async   inference overlaps the stepping of other slots; the rollout waits for the update
    train_async     the update overlaps the next rollout, in which all slots wait for each other
    full_async      both: the recipe as it is

Everything but these settings is the recipe's. Each run starts from the recipe's own warm start, which is made once:
every turn of every mode has the same tickets (tasks, initial states, noise) and initial weights. The weights do not
change: the learning rate is far below their last bit. Success ends an episode, so a policy that learns would give every
mode and version other episodes. An update costs the same with any rate; the policy loss is in all of them (no warm-up
of the critic). A fresh start takes some seconds a turn, which are not timed, and leaves the machine to one run.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from polyrhythm.config.load import load_config
from polyrhythm_bench.harness.comparison import Mode, compare
from polyrhythm_bench.harness.version_cost import VersionCost, measure
from polyrhythm_bench.harness.worker import Answer, Worker

log = logging.getLogger(__name__)

RECIPE = "quickstart"
#: Laid over the recipe in all modes.
FROZEN = ("launcher=local", "training.optimizer.lr=1.0e-12", "training.critic_warmup_updates=0")

_LOCKSTEP = ("batching.type=lockstep",)
_ON_POLICY = ("freshness.max_lag=0", "freshness.on_update=drain")
_ONE = ("rollout.simulators=1", "rollout.rows=32")
_TWO = ("rollout.simulators=2", "rollout.rows=16")
_WHOLE = ("rollout.sharding=whole",)


def _even(slots: int) -> tuple[str, ...]:
    return (f"rollout.sharding=even:{slots}",)


#: A trainer with two threads is left out: on two cores it took 9 to 16 s a version (its threads wait for each other by
#: spinning). In lock-step the slots of one simulator would only step one after another, so it has one.
MODES: dict[str, Mode] = {
    "lockstep": Mode((*_LOCKSTEP, *_ON_POLICY), ((*_ONE, *_WHOLE), (*_TWO, *_WHOLE))),
    "rollout_async": Mode(_ON_POLICY, ((*_ONE, *_even(4)), (*_TWO, *_WHOLE), (*_TWO, *_even(2)))),
    "train_async": Mode(_LOCKSTEP, ((*_ONE, *_WHOLE), (*_TWO, *_WHOLE))),
    "full_async": Mode(
        (), ((*_ONE, *_even(2)), (*_ONE, *_even(4)), (*_TWO, *_WHOLE), (*_TWO, *_even(2)))
    ),
}  # fmt: skip


def run(
    versions: int = 6,
    repeats: int = 3,
    *,
    tries: int = 3,
    recipe: str | Path = RECIPE,
    modes: Mapping[str, Mode] = MODES,
) -> dict[str, Any]:
    """Compare the modes in `repeats` turns of `versions` versions each, with each mode's best settings.

    These are found by `tries` versions of each choice. Returns what `compare` gives, and how it was measured: `recipe`,
    `warm_start` (whether the recipe has one), `cores`, `versions`, `repeats`.
    """
    with tempfile.TemporaryDirectory(prefix="polyrhythm-") as folder:
        begin = warm_start(recipe, Path(folder))

        def cost(settings: Sequence[str], timed: int) -> VersionCost:
            return measure(load_config(recipe, [*FROZEN, *begin, *settings]), timed)

        cores = psutil.cpu_count() or 1
        found = compare(modes, cost, tries=tries, versions=versions, repeats=repeats, cores=cores)
    how = {"recipe": str(recipe), "warm_start": bool(begin), "cores": cores, "versions": versions, "repeats": repeats}
    return {**how, **found}


def warm_start(recipe: str | Path, folder: Path) -> tuple[str, ...]:
    """Make the recipe's warm start in `folder`, in a process of its own; the settings that begin with it.

    Nothing is made, and nothing is to be set, where the recipe has none.
    """
    if load_config(recipe).demonstrations is None:
        return ()
    log.info("the warm start: demonstrations and imitation")
    with Worker(f"{__name__}:imitator", recipe=str(recipe), folder=str(folder)) as worker:
        worker.ask()
    return ("demonstrations=null", "supervised=null", f"init_from={folder}")


@contextmanager
def imitator(recipe: str, folder: str) -> Iterator[Answer]:
    """Makes the warm start when it is asked."""
    from polyrhythm.pipeline.validation.check import validate_run
    from polyrhythm.plugins.demonstrations.warm_start import imitate

    def answer() -> None:
        imitate(validate_run(load_config(recipe), trainer=False), Path(folder), None)

    yield answer
