"""A child process for `test_leaving`: how much memory stations with a policy of 32 or 96 MB use, on the host and off
it, and whether they go on with the same bits. Prints JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from tests.built import built
from tests.runtime.arenas import holding
from tests.stations.generators import SPEC, Stand
from tests.training.toy import ToyPolicy, algorithm, collect, training
from torch import Tensor

from polyrhythm.plugins.lease.offload import FileStore
from polyrhythm.policies.base import Evaluation, Observations
from polyrhythm.policies.categorical import CategoricalSettings
from polyrhythm.runtime.memory.weights import InlineWeights
from polyrhythm.runtime.messages import Channels
from polyrhythm.scheduler.records import StartUpdate
from polyrhythm.specs import WeightsLayout
from polyrhythm.specs.weights import weight_specs
from polyrhythm.stations.trainer import Trainer
from polyrhythm.stations.trainer_io import Publisher
from polyrhythm.training.learner import Learner

HIDDEN = 2000


def resident_bytes() -> int:
    """Proportional set size of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def generator(folder: Path) -> dict[str, object]:
    """Two networks of 2,000² weights of 4 bytes: 32 MB, and as much for the published version."""
    settings = CategoricalSettings(hidden=HIDDEN)
    stand = Stand(served=built(settings, SPEC, 2), own=built(settings, SPEC, 1), buckets=(4,))
    store = FileStore(folder)
    asked = stand.request("a", 0, 3)
    before = stand.serve(asked)
    full = resident_bytes()
    freed = stand.generator.suspend(store)
    empty = resident_bytes()
    stand.generator.resume(store)
    after = stand.serve(asked)
    stand.generator.close()
    store.close()
    same = all(np.array_equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True))
    return {"freed": freed, "less": full - empty, "same": same}


class Large(ToyPolicy):
    """With 8 million weights, 32 MB, that have gradients and moments but no effect."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float32)
        self.ballast = torch.nn.Parameter(torch.randn(8_000_000))

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        found = super().evaluate(obs, forward_inputs)
        return found._replace(value=found.value + 0.0 * self.ballast.sum())


def trained(folder: Path, *, leaves: bool) -> tuple[dict[str, torch.Tensor], int, int]:
    """The weights after two updates, between which the trainer is off the host or not; bytes freed; PSS less."""
    torch.manual_seed(0)
    policy, said = Large(), list[object]()
    arena = holding(collect(ToyPolicy(dtype=torch.float32), lengths=(3, 4, 2)))
    weights = InlineWeights(WeightsLayout.of(weight_specs(policy.state_dict())))
    learner = Learner(policy, algorithm(), training(epochs=1, minibatch_steps=9), total_updates=4, seed=0)
    trainer = Trainer("t", 0, Publisher(weights, learner), arena, Channels(said.append, print, said.append))
    store = FileStore(folder)
    freed = less = 0
    for update in range(2):
        trainer.handle(StartUpdate("t", update, update, (0, 1, 2), ("0", "1", "2"), (0, 0, 0)))
        while trainer.work():
            pass
        if leaves:
            full = resident_bytes()
            freed = trainer.suspend(store)
            less = full - resident_bytes()
            trainer.resume(store)
    trainer.close()
    store.close()
    return {name: x.clone() for name, x in policy.state_dict().items()}, freed, less


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    found: dict[str, object] = {"generator": generator(folder)}
    stayed, _, _ = trained(folder, leaves=False)
    left, freed, less = trained(folder, leaves=True)
    same = all(torch.equal(stayed[name], left[name]) for name in stayed)
    found["trainer"] = {"freed": freed, "less": less, "same": same}
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
