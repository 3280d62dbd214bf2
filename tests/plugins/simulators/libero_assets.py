"""Assets for LIBERO's object suite, made here: a floor, and boxes in place of its groceries and basket.

LIBERO's package has no meshes. Its objects' poses do not depend on them, so its fixed initial states serve boxes too.
"""

from __future__ import annotations

import re
from pathlib import Path

from PIL import Image

#: Textures that LIBERO's floor scene names.
_TEXTURES = {"floor": (150, 150, 150), "wall": (90, 90, 140)}
_SITES = """
      <site rgba="0 0 0 0" size="0.005" pos="0 0 -0.03" name="bottom_site"/>
      <site rgba="0 0 0 0" size="0.005" pos="0 0 0.03" name="top_site"/>
      <site rgba="0 0 0 0" size="0.005" pos="0.02 0.02 0" name="horizontal_radius_site"/>"""
_CAMERAS = "".join(
    f'<camera mode="fixed" name="{name}" pos="1 0 1.45" quat="0.56 0.43 0.43 0.56"/>'
    for name in ("frontview", "birdview", "agentview", "sideview")
)


def make_assets(folder: Path, task_files: Path) -> Path:
    """The folder, with all that the tasks in `task_files` (of libero_object) need."""
    from libero.libero.envs.arenas.style import STYLE_MAPPING

    for kind, colour in _TEXTURES.items():
        for name in STYLE_MAPPING[kind].values():
            _write_picture(folder / "textures" / name, colour)
    scenes = folder / "scenes"
    scenes.mkdir()
    (scenes / "libero_floor_base_style.xml").write_text(_scene())
    kinds = {kind for file in task_files.glob("*.bddl") for kind in re.findall(r"_1 - (\w+)", file.read_text())}
    for kind in kinds:
        shelf = "stable_scanned_objects" if kind == "basket" else "stable_hope_objects"
        place = folder / shelf / kind
        place.mkdir(parents=True)
        _write_picture(place / "texture_map.png", (200, 40, 40))
        (place / f"{kind}.xml").write_text(_basket() if kind == "basket" else _box(kind))
    return folder


def _write_picture(file: Path, colour: tuple[int, int, int]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), colour).save(file)


def _scene() -> str:
    return f"""<mujoco model="floor">
  <asset>
    <texture file="../textures/floor.png" type="2d" name="texplane"/>
    <material name="floorplane" texture="texplane" texrepeat="3 3"/>
    <texture file="../textures/wall.png" type="2d" name="tex-wall"/>
    <material name="walls_mat" texture="tex-wall"/>
  </asset>
  <worldbody>
    <body name="floor" pos="0 0 0">
      <geom condim="3" group="1" material="floorplane" name="floor" pos="0 0 0" size="3 3 .125" type="plane"/>
    </body>
    <geom pos="-2 0 1.5" quat="0.5 0.5 0.5 0.5" size="1.5 1.5 0.01" type="box" conaffinity="0" contype="0" group="1"
      name="wall_rear_visual" material="walls_mat"/>
    <light name="light1" diffuse=".8 .8 .8" dir="0 -.15 -1" directional="false" pos="1 1 4.0" castshadow="false"/>
    {_CAMERAS}
  </worldbody>
</mujoco>"""


def _box(kind: str) -> str:
    return _object(
        kind,
        '<geom type="box" size="0.02 0.02 0.03" group="0" density="100"/>'
        '<geom type="box" size="0.02 0.02 0.03" group="1" contype="0" conaffinity="0" material="picture"/>',
    )


def _basket() -> str:
    """A plate with the region in which things count as put into it."""
    return _object(
        "basket",
        '<site type="box" pos="0 0 0.07" quat="1 0 0 0" size="0.06 0.06 0.07" rgba="0 0 0 0" name="contain_region"/>'
        '<geom type="box" size="0.08 0.08 0.01" group="0" density="1000"/>'
        '<geom type="box" size="0.08 0.08 0.01" group="1" contype="0" conaffinity="0" material="picture"/>',
    )


def _object(name: str, parts: str) -> str:
    return f"""<mujoco model="{name}">
  <asset>
    <texture file="texture_map.png" name="tex-picture" type="2d"/>
    <material name="picture" texture="tex-picture" texuniform="false"/>
  </asset>
  <worldbody>
    <body>
      <body name="object">{parts}</body>{_SITES}
    </body>
  </worldbody>
</mujoco>"""
