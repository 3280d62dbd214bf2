"""Stands in for the downloads of ManiSkill's bridge tasks: an arm of boxes with the WidowX's joints, a table, a carrot
and a plate of boxes, and a photograph of one colour. Needs trimesh, which ManiSkill brings.

`python -m tests.plugins.simulators.bridge_assets FOLDER` makes them for MS_ASSET_DIR=FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

#: Colour of the photograph that ManiSkill lays over the background.
BACKGROUND = (10, 200, 30)
#: Link → its parent, the joint's name, kind, axis, limits and place at the parent.
_ARM = {
    "shoulder_link": ("base_link", "waist", "revolute", "0 0 1", (-3.1, 3.1), "0 0 0.07"),
    "upper_arm_link": ("shoulder_link", "shoulder", "revolute", "0 1 0", (-1.9, 1.9), "0 0 0.04"),
    "upper_forearm_link": ("upper_arm_link", "elbow", "revolute", "0 1 0", (-2.1, 1.6), "0.05 0 0.25"),
    "lower_forearm_link": ("upper_forearm_link", "forearm_roll", "revolute", "1 0 0", (-3.1, 3.1), "0.17 0 0"),
    "wrist_link": ("lower_forearm_link", "wrist_angle", "revolute", "0 1 0", (-1.7, 2.1), "0.08 0 0"),
    "gripper_link": ("wrist_link", "wrist_rotate", "revolute", "1 0 0", (-3.1, 3.1), "0.06 0 0"),
    "ee_gripper_link": ("gripper_link", "ee_gripper", "fixed", "1 0 0", None, "0.09 0 0"),
    "left_finger_link": ("gripper_link", "left_finger", "prismatic", "0 1 0", (0.015, 0.037), "0.07 0 0"),
    "right_finger_link": ("gripper_link", "right_finger", "prismatic", "0 -1 0", (0.015, 0.037), "0.07 0 0"),
}
#: Model → edges of its box in metres.
_MODELS = {
    "bridge_carrot_generated_modified": (0.08, 0.02, 0.02),
    "bridge_plate_objaverse_larger": (0.12, 0.12, 0.01),
}


def make_assets(folder: Path) -> None:
    """Write the robot and the data of the bridge tasks with a flat table below the folder."""
    robot = folder / "data" / "robots" / "widowx"
    robot.mkdir(parents=True)
    (robot / "wx250s.urdf").write_text(_urdf())
    data = folder / "data" / "tasks" / "bridge_v2_real2sim_dataset"
    for name in ("stages", "real_inpainting", "custom"):
        (data / name).mkdir(parents=True)
    # A top at a height of 0.87 m where ManiSkill's objects lie; the file has y upwards.
    _write_box(data / "stages" / "bridge_table_1_v1.glb", (1.0, 0.1, 1.0), (-2.22, 0.81, 2.83))
    photograph = np.full((480, 640, 3), BACKGROUND, np.uint8)
    Image.fromarray(photograph).save(data / "real_inpainting" / "bridge_real_eval_1.png")
    known = {}
    for name, edges in _MODELS.items():
        half = [edge / 2 for edge in edges]
        known[name] = {"bbox": {"min": [-h for h in half], "max": half}, "scales": [1.0], "density": 1000}
        model = data / "custom" / "models" / name
        model.mkdir(parents=True)
        for file in ("collision.obj", "textured.obj"):
            _write_box(model / file, edges)
    (data / "custom" / "info_bridge_custom_v0.json").write_text(json.dumps(known))


def _write_box(file: Path, edges: tuple[float, ...], middle: tuple[float, ...] = (0.0, 0.0, 0.0)) -> None:
    import trimesh

    box = trimesh.creation.box(extents=edges)
    box.apply_translation(middle)
    box.export(file)


def _urdf() -> str:
    links = [_link("base_link"), *map(_link, _ARM)]
    joints = []
    for child, (parent, name, kind, axis, limits, place) in _ARM.items():
        limit = f'<limit effort="50" velocity="3" lower="{limits[0]}" upper="{limits[1]}"/>' if limits else ""
        joints.append(
            f'<joint name="{name}" type="{kind}"><axis xyz="{axis}"/>{limit}<origin xyz="{place}" rpy="0 0 0"/>'
            f'<parent link="{parent}"/><child link="{child}"/></joint>'
        )
    return f'<robot name="wx250s">{"".join(links + joints)}</robot>'


def _link(name: str) -> str:
    edges = "0.04 0.005 0.02" if "finger" in name else "0.03 0.03 0.03"
    inertial = (
        '<inertial><mass value="0.2"/><inertia ixx="1e-4" iyy="1e-4" izz="1e-4" ixy="0" ixz="0" iyz="0"/></inertial>'
    )
    box = f'<geometry><box size="{edges}"/></geometry>'
    return f'<link name="{name}">{inertial}<visual>{box}</visual></link>'


if __name__ == "__main__":
    make_assets(Path(sys.argv[1]))
