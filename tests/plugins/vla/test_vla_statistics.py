"""Statistics of every release are found, chosen by robot, and applied as the release applies them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.vla.scaling import Scaler, Scaling, StatePart, in_other_form
from polyrhythm.plugins.vla.statistics import robot_statistics

GOLDEN = Path(__file__).parent / "golden"
ENDS = {"q01": [-2.0, 0.0, 1.0], "q99": [2.0, 4.0, 1.0], "min": [-4.0, -1.0, 1.0], "max": [4.0, 5.0, 1.0]}
STATS = ENDS | {"mean": [0.5, 1.0, 1.0], "std": [2.0, 0.5, 0.0]}


def folder_of(folder: Path, files: Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Checkpoint:
    """A folder with these files and a network of one number."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    (folder / "config.json").write_text(json.dumps(config or {}))
    save_file({"x": torch.zeros(1)}, folder / "model.safetensors")
    return Checkpoint.open(folder)


def normalised(scaling: Scaling | None, values: list[float]) -> list[float]:
    assert scaling is not None
    return Scaler(scaling).normalise(torch.tensor(values)).tolist()


def undone(scaling: Scaling | None, values: list[float]) -> list[float]:
    assert scaling is not None
    return Scaler(scaling).unnormalise(torch.tensor(values)).tolist()


def openpi(**robots: Any) -> dict[str, Any]:
    return {f"assets/{key}/norm_stats.json": {"norm_stats": {"state": s, "actions": s}} for key, s in robots.items()}


def test_openpi_uses_quantiles_for_pi05_and_deviations_for_pi0(tmp_path: Path) -> None:
    source = folder_of(tmp_path, openpi(**{"physical-intelligence/libero": STATS}))
    pi0, pi05 = (robot_statistics(source, kind, "libero") for kind in ("pi0", "pi05"))
    assert pi0.key == "physical-intelligence/libero"
    assert normalised(pi0.actions, [2.5, 1.5, 1.0]) == pytest.approx([1.0, 1.0, 0.0], abs=1e-5)
    assert normalised(pi05.state, [3.0, 1.0, 1.0]) == pytest.approx([1.5, -0.5, -1.0], abs=1e-5)  # beyond, not clipped
    assert undone(pi05.actions, [0.0, 0.0, 0.3]) == pytest.approx([0.0, 2.0, 1.0], abs=1e-5)


def test_padding_behind_the_statistics_passes(tmp_path: Path) -> None:
    found = robot_statistics(folder_of(tmp_path, openpi(a=STATS)), "pi05", "")
    assert normalised(found.actions, [0.0, 2.0, 1.0, 7.5])[3] == 7.5


def test_openvla_masks_clips_and_forgives_the_ending(tmp_path: Path) -> None:
    action = STATS | {"mask": [True, False, True]}
    source = folder_of(
        tmp_path, {"dataset_statistics.json": {"libero_tiny_no_noops": {"action": action, "proprio": STATS}}}
    )
    for name in ("libero_tiny", "libero_tiny_no_noops", ""):
        found = robot_statistics(source, "openvla_oft", name)
        assert found.key == "libero_tiny_no_noops"
    assert undone(found.actions, [0.5, 0.5, 0.5]) == pytest.approx([1.0, 0.5, 1.0], abs=1e-6)
    assert normalised(found.state, [3.0, 1.0, 1.0]) == pytest.approx([1.0, -0.5, -1.0], abs=1e-6)


def test_openvla_statistics_may_lie_in_the_configuration(tmp_path: Path) -> None:
    source = folder_of(tmp_path, {}, {"norm_stats": {"bridge_orig": {"action": STATS}}})
    found = robot_statistics(source, "openvla_oft", "bridge_orig")
    assert found.state is None
    assert undone(found.actions, [1.0, 1.0, 0.0])[:2] == pytest.approx([2.0, 4.0])


