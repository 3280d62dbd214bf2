"""Measures the drawing rate of several concurrent processes with one of MuJoCo's GL backends.

Each process runs `MUJOCO_GL=egl python -m polyrhythm.envs.gl_probe`. They are processes because simulators are, because
MuJoCo binds its backend at import, and because a broken driver can hang or crash. A single process would not be
representative: a GPU may draw the frames of several one after another.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from typing import IO

from polyrhythm.imports import same_imports

#: Time limit of one backend's measurement including process start, and drawing time, in seconds.
_LIMIT_S, _DRAW_S = 60.0, 1.0
#: Shapes in the probe's scene, edge of its picture in pixels.
_SHAPES, _SIZE = 150, 128
_READY = b"ready\n"


def frames_per_s(backend: str, processes: int) -> float:
    """Total frames per second of concurrent processes, from the first one's start to the last one's end.

    0 if one of them cannot start or draw, crashes, or exceeds the time limit.
    """
    until = time.monotonic() + _LIMIT_S
    drawers: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(processes):
            drawers.append(_start(backend))  # noqa: PERF401 - if one cannot start, the earlier ones are ended below
        if not all(_line(drawer, until) == _READY for drawer in drawers):
            return 0.0
        for drawer in drawers:
            _pipe(drawer.stdin).write(b"\n")
        drawn = [json.loads(_line(drawer, until)) for drawer in drawers]
        began, ended = min(one["began"] for one in drawn), max(one["ended"] for one in drawn)
        return float(sum(one["frames"] for one in drawn) / (ended - began))
    except (ValueError, OSError):  # no JSON after a crash; no reader; no start
        return 0.0
    finally:
        for drawer in drawers:
            drawer.kill()
        for drawer in drawers:
            drawer.wait()
            with suppress(OSError):
                _pipe(drawer.stdin).close()
            _pipe(drawer.stdout).close()


def _start(backend: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "polyrhythm.envs.gl_probe"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env={**os.environ, **same_imports(), "MUJOCO_GL": backend},
    )


def _line(drawer: subprocess.Popen[bytes], until: float) -> bytes:
    """The next line; b"" if the process ends or the time limit passes first."""
    pipe = _pipe(drawer.stdout)
    ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
    return pipe.readline() if ready else b""


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None, "it was asked for"
    return end


def _draw() -> None:
    """Report the first frame, wait for a line, draw, and report the frame count with its times.

    Raises what MuJoCo raises if it cannot render.
    """
    line = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # for what a driver may print
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
    renderer.update_scene(data)
    picture = renderer.render()
    if picture.min() == picture.max():
        raise RuntimeError("a frame is blank")
    line.write(_READY)
    if not sys.stdin.buffer.readline():
        return  # the measuring process is gone
    frames, began = 0, time.monotonic()
    while (now := time.monotonic()) < began + _DRAW_S or not frames:
        renderer.update_scene(data)
        renderer.render()
        frames += 1
    line.write(json.dumps({"frames": frames, "began": began, "ended": now}).encode() + b"\n")
    renderer.close()


if __name__ == "__main__":
    _draw()
