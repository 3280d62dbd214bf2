"""Times MuJoCo's rendering with one GL backend: `MUJOCO_GL=egl python -m polyrhythm.envs.metaworld.gl_probe`.

It runs in a process of its own, because MuJoCo takes its backend at import and a broken driver can hang or crash.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import time
from pathlib import Path

log = logging.getLogger(__name__)

#: Longest time of one probe, in seconds.
_LIMIT_S = 60.0
#: Shapes in the probe's scene, edge of its picture in pixels, frames that are timed.
_SHAPES, _SIZE, _FRAMES = 150, 128, 5


def frame_ms(backend: str) -> float:
    """Milliseconds of a frame with this backend, measured in a process of its own; infinite if it cannot render."""
    source = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH", ""))))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "polyrhythm.envs.metaworld.gl_probe"],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "MUJOCO_GL": backend, "PYTHONPATH": path},
        )
        return float(json.loads(done.stdout.splitlines()[-1])["frame_ms"]) if done.returncode == 0 else math.inf
    except (subprocess.TimeoutExpired, ValueError, LookupError):
        return math.inf


def fastest(backends: tuple[str, ...]) -> str:
    """The backend with the shortest frame; the first one if none can render. The log has the times."""
    times = {backend: frame_ms(backend) for backend in backends}
    chosen = min(times, key=lambda backend: times[backend])
    log.info("rendering by %s: %s", chosen, ", ".join(f"{name} {ms:.1f} ms a frame" for name, ms in times.items()))
    return chosen


def _probe() -> dict[str, float]:
    """frame_ms: the median of several frames. Raises whatever MuJoCo raises if it cannot render."""
    import mujoco

    shapes = "".join(
        f'<geom type="ellipsoid" size=".04 .03 .05" pos="{i % 15 / 10:.2f} {i // 15 / 10:.2f} .1"/>'
        for i in range(_SHAPES)
    )
    xml = f"<mujoco><worldbody><light pos='0 0 3'/><geom type='plane' size='2 2 .1'/>{shapes}</worldbody></mujoco>"
    model = mujoco.MjModel.from_xml_string(xml)
    model.vis.quality.offsamples = 0
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    renderer = mujoco.Renderer(model, _SIZE, _SIZE)
    times = []
    for _ in range(_FRAMES + 1):
        began = time.perf_counter()
        renderer.update_scene(data)
        picture = renderer.render()
        times.append(1000 * (time.perf_counter() - began))
    if picture.min() == picture.max():
        raise RuntimeError("a frame is blank")
    renderer.close()
    return {"frame_ms": sorted(times[1:])[_FRAMES // 2]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_probe()) + "\n")