def test_aloha_uses_extremes(tmp_path: Path) -> None:
    source = folder_of(tmp_path, {"dataset_statistics.json": {"aloha_fold": {"action": STATS, "proprio": STATS}}})
    assert undone(robot_statistics(source, "openvla_oft", "").actions, [1.0, -1.0, 0.0])[:2] == pytest.approx(
        [4.0, -1.0]
    )


def test_groot_joins_its_keys_and_maps_what_never_varied_to_zero(tmp_path: Path) -> None:
    parts = {name: {key: values[i] for key, values in STATS.items()} for i, name in enumerate("xyz")}
    parts = {name: {key: [value] for key, value in part.items()} for name, part in parts.items()}
    tag = {"statistics": {"state": parts, "action": parts}, "modalities": {}}
    source = folder_of(tmp_path, {"experiment_cfg/metadata.json": {"gr1": tag}})
    found = robot_statistics(source, "groot_n1d5", "gr1", "min_max")
    assert normalised(found.state, [4.0, 2.0, 9.0]) == pytest.approx([1.0, 0.0, 0.0])
    assert undone(found.actions, [1.0, 0.0, 0.7]) == pytest.approx([4.0, 2.0, 1.0])


ARM = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
GR1 = {"waist": 3, "right_hand": 6, "left_arm": 7, "right_arm": 7, "left_hand": 6, "neck": 3}


def groot_folder(
    folder: Path, rotations: Mapping[str, str] | None = None, **tags: Mapping[str, Mapping[str, int]]
) -> Checkpoint:
    """A folder of GR00T; tags: of each embodiment the widths of its keys of state and action. Entries i = 0, 1, ... of
    a key are from -i-1 to i+1 with mean i/2 and deviation i+2. rotations: of keys the form of their rotation."""
    forms = {key: {"rotation_type": form} for key, form in (rotations or {}).items()}

    def numbers(width: int) -> dict[str, list[float]]:
        i = np.arange(width, dtype=float)
        return {"min": (-i - 1).tolist(), "max": (i + 1).tolist(), "mean": (i / 2).tolist(), "std": (i + 2).tolist()}

    content = {
        tag: {
            "statistics": {kind: {key: numbers(n) for key, n in keys.items()} for kind, keys in kinds.items()},
            "modalities": {"state": forms, "action": forms},
        }
        for tag, kinds in tags.items()
    }
    return folder_of(folder, {"experiment_cfg/metadata.json": content})


def arm(gripper: int = 1) -> dict[str, dict[str, int]]:
    state = {**dict.fromkeys(ARM, 1), "gripper": gripper}
    return {"state": state, "action": dict.fromkeys(ARM, 1)}


def test_groots_libero_goal_has_actions_by_mean_and_deviation(tmp_path: Path) -> None:
    source = groot_folder(tmp_path, new_embodiment=arm(gripper=2), libero_franka=arm())
    goal = robot_statistics(source, "groot_n1d5", "new_embodiment", "libero_mean_std")
    assert undone(goal.actions, [0.5] * 7) == [1.0] * 6 + [0.5], "the gripper by its extremes"
    assert normalised(goal.actions, [1.0] * 6 + [0.5]) == [0.5] * 7
    assert normalised(goal.state, [0.5] * 7 + [1.0]) == [0.5] * 8
    spatial = robot_statistics(source, "groot_n1d5", "new_embodiment", "libero")
    assert undone(spatial.actions, [0.25] * 7) == [0.25] * 7
    assert undone(robot_statistics(source, "groot_n1d5", "libero_franka").actions, [0.25] * 7) == [0.25] * 7, "RLinf's"


