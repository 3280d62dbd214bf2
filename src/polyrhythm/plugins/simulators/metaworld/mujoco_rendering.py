"""Renders MuJoCo scenes without a display: choice of the GL backend, and a renderer with two qualities.

MuJoCo selects its GL backend at import, so call `choose_gl_backend` before importing it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import StartError
from polyrhythm.plugins.simulators.appearance import Appearance, background_of
from polyrhythm.plugins.simulators.gl_choice import fastest
from polyrhythm.plugins.simulators.maniskill.drivers import count_gpus

if TYPE_CHECKING:
    import mujoco

Quality = Literal["cheap", "full"]
Camera = Literal["free", "corner2"]

_VARIABLE = "MUJOCO_GL"
_LIBRARIES = {"osmesa": ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so"), "egl": ("libEGL.so.1", "libEGL.so")}
#: Values of the variable with which MuJoCo draws: backends, and those that leave the choice to it.
_DRAWING = frozenset({"osmesa", "egl", "glfw", "glx", "cgl", "wgl", "enable", "enabled", "on", "true", "1"})
#: GL backends that need no screen, the preferred one first.
BACKENDS = tuple(_LIBRARIES)
_INSTALL = {
    "osmesa": "apt-get install -y libosmesa6",
    "egl": "apt-get install -y libegl1 libegl-mesa0 libgl1-mesa-dri",
}

#: A free camera above the right front of the table: upright, the whole workspace in view.
_LOOK_AT, _DISTANCE, _AZIMUTH, _ELEVATION = (0.0, 0.72, 0.12), 1.05, 130.0, -35.0
#: Where VLA papers have Meta-World's camera `corner2`, which looks upside down.
_CORNER_AT = (0.75, 0.075, 0.7)
#: Geoms of groups 0..2 are drawn; the higher groups hold collision shapes.
_VISUAL_GROUPS = 3


class RenderingUnavailable(StartError):
    """This machine cannot render; the message has the command that fixes it."""


def choose_gl_backend() -> None:
    """Set `MUJOCO_GL` if it is not set (Linux): osmesa, else egl, whichever library loads; with an NVIDIA GPU and both
    libraries the faster one, measured once (`gl_choice`).

    The window backend is never chosen, even with a display, since it does not allow rendering from other threads.
    Raises RenderingUnavailable with the missing library and the command that installs it.
    """
    logging.getLogger("OpenGL.acceleratesupport").setLevel(logging.WARNING)  # logs an optional package at INFO
    chosen = os.environ.get(_VARIABLE, "").lower().strip()
    if chosen and chosen not in _DRAWING:
        raise RenderingUnavailable(f"{_VARIABLE}={chosen}: MuJoCo draws nothing with it; set it to osmesa or egl")
    if not sys.platform.startswith("linux") or (chosen and chosen not in _LIBRARIES):
        return
    if chosen:
        if not is_loadable(chosen):
            raise RenderingUnavailable(f"{_VARIABLE}={chosen}, but its library is missing; run: {_INSTALL[chosen]}")
        return
    able = tuple(backend for backend in _LIBRARIES if is_loadable(backend))
    if not able:
        raise RenderingUnavailable(f"no GL library to render with (tried osmesa and egl); run: {_INSTALL['osmesa']}")
    found = preferred(able)
    if "mujoco" in sys.modules:
        raise RenderingUnavailable(
            f"mujoco was imported before the GL backend was chosen; set {_VARIABLE}={found} in the environment"
        )
    os.environ[_VARIABLE] = found


def offer_gl_backend() -> None:
    """Set `MUJOCO_GL` for environments that may be of MuJoCo and may render, without measuring and without an error:
    egl with an NVIDIA GPU, else osmesa, whichever library loads (Linux). It stays as it is if it is set, or MuJoCo is
    not installed, or imported already."""
    if _VARIABLE in os.environ or "mujoco" in sys.modules or not sys.platform.startswith("linux"):
        return
    if importlib.util.find_spec("mujoco") is None:
        return
    able = [backend for backend in BACKENDS if is_loadable(backend)]
    if able:
        os.environ[_VARIABLE] = "egl" if "egl" in able and count_gpus() > 0 else able[0]


def preferred(able: tuple[str, ...]) -> str:
    """Of the backends whose library loads the first one; with an NVIDIA GPU the faster one, which is measured."""
    measured = len(able) > 1 and count_gpus() > 0 and "mujoco" not in sys.modules
    return fastest(able) if measured else able[0]


def is_loadable(backend: str) -> bool:
    """Whether the library of one of `BACKENDS` can be loaded."""
    for library in _LIBRARIES[backend]:
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        return True
    return False


def move_corner(model: mujoco.MjModel) -> None:
    """Move the camera `corner2` to where VLA papers have it; before any state's kinematics are computed."""
    model.cam_pos[model.camera("corner2").id] = _CORNER_AT


