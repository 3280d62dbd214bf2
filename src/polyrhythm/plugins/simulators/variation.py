"""Variants: the look of MuJoCo scenes (camera, light, colours), and positions beyond a simulator's range.

Both are drawn for each episode from its seed. Looks do not affect physics: a scene is changed after it was updated from
model and state, so nothing has to be undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from polyrhythm.config.base import InvalidSetting, Section
from polyrhythm.envs.base import Variant
from polyrhythm.specs.hashing import mix

if TYPE_CHECKING:
    import mujoco

#: Hash domain of the draws, which are independent of the initial state.
_DOMAIN = 7
#: The camera moves on a sphere around the point this far ahead of it, in metres.
_AHEAD = 1.0
#: Width of the shell around a range of places, in shares of its extent.
_MARGIN = 0.25
#: Parts of names of bodies that are background.
_BACKGROUND = ("table", "wall", "floor", "arena")

Vector = NDArray[np.float64]


class AppearanceSettings(Section):
    """How far pictures differ from the simulator's. What is drawn is drawn for each episode from its seed."""

    camera_shift: Annotated[float, Field(ge=0, le=45)] = 0.0
    """Degrees by which the camera looks from elsewhere; from where is drawn. Cameras that move with a robot stay."""
    light_change: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """Share by which lights are brighter or darker; which of the two is drawn."""
    colour_change: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a drawn colour in that of table, floor and walls, textures included."""

    @property
    def is_usual(self) -> bool:
        """Whether all settings have their neutral values."""
        return not (self.camera_shift or self.light_change or self.colour_change)

    def refuse_unseen(self) -> None:
        """InvalidSetting: a setting is not neutral, in an environment without images."""
        for name, value in self:
            if value:
                why = "observation: state has no pictures; leave it out, or observe pixels"
                raise InvalidSetting(f"appearance.{name}", value, why)


#: The variants of an environment with a section `appearance`.
VISION: dict[str, Variant] = {
    "camera": Variant("vision", "camera 10 degrees away", {"appearance": {"camera_shift": 10.0}}),
    "lighting": Variant("vision", "lights brighter or darker by half", {"appearance": {"light_change": 0.5}}),
    "texture": Variant("vision", "table, floor and walls in other colours", {"appearance": {"colour_change": 0.6}}),
}


@dataclass(frozen=True, slots=True)
class Appearance:
    """Appearance of one episode. shift: angle in radians between the camera's position and its usual one; direction:
    of the shift, as an angle in the image; brightness: factor of all lights; colour: RGB, mixed into the background
    with weight `share`."""

    shift: float
    direction: float
    brightness: float
    colour: tuple[float, float, float]
    share: float

    @classmethod
    def draw(cls, settings: AppearanceSettings, seed: int) -> Appearance | None:
        """The appearance of the episode with this seed; None for the usual one."""
        if settings.is_usual:
            return None
        way, light, red, green, blue = (mix(seed, _DOMAIN, number) / 2**63 for number in range(5))
        sign = 1 if light < 0.5 else -1
        return cls(
            shift=math.radians(settings.camera_shift),
            direction=2 * math.pi * way,
            brightness=1.0 + sign * settings.light_change,
            colour=(red, green, blue),
            share=settings.colour_change,
        )

    def apply(self, scene: mujoco.MjvScene, background: frozenset[int], *, moves_camera: bool = True) -> None:
        """Change a scene after it was updated. background: geoms that receive the colour (`background_of`)."""
        if moves_camera and self.shift:
            for camera in scene.camera:
                self.turn(camera)
        if self.brightness != 1.0:
            for light in scene.lights[: scene.nlight]:
                light.ambient[:] *= self.brightness
                light.diffuse[:] *= self.brightness
        if self.share:
            import mujoco

            kind = int(mujoco.mjtObj.mjOBJ_GEOM)
            for geom in scene.geoms[: scene.ngeom]:
                if geom.objtype == kind and geom.objid in background:
                    geom.rgba[:3] = (1 - self.share) * geom.rgba[:3] + self.share * np.array(self.colour)

    def turn(self, camera: Any) -> None:
        """Move a camera on its sphere, in place: arrays [3] `pos`, `forward` and `up`."""
        position, forward, up = (np.array(part, np.float64) for part in (camera.pos, camera.forward, camera.up))
        centre = position + _AHEAD * forward
        across = math.cos(self.direction) * up + math.sin(self.direction) * np.cross(forward, up)
        turn = _rotation(across, self.shift)
        camera.pos[:] = centre - _AHEAD * (turn @ forward)
        camera.forward[:], camera.up[:] = turn @ forward, turn @ up


def background_of(model: mujoco.MjModel) -> frozenset[int]:
    """Geoms of the world body and of bodies named as table, wall, floor or arena."""
    named = [model.body(int(body)).name.lower() for body in model.geom_bodyid]
    parts = [any(part in name for part in _BACKGROUND) for name in named]
    return frozenset(np.flatnonzero((model.geom_bodyid == 0) | np.array(parts, bool)).tolist())


def _rotation(axis: NDArray[np.float64], angle: float) -> NDArray[np.float64]:
    x, y, z = axis / np.linalg.norm(axis)
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    turn: NDArray[np.float64] = np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * (cross @ cross)
    return turn


class SceneRenderer:
    """Renders `size` × `size` RGB images of a model, and of models equal to it. Choose the GL backend first.

    cheap: without multisampling, shadows, reflections, sky, haze and fog; hidden: groups of geoms that are not drawn.
    moves: threads may use it one at a time, and none keeps its GL context; otherwise only the creating thread may use
    it.
    """

    def __init__(
        self, model: mujoco.MjModel, size: int, hidden: slice | int, *, cheap: bool, moves: bool = False
    ) -> None:
        import mujoco

        self.model, self._moves = model, moves
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        if cheap:  # the GL context reads the quality once, here
            model.vis.quality.offsamples = model.vis.quality.shadowsize = 0
        # Its __del__ reads these, even if Ctrl-C interrupted its __init__.
        self._renderer = mujoco.Renderer.__new__(mujoco.Renderer)
        self._renderer._gl_context = self._renderer._mjr_context = None
        self._renderer.__init__(model, size, size)
        flag = mujoco.mjtRndFlag
        dear = (flag.mjRND_SHADOW, flag.mjRND_REFLECTION, flag.mjRND_SKYBOX, flag.mjRND_HAZE, flag.mjRND_FOG)
        for each in dear if cheap else ():
            self._renderer.scene.flags[each] = 0
        self._option = mujoco.MjvOption()
        self._option.geomgroup[hidden] = 0
        self._background = background_of(model)
        self._leave()

    def draw(
        self,
        model: mujoco.MjModel,
        data: mujoco.MjData,
        camera: mujoco.MjvCamera,
        out: NDArray[Any],
        appearance: Appearance | None = None,
    ) -> None:
        """Render a state (kinematics up to date): uint8 [size,size,3], row 0 on top."""
        import mujoco

        everything, scene = mujoco.mjtCatBit.mjCAT_ALL, self._renderer.scene
        mujoco.mjv_updateScene(model, data, self._option, None, camera, everything, scene)
        if appearance is not None:
            fixed = camera.type == mujoco.mjtCamera.mjCAMERA_FIXED
            stands = not fixed or model.body_weldid[model.cam_bodyid[camera.fixedcamid]] == 0
            appearance.apply(scene, self._background, moves_camera=bool(stands))
        self._renderer.render(out=out)
        self._leave()

    def close(self) -> None:
        self._renderer.close()

    def _leave(self) -> None:
        """Make no GL context current in this thread, so that another one can use it; MuJoCo's have no method for it."""
        backend = type(self._renderer._gl_context).__module__.rpartition(".")[2] if self._moves else ""
        if backend == "osmesa":
            from OpenGL import GL, osmesa

            osmesa.OSMesaMakeCurrent(None, None, GL.GL_FLOAT, 0, 0)
        elif backend == "egl":
            from mujoco.egl import EGL, EGL_DISPLAY

            EGL.eglMakeCurrent(EGL_DISPLAY, EGL.EGL_NO_SURFACE, EGL.EGL_NO_SURFACE, EGL.EGL_NO_CONTEXT)


def fixed_camera(number: int) -> mujoco.MjvCamera:
    """The model's camera of this number."""
    import mujoco

    camera = mujoco.MjvCamera()
    camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, number
    return camera


def draw_beyond(
    uniform: Callable[[Vector, Vector], Vector], low: Vector, high: Vector, free: NDArray[np.bool_]
) -> Vector:
    """Coordinates in a shell around low..high: outside the range in at least one of the `free` coordinates, if any,
    by up to a quarter of its extent; other coordinates stay within. uniform: draws between two vectors."""
    margin = np.where(free, _MARGIN * (high - low), 0.0)
    while True:
        drawn = uniform(low - margin, high + margin)
        if not free.any() or ((drawn < low) | (drawn > high))[free].any():
            return drawn