def test_groots_keys_have_the_data_configurations_order(tmp_path: Path) -> None:
    source = groot_folder(tmp_path, gr1={"state": GR1, "action": GR1})
    found = robot_statistics(source, "groot_n1d5", "gr1")
    assert found.parts == tuple((width, "sin_cos") for width in (7, 7, 6, 6)), "sines and cosines of arms and hands"
    assert normalised(found.state, [0.3] * 26) == pytest.approx([0.3] * 26), "of the angles as they are"
    assert undone(found.actions, [1.0] * 26) == [*range(1, 8)] * 2 + [*range(1, 7)] * 2
    waist = robot_statistics(source, "groot_n1d5", "gr1", "fourier_gr1_arms_waist")
    assert [part.width for part in waist.parts] == [7, 7, 6, 6, 3]
    assert sum(part.taken for part in waist.parts) == 58
    upper = robot_statistics(source, "groot_n1d5", "gr1", "fourier_gr1_full_upper_body")
    assert upper.parts == ()
    assert normalised(upper.state, [1.0] * 32)[7:10] == pytest.approx([1.0, 0.5, 1 / 3])


def test_groots_angles_and_switches(tmp_path: Path) -> None:
    panda = {
        "state": {"right_arm_eef_pos": 3, "right_arm_eef_quat": 4, "right_hand": 2},
        "action": {f"{side}_{part}": n for side in ("left", "right") for part, n in PANDA_ACTION.items()},
    }
    source = groot_folder(
        tmp_path, maniskill_widowx={"state": {"left_arm": 7}, "action": {"left_arm": 7}}, pair=panda | {"state": {}}
    )
    widowx = robot_statistics(source, "groot_n1d5", "maniskill_widowx")
    assert widowx.parts == ((7, "sin_cos"),)
    assert undone(widowx.actions, [-1.0] * 7) == [-1.0 - i for i in range(7)]
    pair = robot_statistics(source, "groot_n1d5", "pair", "bimanual_panda_gripper")
    assert pair.state is None
    given = [0.4, 0.6, 2.0, 0.1, -0.2, 0.3, 0.7, *[5.0] * 6, 0.2]
    assert undone(pair.actions, given) == pytest.approx([*given[:6], 1.0, *given[7:13], 0.0])


DROID = {
    "state": {"eef_position": 3, "eef_rotation": 3, "gripper_position": 1},
    "action": {"eef_position_delta": 3, "eef_rotation_delta": 3, "gripper_position": 1},
}


def test_groots_droid_has_rotations_in_6d(tmp_path: Path) -> None:
    forms = {"eef_rotation": "euler_angles_rpy", "eef_rotation_delta": "axis_angle"}
    found = robot_statistics(groot_folder(tmp_path, forms, oxe_droid=DROID), "groot_n1d5", "oxe_droid")
    assert found.parts == ((3, ""), (3, "euler_angles_rpy"), (1, ""))
    assert normalised(found.state, [1.0, 2.0, 3.0, 0.4, 0.5, 0.6, -1.0])[3:] == pytest.approx([0.4, 0.5, 0.6, -1.0])
    given = [0.25, 7.0, 0.5, 0.75, 0.5, 1.5, 0.75]
    assert undone(found.actions, given) == [*given[:6], 1.0], "as they are, and a switch"


COS, SIN = np.cos(0.5), np.sin(0.5)


