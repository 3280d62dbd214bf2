"""Measures how many frames concurrent processes draw with a GL backend, alone or beside a load on a device.

A GPU may draw the frames of several processes one after another, and takes turns between frames and computations. A
broken driver may hang or crash a process. So each drawer, and the load, is a process of its own:

    MUJOCO_GL=egl python -m polyrhythm.envs.gl_speed
    python -m polyrhythm.runtime.memory.device_load cuda:0
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, NamedTuple

from polyrhythm.imports import same_imports

#: Time limit of one measurement including process start, and drawing time, in seconds.
_LIMIT_S, _DRAW_S = 60.0, 1.0
#: Shapes in the probe's scene, edge of its picture in pixels.
_SHAPES, _SIZE = 150, 128
_READY = b"ready\n"
_LOAD = "polyrhythm.runtime.memory.device_load"


class Drawn(NamedTuple):
    """Total frames per second of concurrent processes, from the first one's start to the last one's end by the
    monotonic clock; 0 if one of them could not start or draw, crashed, or took too long."""

    frames_per_s: float = 0.0
    began: float = 0.0
    ended: float = 0.0


def draw(backend: str, processes: int, limit_s: float = _LIMIT_S) -> Drawn:
    """Draw with so many processes at once."""
    until = time.monotonic() + limit_s
    drawers: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(processes):  # if one cannot start, the earlier ones are ended below
            drawer = _start("polyrhythm.envs.gl_speed", MUJOCO_GL=backend)
            drawers.append(drawer)
        if not all(_line(drawer, until) == _READY for drawer in drawers):
            return Drawn()
        for drawer in drawers:
            _pipe(drawer.stdin).write(b"\n")
        drawn = [json.loads(_line(drawer, until)) for drawer in drawers]
        began, ended = min(one["began"] for one in drawn), max(one["ended"] for one in drawn)
        return Drawn(float(sum(one["frames"] for one in drawn) / (ended - began)), began, ended)
    except (ValueError, OSError):  # no JSON after a crash; no reader; no start
        return Drawn()
    finally:
        _end(drawers)


class DeviceLoad:
    """A process that multiplies matrices on a device."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def products_per_s(self, began: float, ended: float) -> float:
        """Products per second in a window of the monotonic clock that may end later; 0 if the process has ended."""
        try:
            _pipe(self._process.stdin).write(json.dumps([began, ended]).encode() + b"\n")
            return float(json.loads(_line(self._process, ended + _LIMIT_S)))
        except (ValueError, OSError):
            return 0.0

    def share_kept(self, drawn: Drawn) -> float:
        """Its speed while these frames were drawn over that of the next second, in which nobody draws; 0 to 1."""
        beside, now = self.products_per_s(drawn.began, drawn.ended), time.monotonic()
        alone = self.products_per_s(now, now + _DRAW_S)
        return min(1.0, beside / alone) if alone else 0.0


@contextmanager
def start_load(device: str, limit_s: float = _LIMIT_S) -> Iterator[DeviceLoad | None]:
    """A load on this device within the block; None if there can be none, as in a Python without torch."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        with suppress(OSError):
            started.append(_start(_LOAD, device))
        works = bool(started) and _line(started[0], time.monotonic() + limit_s) == _READY
        yield DeviceLoad(started[0]) if works else None
    finally:
        _end(started)


def _start(*words: str, **variables: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        env={**os.environ, **same_imports(), **variables},
    )


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        with suppress(OSError):
            _pipe(process.stdin).close()
        _pipe(process.stdout).close()


def _line(process: subprocess.Popen[bytes], until: float) -> bytes:
    """The next line; b"" if the process ends or the time limit passes first."""
    pipe = _pipe(process.stdout)
    ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
    return pipe.readline() if ready else b""


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None, "it was asked for"
    return end


# ------------------------------------------------------------ in a drawer


def _draw(line: IO[bytes]) -> None:
    """Report the first frame, wait for a line, draw, and report the frame count with its times."""
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
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # for what a driver may print
    _draw(answers)
