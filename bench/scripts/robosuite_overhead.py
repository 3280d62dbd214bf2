"""Times of a robosuite task through the adapter and without it, taken in turn in one process: medians in ms.

    python bench/scripts/robosuite_overhead.py [TASK] [STEPS]

Both run one environment with its state, OSC_POSE, 20 control steps per second, the same actions and the same physics.
Resets: the adapter's keep the model (`hard_reset: false`), robosuite's default makes a new one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from polyrhythm.envs.robosuite.env import RobosuiteSettings

WARM_UP = 20
EPISODE = 50


def measure(task: str, steps: int) -> dict[str, float]:
    """Median ms of a step with its observation and of a reset, bare and through the adapter, and the steps' ratio."""
    settings = RobosuiteSettings(tasks=(task,), observation="state", end_on_success=False, max_steps=10**6)
    batch = settings.build(1)
    bare = _bare(task)
    out = {name: np.zeros((1, *array.shape), array.dtype) for name, array in batch.spec.observation.items()}
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {"bare": [], "adapter": [], "bare_reset": [], "adapter_reset": []}
    for step in range(WARM_UP + steps):
        if step % EPISODE == 0:
            times["bare_reset"].append(_timed(bare.reset))
            times["adapter_reset"].append(_timed(lambda seed=step: batch.reset([0], [0], [seed])))
        action = rng.uniform(-1, 1, (1, batch.spec.action.dim)).astype(np.float32)
        times["bare"].append(_timed(lambda action=action: bare.step(action[0])))
        times["adapter"].append(_timed(lambda action=action: (batch.step([0], action), batch.observe([0], out))))
    steady = {name: values if "reset" in name else values[WARM_UP:] for name, values in times.items()}
    found = {name: round(1000 * float(np.median(values)), 3) for name, values in steady.items()}
    batch.close()
    bare.close()
    return {**found, "ratio": round(found["adapter"] / found["bare"], 3)}


def _bare(task: str) -> Any:
    """The same environment as robosuite makes it, with its own resets."""
    import robosuite
    from robosuite.controllers import load_composite_controller_config

    return robosuite.make(
        task,
        robots="Panda",
        controller_configs=load_composite_controller_config(controller=None, robot="Panda"),
        has_renderer=False,
        has_offscreen_renderer=False,
        use_camera_obs=False,
        ignore_done=True,
        renderer="mujoco",
    )


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    task, steps = (sys.argv[1] if len(sys.argv) > 1 else "Lift"), int(sys.argv[2] if len(sys.argv) > 2 else 500)
    found = measure(task, steps)
    import robosuite

    print(json.dumps({"task": task, "steps": steps, "robosuite": robosuite.__version__, **found}))
