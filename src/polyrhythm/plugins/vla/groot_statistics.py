"""Reads GR00T's statistics: the keys of an embodiment's state and action, their order and their transforms.

A folder has numbers for every key (experiment_cfg/metadata.json: {TAG: {"statistics": {"state" | "action": {KEY: {min,
max, mean, std, q01, q99}}}}}) but not the transforms, which the data configuration of its fine-tuning defines. Those
here are from NVIDIA's code before N1.6 (gr00t/experiment/data_config.py, examples/*/custom_data_config.py) and from
RLinf (gr00t_n1d5/modality_config.py). A folder of `new_embodiment` may use any of them.

    min_max, mean_std   see `scaling`; a constant entry becomes 0, with mean_std it is unchanged
    binary              1 above 0.5, else 0
    none                unchanged
    sin_cos             of the state: the sines of a key's entries, then their cosines
    rotation_6d         of the state: another form of a rotation (`state_parts`)
    axis_angle          of the action: refused if the folder has another form
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from polyrhythm.errors import ConfigError
from polyrhythm.plugins.pretrained.folder_files import mapping_in, number_pair
from polyrhythm.plugins.vla import scaling
from polyrhythm.plugins.vla.scaling import ROTATIONS, SIN_COS, Scaling, StatePart
from polyrhythm.readable import few

Transform = Literal["min_max", "mean_std", "binary", "none", "sin_cos", "rotation_6d", "axis_angle"]
#: Key -> what becomes of it, in the order in which the network takes them.
Transforms = Mapping[str, Transform]


class DataConfig(NamedTuple):
    """Keys of state and action; None: all keys of the folder, in its order, with min_max."""

    state: Transforms | None
    action: Transforms | None


def _all(transform: Transform, keys: Iterable[str]) -> dict[str, Transform]:
    return dict.fromkeys(keys, transform)


_ARMS = ("left_arm", "right_arm", "left_hand", "right_hand")
_PANDA = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
_GENIE = tuple(f"{side}_{part}_position" for part in ("arm_joint", "effector") for side in ("left", "right"))
_BODY = (*_GENIE, "head_position", "waist_position")
_MEAN_STD = {**_all("mean_std", _PANDA[:6]), "gripper": "min_max"}
_SIDES = ("right", "left")


def _two_pandas(hand: str, grip: str, closed: Transform) -> DataConfig:
    """NVIDIA's pair of Panda arms. hand, grip: keys of the hands and grippers in state and action."""
    state: dict[str, Transform] = {}
    action: dict[str, Transform] = {}
    for side in _SIDES:
        arm = f"{side}_arm_eef"
        state |= {f"{arm}_pos": "min_max", f"{arm}_quat": "rotation_6d", f"{side}_{hand}": "min_max"}
        action |= {f"{arm}_pos": "none", f"{arm}_rot": "none", f"{side}_{grip}": closed}
    return DataConfig(state, action)


DATA_CONFIGS: Mapping[str, DataConfig] = MappingProxyType(
    {
        "min_max": DataConfig(None, None),
        "fourier_gr1_arms_only": DataConfig(_all("sin_cos", _ARMS), _all("min_max", _ARMS)),
        "fourier_gr1_arms_waist": DataConfig(_all("sin_cos", (*_ARMS, "waist")), _all("min_max", (*_ARMS, "waist"))),
        "fourier_gr1_full_upper_body": DataConfig(
            _all("min_max", (*_ARMS, "waist", "neck")), _all("min_max", (*_ARMS, "waist", "neck"))
        ),
        "unitree_g1": DataConfig(_all("min_max", _ARMS), _all("min_max", _ARMS)),
        "unitree_g1_full_body": DataConfig(
            _all("min_max", ("left_leg", "right_leg", "waist", *_ARMS)), _all("min_max", _ARMS)
        ),
        "so100": DataConfig(_all("min_max", ("single_arm", "gripper")), _all("min_max", ("single_arm", "gripper"))),
        "agibot_genie1": DataConfig(_all("min_max", _BODY), _all("min_max", (*_BODY, "robot_velocity"))),
        "bimanual_panda_gripper": _two_pandas("gripper_qpos", "gripper_close", "binary"),
        "bimanual_panda_hand": _two_pandas("hand", "hand", "min_max"),
        "single_panda_gripper": DataConfig(
            {
                "end_effector_position_relative": "min_max",
                "end_effector_rotation_relative": "rotation_6d",
                "gripper_qpos": "min_max",
                "base_position": "min_max",
                "base_rotation": "rotation_6d",
            },
            {
                **_all("min_max", ("end_effector_position", "end_effector_rotation")),
                "gripper_close": "binary",
                "base_motion": "min_max",
                "control_mode": "binary",
            },
        ),
        "oxe_droid": DataConfig(
            {"eef_position": "min_max", "eef_rotation": "rotation_6d", "gripper_position": "min_max"},
            {"eef_position_delta": "none", "eef_rotation_delta": "axis_angle", "gripper_position": "binary"},
        ),
        "libero": DataConfig(_all("min_max", _PANDA), _all("min_max", _PANDA)),
        "libero_mean_std": DataConfig(_all("min_max", _PANDA), _MEAN_STD),
        "fractal": DataConfig(_all("min_max", ("x", "y", "z", "rx", "ry", "rz", "rw", "gripper")), _MEAN_STD),
        "bridge": DataConfig(_all("min_max", (*_PANDA[:6], "pad", "gripper")), _all("min_max", _PANDA)),
        "maniskill_widowx": DataConfig({"left_arm": "sin_cos"}, {"left_arm": "min_max"}),
    }
)
#: Embodiment -> its data configuration where only one is known.
OF_EMBODIMENT = {
    "gr1": "fourier_gr1_arms_only",
    "oxe_droid": "oxe_droid",
    "agibot_genie1": "agibot_genie1",
    "genie1_gripper": "agibot_genie1",
    "libero_franka": "libero",
    "isaaclab_franka": "libero",
    "maniskill_widowx": "maniskill_widowx",
}


