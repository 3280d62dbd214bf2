"""Renders a model's named cameras. One GL context serves all rows with equal models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from polyrhythm.plugins.simulators.variation import Appearance, background_of, open_renderer

if TYPE_CHECKING:
    import mujoco

Quality = Literal["cheap", "full"]
#: Geoms of group 0 are collision shapes, those of group 1 are drawn.
_COLLISION_GROUP = 0


class CameraRenderer:
    """Renders `size` × `size` RGB images. Choose the GL backend first.

    moves: threads may use it one at a time, and none keeps its GL context; otherwise only the creating thread may use
    it.
    """

    def __init__(self, model: mujoco.MjModel, size: int, quality: Quality, *, moves: bool = False) -> None:
        import mujoco

        self.model, self._moves = model, moves
        if quality == "cheap":  # the GL context reads these once
            model.vis.quality.offsamples = 0
            model.vis.quality.shadowsize = 0
        self._renderer = open_renderer(model, size, cheap=quality == "cheap")
        self._option = mujoco.MjvOption()
        self._option.geomgroup[_COLLISION_GROUP] = 0
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._background = background_of(model)
        self._leave()

    def draw(
        self,
        model: mujoco.MjModel,
        data: mujoco.MjData,
        camera: int,
        out: NDArray[np.uint8],
        appearance: Appearance | None = None,
    ) -> None:
        """Render a state (kinematics up to date) of a model equal to this renderer's: uint8 [size,size,3], row 0 on
        top. camera: index in the model."""
        import mujoco

        self._camera.fixedcamid = camera
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(model, data, self._option, None, self._camera, everything, self._renderer.scene)
        if appearance is not None:
            stands = model.body_weldid[model.cam_bodyid[camera]] == 0
            appearance.apply(self._renderer.scene, self._background, moves_camera=bool(stands))
        self._renderer.render(out=out)
        self._leave()

    def close(self) -> None:
        self._renderer.close()

    def _leave(self) -> None:
        """Release the GL context from this thread, so that another one can use it."""
        if self._moves:
            _leave_context(self._renderer._gl_context)


def _leave_context(context: Any) -> None:
    """Make no context current; MuJoCo's contexts have no method for it."""
    backend = type(context).__module__.rpartition(".")[2]
    if backend == "osmesa":
        from OpenGL import GL, osmesa

        osmesa.OSMesaMakeCurrent(None, None, GL.GL_FLOAT, 0, 0)
    elif backend == "egl":
        from mujoco.egl import EGL, EGL_DISPLAY

        EGL.eglMakeCurrent(EGL_DISPLAY, EGL.EGL_NO_SURFACE, EGL.EGL_NO_SURFACE, EGL.EGL_NO_CONTEXT)
