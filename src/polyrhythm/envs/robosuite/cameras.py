"""Draws a model's named cameras. One GL context serves all rows whose models are equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import mujoco

Quality = Literal["cheap", "full"]
#: Geoms of group 0 are collision shapes, those of group 1 are drawn.
_COLLISION_GROUP = 0
_COSTLY = ("SHADOW", "REFLECTION", "SKYBOX", "HAZE", "FOG")


class CameraRenderer:
    """Renderer to `size` × `size` RGB images; use it only in the thread that made it. Choose the GL backend before."""

    def __init__(self, model: mujoco.MjModel, size: int, quality: Quality) -> None:
        import mujoco

        self.model = model
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        if quality == "cheap":  # the GL context reads these once
            model.vis.quality.offsamples = 0
            model.vis.quality.shadowsize = 0
        # Its __del__ reads these, even if Ctrl-C interrupted its __init__.
        self._renderer = mujoco.Renderer.__new__(mujoco.Renderer)
        self._renderer._gl_context = self._renderer._mjr_context = None
        self._renderer.__init__(model, size, size)
        self._option = mujoco.MjvOption()
        self._option.geomgroup[_COLLISION_GROUP] = 0
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        if quality == "cheap":
            for name in _COSTLY:
                self._renderer.scene.flags[getattr(mujoco.mjtRndFlag, f"mjRND_{name}")] = 0

    def draw(self, model: mujoco.MjModel, data: mujoco.MjData, camera: int, out: NDArray[np.uint8]) -> None:
        """Draw a state (kinematics up to date) of a model equal to this renderer's: uint8 [size,size,3], row 0 on
        top. camera: index in the model."""
        import mujoco

        self._camera.fixedcamid = camera
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(model, data, self._option, None, self._camera, everything, self._renderer.scene)
        self._renderer.render(out=out)

    def close(self) -> None:
        """Free the GL context."""
        self._renderer.close()