@pytest.mark.parametrize(
    ("form", "given", "rows"),
    [
        ("sin_cos", [0.5, 0.0], [SIN, 0.0, COS, 1.0]),
        ("quaternion", [np.cos(0.25), 0.0, 0.0, np.sin(0.25)], [COS, -SIN, 0.0, SIN, COS, 0.0]),
        ("quaternion", [2.0 * np.cos(0.25), 2.0 * np.sin(0.25), 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, COS, -SIN]),
        ("axis_angle", [0.0, 0.5, 0.0], [COS, 0.0, SIN, 0.0, 1.0, 0.0]),
        ("axis_angle", [0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]),
        ("euler_angles_rpy", [0.0, 0.0, 0.5], [COS, -SIN, 0.0, SIN, COS, 0.0]),
        ("euler_angles_ypr", [0.5, 0.0, 0.0], [COS, -SIN, 0.0, SIN, COS, 0.0]),
        # a quarter turn about x, then half a radian about the turned z
        ("euler_angles_rpy", [np.pi / 2, 0.0, 0.5], [COS, -SIN, 0.0, 0.0, 0.0, -1.0]),
        ("euler_angles_ypr", [0.5, 0.0, np.pi / 2], [COS, 0.0, SIN, SIN, 0.0, -COS]),
        ("matrix", [*range(9)], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
    ],
)
def test_other_forms_of_a_state(form: str, given: list[float], rows: list[float]) -> None:
    state = torch.tensor([[7.0, *given, 8.0]] * 2, dtype=torch.float64)
    parts = StatePart(1, ""), StatePart(len(given), form), StatePart(1, "")
    found = in_other_form(state, parts)
    assert found.shape[1] == sum(part.taken for part in parts)
    assert found[1].tolist() == pytest.approx([7.0, *rows, 8.0], abs=1e-12)


PANDA_ACTION = {"gripper_close": 1, "arm_eef_rot": 3, "arm_eef_pos": 3}


@pytest.mark.parametrize(
    ("tag", "kinds", "data_config", "expected"),
    [
        ("new_embodiment", arm(), "", r"policy.data_config is not set: .*metadata.json has the statistics of new_emb"),
        ("arm", arm(), "", r"statistics of arm \(x, y, .* but not how they are used; set it to that of the fine-"),
        ("arm", arm(), "libero_mean", r"policy.data_config = 'libero_mean': .*; set it to .*libero_mean_std"),
        ("gr1", arm(), "", r"policy.data_config = 'fourier_gr1_arms_only': .* of gr1.state.left_arm but x"),
        ("a", arm(), "fractal", r"no statistics of a.state.rx but x, y, "),
        (
            "oxe_droid",
            DROID,
            "",
            r"oxe_droid.state.eef_rotation becomes rotation_6d .*, which is not done here from 3 entries of None; set",
        ),
        (
            "oxe_droid",
            DROID | {"state": {}},
            "",
            r"oxe_droid.action.eef_rotation_delta becomes axis_angle before the network, which is not done here; set",
        ),
    ],
)
def test_groots_transforms_that_are_not_known_are_refused(
    tmp_path: Path, tag: str, kinds: dict[str, dict[str, int]], data_config: str, expected: str
) -> None:
    source = groot_folder(tmp_path, **{tag: kinds, "libero_franka": arm()})
    with pytest.raises(ConfigError, match=expected) as caught:
        robot_statistics(source, "groot_n1d5", tag, data_config)
    assert "\n" not in str(caught.value)
    assert robot_statistics(source, "groot_n1d5", "libero_franka").key == "libero_franka", "of no other robot"


@pytest.mark.parametrize(("mode", "expected"), [("MEAN_STD", 1.0), ("MIN_MAX", 0.625), ("QUANTILES", 1.25)])
def test_lerobot_normalises_by_the_mode_of_its_processor(tmp_path: Path, mode: str, expected: float) -> None:
    step = {"config": {"norm_map": {"STATE": mode, "ACTION": mode}}}
    folder_of(tmp_path, {"policy_preprocessor.json": {"steps": [step]}})
    tensors = {f"{key}.{stat}": torch.tensor(x) for key in ("action", "observation.state") for stat, x in STATS.items()}
    save_file(tensors, tmp_path / "policy_preprocessor_step_3_normalizer_processor.safetensors")
    found = robot_statistics(Checkpoint.open(tmp_path), "pi0", "")
    assert normalised(found.state, [2.5, 1.0, 1.0])[0] == pytest.approx(expected, abs=1e-6)
    assert undone(found.actions, [expected, 0.0, 0.0])[0] == pytest.approx(2.5, abs=1e-6)


def test_lerobots_older_buffers_are_read(tmp_path: Path) -> None:
    folder_of(tmp_path, {})
    buffers = {"normalize_inputs.buffer_observation_state", "unnormalize_outputs.buffer_action"}
    tensors = {f"{name}.{stat}": torch.tensor(STATS[stat]) for name in buffers for stat in ("mean", "std")}
    save_file(tensors | {"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    found = robot_statistics(Checkpoint.open(tmp_path), "pi0", "")
    assert normalised(found.state, [2.5, 1.5, 1.0]) == pytest.approx([1.0, 1.0, 0.0], abs=1e-6)


def test_the_statistics_of_a_lerobot_dataset_serve_where_a_checkpoint_has_none(tmp_path: Path) -> None:
    stats = {"action": STATS, "observation.state": STATS, "index": STATS}
    found = robot_statistics(folder_of(tmp_path, {"meta/stats.json": stats}), "pi0", "")
    assert normalised(found.state, [2.5, 1.5, 1.0]) == pytest.approx([1.0, 1.0, 0.0], abs=1e-6)
    assert undone(found.actions, [1.0, 1.0, 0.0]) == pytest.approx([2.5, 1.5, 1.0], abs=1e-6)
    folder_of(tmp_path, {"assets/own/norm_stats.json": {"norm_stats": {"state": STATS, "actions": STATS}}})
    assert robot_statistics(Checkpoint.open(tmp_path), "pi0", "").key == "own", "the release's own come first"


def test_the_golden_folder_of_openvla_has_its_statistics() -> None:
    found = robot_statistics(Checkpoint.open(GOLDEN / "openvla_oft"), "openvla_oft", "libero_tiny")
    stats = json.loads((GOLDEN / "openvla_oft" / "dataset_statistics.json").read_text())["libero_tiny_no_noops"][
        "action"
    ]
    assert undone(found.actions, [1.0] * 7)[:6] == pytest.approx(stats["q99"][:6], abs=1e-6)
    assert undone(found.actions, [0.25] * 7)[6] == 0.25


def test_scalings_of_chosen_entries() -> None:
    source = Checkpoint.open(GOLDEN / "openvla_oft")
    whole = robot_statistics(source, "openvla_oft", "").actions
    assert whole is not None
    x = np.linspace(-1.0, 1.0, 7).tolist()
    assert undone(whole.chosen([5, 0]), [x[5], x[0]]) == [undone(whole, x)[5], undone(whole, x)[0]]


@pytest.mark.parametrize(
    ("files", "robot", "expected"),
    [
        ({}, "", "has no normalisation statistics .*norm_stats.json.*policy.robot = 'bounds'"),
        (openpi(a=STATS, b=STATS), "", "policy.robot is not set.*2 robots .*a, b.*set policy.robot"),
        (openpi(a=STATS, b=STATS), "c", "policy.robot = 'c'.* statistics of a, b; set policy.robot"),
        (openpi(a={"mean": [0.0]}), "", "norm_stats.json: state has no 'std' but mean; copy"),
        (openpi(a={"mean": [0.0], "std": [1.0, 2.0]}), "", "1 numbers in mean and 2 in std"),
        (openpi(a={"mean": ["?"], "std": [1.0]}), "", "state.mean is not a list of finite numbers"),
        ({"assets/a/norm_stats.json": {"state": {}}}, "", "norm_stats.json has no 'norm_stats' but state"),
        ({"assets/a/norm_stats.json": "{"}, "", "norm_stats.json is not JSON"),
        (
            {"dataset_statistics.json": {"a": {"action": {"q01": [0.0], "q99": [1.0], "mask": [True, False]}}}},
            "",
            "a.action has 1 numbers and a mask of 2; copy",
        ),
        ({"experiment_cfg/metadata.json": {"a": {"statistics": []}}}, "", "a has a list as 'statistics'; copy"),
        ({"experiment_cfg/metadata.json": {"a": {"statistics": {"state": 3}}}}, "", "has a int as 'state'; copy"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, files: dict[str, Any], robot: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        robot_statistics(folder_of(tmp_path, files), "pi0", robot)
    assert len(caught.value.problems) == 1
    assert "\n" not in str(caught.value)