def groot_scalings(
    tag: str, robot: Mapping[str, Any], name: str, origin: str
) -> tuple[Scaling | None, Scaling | None, tuple[StatePart, ...]]:
    """Scalings of one embodiment's state and actions, None if the folder has no numbers, and the parts of a state that
    the network reads in another form. name: of its data configuration, "" for the embodiment's own. ConfigError: no
    configuration is known, it needs a missing key, or an unsupported transform."""
    statistics = mapping_in(robot, "statistics", f"{origin}: {tag}")
    state, action = (mapping_in(statistics, kind, origin) for kind in ("state", "action"))
    if not state and not action:
        return None, None, ()
    chosen = name or OF_EMBODIMENT.get(tag, "")
    if chosen not in DATA_CONFIGS:
        what = f"policy.data_config = {chosen!r}" if chosen else "policy.data_config is not set"
        raise ConfigError(
            f"{what}: {origin} has the statistics of {tag} ({few([*action], 8)}) but not how they are used; set it to "
            f"that of the fine-tuning ({', '.join(DATA_CONFIGS)})"
        )
    config = DATA_CONFIGS[chosen]
    of_state, of_action = config.state or _all("min_max", state), config.action or _all("min_max", action)
    for kind, wanted, there in (("state", of_state, state), ("action", of_action, action)):
        if there and (absent := [key for key in wanted if key not in there]):
            raise ConfigError(
                f"policy.data_config = {chosen!r}: {origin} has no statistics of {tag}.{kind}.{absent[0]} but "
                f"{few([*there], 8)}; set it to the data configuration of the fine-tuning ({', '.join(DATA_CONFIGS)})"
            )
    modalities = mapping_in(robot, "modalities", f"{origin}: {tag}")
    where = f"{origin}: {tag}"
    parts = tuple(_part(how, state[key], modalities, key, where) for key, how in of_state.items() if state)
    return (
        _joined(of_state, state, f"{where}.state"),
        _joined(of_action, action, f"{where}.action", mapping_in(modalities, "action", where)),
        parts if any(part.form for part in parts) else (),
    )


def _part(how: Transform, stats: Any, modalities: Mapping[str, Any], key: str, where: str) -> StatePart:
    """One key of the state. ConfigError: a rotation in an unknown form."""
    width = _width(stats, f"{where}.state.{key}")
    if how != "rotation_6d":
        return StatePart(width, SIN_COS if how == "sin_cos" else "")
    form = str(_rotation_type(mapping_in(modalities, "state", where), key))
    if form == "rotation_6d":
        return StatePart(width, "")
    if ROTATIONS.get(form) != width:
        raise ConfigError(
            f"{where}.state.{key} becomes rotation_6d before the network, which is not done here from {width} entries "
            f"of {form}; set policy.robot or policy.data_config to one without it"
        )
    return StatePart(width, form)


def _rotation_type(modalities: Mapping[str, Any], key: str) -> Any:
    """The form of a key's rotation; None if the folder does not declare it."""
    about = modalities.get(key)
    return about.get("rotation_type") if isinstance(about, Mapping) else None


def _joined(
    wanted: Transforms, there: Mapping[str, Any], where: str, modalities: Mapping[str, Any] = MappingProxyType({})
) -> Scaling | None:
    """Scaling of the concatenated keys. modalities: of actions; rotations must have the form that the network
    predicts."""
    found: Scaling | None = None
    for key, transform in wanted.items() if there else ():
        if transform == "axis_angle" and _rotation_type(modalities, key) != transform:
            raise ConfigError(
                f"{where}.{key} becomes {transform} before the network, which is not done here; set policy.robot or "
                "policy.data_config to one without it"
            )
        part = _scaling(transform, there[key], f"{where}.{key}")
        found = part if found is None else found.joined(part)
    return found


def _scaling(transform: Transform, stats: Any, origin: str) -> Scaling:
    if transform == "mean_std":
        return scaling.mean_std(*number_pair(stats, "mean", "std", origin), eps=0.0, constant="keep")
    if transform == "min_max":
        return scaling.bounds(*number_pair(stats, "min", "max", origin), method="min_max", constant="zero")
    return (scaling.switches if transform == "binary" else scaling.identity)(_width(stats, origin))


def _width(stats: Any, origin: str) -> int:
    return len(number_pair(stats, "min", "max", origin)[0])
