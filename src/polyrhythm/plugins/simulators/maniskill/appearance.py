"""Changes camera and lights of a ManiSkill scene of one row; physics is untouched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from polyrhythm.plugins.simulators.variation import Appearance


class Scene:
    """The camera and the lights of an environment with one row. camera: the name of the policy's; empty without one.

    ManiSkill may make a scene anew at a reset, so that lights and camera are the usual ones again."""

    def __init__(self, env: Any, camera: str) -> None:
        self._env, self._camera = env, camera
        self._known: Any = None
        self._usual: tuple[Any, list[tuple[Any, Any]]] = (None, [])

    def show(self, appearance: Appearance) -> None:
        """Show this appearance instead of the last one. A camera that moves with the robot stays where it is."""
        sensor = self._env._sensors[self._camera]
        if appearance.shift and sensor.entity is None:
            sensor.camera.set_local_pose(_turned(sensor.config.pose.sp, appearance))
        scene = self._env.scene.sub_scenes[0]
        if scene is not self._known:
            self._known, self._usual = scene, (np.array(scene.ambient_light), _lights(scene))
        ambient, lights = self._usual
        scene.set_ambient_light(list(appearance.brightness * ambient))
        for light, colour in lights:
            light.color = appearance.brightness * colour


def _lights(scene: Any) -> list[tuple[Any, Any]]:
    """Each light of the scene with its colour."""
    import sapien

    kind = sapien.render.RenderLightComponent
    found = [part for entity in scene.entities for part in entity.components if isinstance(part, kind)]
    return [(light, np.array(light.color)) for light in found]


def _turned(pose: Any, appearance: Appearance) -> Any:
    """The pose of a camera, which looks along x with z up, from elsewhere."""
    import sapien

    usual = pose.to_transformation_matrix().astype(np.float64)
    camera = SimpleNamespace(pos=usual[:3, 3].copy(), forward=usual[:3, 0].copy(), up=usual[:3, 2].copy())
    appearance.turn(camera)
    turned = np.eye(4)
    turned[:3, :4] = np.stack([camera.forward, np.cross(camera.up, camera.forward), camera.up, camera.pos], axis=1)
    return sapien.Pose(turned)