def make_cheap(model: mujoco.MjModel, hidden_bodies: Collection[str], shown_sites: Collection[str]) -> None:
    """Prepare a model for cheap rendering; physics is unchanged.

    Multisampling and shadow maps off, one light, the geoms of `hidden_bodies` and all sites except `shown_sites`
    transparent. Call it before a `FrameRenderer` is made: the GL context reads these settings once.
    """
    model.vis.quality.offsamples = 0
    model.vis.quality.shadowsize = 0
    model.light_active[1:] = 0
    names = [model.body(int(body)).name for body in model.geom_bodyid]
    hidden = np.array([name in hidden_bodies for name in names], dtype=bool)
    model.geom_rgba[hidden, 3] = 0.0
    unseen = np.array([model.site(site).name not in shown_sites for site in range(model.nsite)], dtype=bool)
    model.site_rgba[unseen, 3] = 0.0


class FrameRenderer:
    """Renderer of one model's states to `size` × `size` RGB images; use it only in the thread that made it.

    camera: free: ours; corner2: Meta-World's, turned upright (see also `move_corner`).
    """

    def __init__(self, model: mujoco.MjModel, size: int, quality: Quality, camera: Camera = "free") -> None:
        import mujoco

        model.vis.global_.offwidth = model.vis.global_.offheight = size
        # Its __del__ reads these, even if Ctrl-C interrupted its __init__.
        self._renderer = mujoco.Renderer.__new__(mujoco.Renderer)
        self._renderer._gl_context = self._renderer._mjr_context = None
        self._renderer.__init__(model, size, size)
        self._turned = camera == "corner2"
        self._camera = _corner_camera(model) if self._turned else _free_camera()
        self._option = mujoco.MjvOption()
        self._option.geomgroup[_VISUAL_GROUPS:] = 0
        if quality == "cheap":
            for name in ("SHADOW", "REFLECTION", "SKYBOX", "HAZE", "FOG"):
                self._renderer.scene.flags[getattr(mujoco.mjtRndFlag, f"mjRND_{name}")] = 0
        self._background = background_of(model)

    def draw(self, data: mujoco.MjData, out: NDArray[np.uint8], appearance: Appearance | None = None) -> None:
        """Draw `data` (kinematics up to date) into `out` uint8 [size,size,3], row 0 on top."""
        self._renderer.update_scene(data, self._camera, self._option)
        if appearance is not None:
            appearance.apply(self._renderer.scene, self._background)
        if not self._turned:
            self._renderer.render(out=out)
            return
        out[:] = self._renderer.render()[::-1, ::-1]

    def close(self) -> None:
        """Free the GL context."""
        self._renderer.close()


def _free_camera() -> mujoco.MjvCamera:
    import mujoco

    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_FREE
    camera.lookat[:] = _LOOK_AT
    camera.distance, camera.azimuth, camera.elevation = _DISTANCE, _AZIMUTH, _ELEVATION
    return camera


def _corner_camera(model: mujoco.MjModel) -> mujoco.MjvCamera:
    import mujoco

    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
    camera.fixedcamid = model.camera("corner2").id
    return camera
