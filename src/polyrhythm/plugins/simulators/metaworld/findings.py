"""Rendering checks of Meta-World for `polyrhythm doctor`.

`python -m` this module and a task renders a frame as a run does, in a separate process because a broken driver may hang
or crash it. It prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

import numpy as np

from polyrhythm.conformance import Finding, last_line
from polyrhythm.errors import PolyrhythmError, as_root, install_command
from polyrhythm.imports import same_imports
from polyrhythm.plugins.simulators.base import time_batch
from polyrhythm.plugins.simulators.metaworld.env import MetaWorldSettings

#: Debian packages for rendering without a screen; tools/render_libs.sh installs the same.
RENDER_PACKAGES = "libosmesa6 libgl1 libegl1"
_TASK, _RENDER_S, _EXTRA = "door-close-v3", 120.0, "metaworld"


def findings() -> Iterator[Finding]:
    """Render a frame with each backend; the first one is that which the quickstart would use."""
    for backend, needed in backends().items():
        yield rendering(backend, needed=needed)


def backends() -> dict[str, bool]:
    """GL backends to try -> whether the quickstart would use it: MUJOCO_GL, else the choice of `choose_gl_backend`."""
    chosen = os.environ.get("MUJOCO_GL", "").lower().strip()
    try:
        from polyrhythm.envs.mujoco import BACKENDS, is_loadable, preferred
    except ImportError:
        return {chosen or "osmesa": True}
    chosen = chosen or preferred(tuple(filter(is_loadable, BACKENDS)) or BACKENDS[:1])
    return {chosen: True} | {name: False for name in BACKENDS if name != chosen}


def rendering(backend: str, *, needed: bool) -> Finding:
    name = f"rendering {backend}"
    bad: Literal["note", "missing"] = "missing" if needed else "note"
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", "polyrhythm.plugins.simulators.metaworld.findings", _TASK],
            capture_output=True,
            text=True,
            timeout=_RENDER_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **same_imports(), "MUJOCO_GL": backend},
        )
    except subprocess.TimeoutExpired:
        return Finding(name, bad, f"no frame of {_TASK} within {_RENDER_S:.0f} s", _fix(backend))
    if done.returncode:
        why = last_line(done.stderr).partition("; run:")[0]
        fix = install_command(_EXTRA) if "No module named" in why else _fix(backend)
        return Finding(name, bad, f"no frame of {_TASK}: {why}", fix)
    drawn = json.loads(done.stdout.splitlines()[-1])
    if drawn["shades"] < 2:
        return Finding(name, bad, f"a frame of {_TASK} is blank", _fix(backend))
    used = "" if needed else "; not used here"
    return Finding(name, "ok", f"a frame of {_TASK} in {drawn['frame_ms']:.0f} ms{used}")


def _fix(backend: str) -> str:
    if backend not in ("osmesa", "egl"):
        return "unset MUJOCO_GL"
    if not shutil.which("apt-get"):
        return f"(with your system's package manager) install OSMesa and EGL, on Debian {RENDER_PACKAGES}"
    return f"{as_root()}apt-get install -y {RENDER_PACKAGES}"


if __name__ == "__main__":
    try:
        timed = time_batch(MetaWorldSettings(tasks=(sys.argv[1],)))
        shades = len(np.unique(timed.observation["image"]))
        sys.stdout.write(json.dumps({"frame_ms": timed.observe_ms, "shades": shades}) + "\n")
    except (PolyrhythmError, ImportError) as error:
        sys.exit(str(error))
