"""Time of a ManiSkill step through the adapter and without it, taken in turn in one process: medians in ms.

    python bench/scripts/maniskill_overhead.py [TASK] [STEPS]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import gymnasium
import mani_skill
import numpy as np

from polyrhythm.envs.maniskill.settings import ManiSkillSettings

WARM_UP = 50


def measure(task: str, steps: int) -> dict[str, float]:
    """Median times of a state step and a reset, of both in ms, and the ratio of the steps."""
    settings = ManiSkillSettings(tasks=(task,), reward="normalized_dense", end_on_success=False)
    batch, bare = settings.build(1), gymnasium.make(task, num_envs=1, obs_mode="state", render_backend="cpu")
    out = {name: np.zeros((1, *array.shape), array.dtype) for name, array in batch.spec.observation.items()}
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {"bare": [], "adapter": [], "bare_reset": [], "adapter_reset": []}
    for step in range(WARM_UP + steps):
        if step % batch.spec.max_steps == 0:
            times["bare_reset"].append(_timed(lambda seed=step: bare.reset(seed=seed)))
            times["adapter_reset"].append(_timed(lambda seed=step: batch.reset([0], [0], [seed])))
        action = rng.uniform(-1, 1, (1, batch.spec.action.dim)).astype(np.float32)
        times["bare"].append(_timed(lambda action=action: bare.step(action)))
        times["adapter"].append(_timed(lambda action=action: (batch.step([0], action), batch.observe([0], out))))
    steady = {name: values[WARM_UP:] if "reset" not in name else values for name, values in times.items()}
    found = {name: round(1000 * float(np.median(values)), 3) for name, values in steady.items()}
    return {**found, "ratio": round(found["adapter"] / found["bare"], 3)}


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    task, steps = (sys.argv[1] if len(sys.argv) > 1 else "PickCube-v1"), int(sys.argv[2] if len(sys.argv) > 2 else 1000)
    print(json.dumps({"task": task, "steps": steps, "mani_skill": mani_skill.__version__, **measure(task, steps)}))
