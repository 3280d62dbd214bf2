"""Plans a policy's inputs and outputs: reads statistics and tokenizer, and checks that environment and policy match.

Everything is checked before the start; each mismatch is one sentence with both values. Uses only numpy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.plugins.pretrained.checkpoint import Checkpoint
from polyrhythm.plugins.pretrained.folder_files import CHOICES, read_json
from polyrhythm.plugins.vla import prompts, scaling
from polyrhythm.plugins.vla.images import HALF, IMAGENET, Colours, Resizing
from polyrhythm.plugins.vla.input_settings import Gripper, InputSettings, PolicyType
from polyrhythm.plugins.vla.prompts import (
    WORDS,
    PromptTable,
    PromptTokenizer,
    StatePrompts,
    WordTokenizer,
    folder_tokenizer,
)
from polyrhythm.plugins.vla.scaling import Scaling, StatePart
from polyrhythm.plugins.vla.statistics import (
    BOUNDS,
    FolderInputs,
    RobotStatistics,
    camera_names,
    folder_inputs,
    robot_statistics,
)
from polyrhythm.policies.gaussian import continuous_bounds
from polyrhythm.specs import EnvSpec

log = logging.getLogger(__name__)


#: Names of the cameras of each architecture in the order of its inputs, for folders that do not name theirs.
CAMERAS = {
    "pi0": ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"),
    "pi05": ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"),
    "openvla_oft": ("primary", "left_wrist", "right_wrist"),
    "groot_n1d5": ("ego_view", "wrist", "third"),
}
#: GR00T's rows of its per-embodiment weights, by the tag of the statistics (NVIDIA; RLinf).
EMBODIMENTS = {
    "new_embodiment": 31,
    "gr1": 24,
    "oxe_droid": 17,
    "agibot_genie1": 26,
    "genie1_gripper": 26,
    "libero_franka": 31,
    "isaaclab_franka": 31,
    "maniskill_widowx": 30,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputForm:
    """Inputs and outputs of one network.

    image: side of its images in pixels. horizon: H; action_dim, state_dim: padded entries of action and state;
    state_dim 0: the environment's. needs_state: the network reads the state. vocabulary: exclusive bound of ids; words:
    of hashed words, 0: the same. length: prompt tokens; 0: those of the longest prompt. fill: where short prompts are
    padded: right, left, or inside (after the first token). bos, pad, empty, image_token: ids. image_tokens: prompt
    tokens per image (GR00T). state_in_prompt: π0.5's bins. crop: OpenVLA-OFT's 90% of the area. embodiments: number of
    GR00T's.
    """

    architecture: PolicyType
    image: int
    horizon: int
    action_dim: int
    vocabulary: int
    words: int = 0
    state_dim: int = 0
    needs_state: bool = True
    length: int = 0
    fill: Literal["right", "left", "inside"] = "right"
    bos: int = 2
    pad: int = 0
    empty: int = 0
    image_token: int = 0
    image_tokens: int = 0
    state_in_prompt: bool = False
    crop: bool = False
    embodiments: int = 0

    @property
    def pads(self) -> bool:
        """Whether the network's state and actions may have more entries than the robot's."""
        return self.architecture != "openvla_oft"


@dataclass(frozen=True, slots=True, eq=False)
class ActionPlan:
    """How actions are mapped. entries: index in the network's action of each of the environment's entries; relative:
    number of leading entries that are predicted relative to the state."""

    chunk: int
    entries: tuple[int, ...]
    scaling: Scaling
    low: tuple[float, ...]
    high: tuple[float, ...]
    relative: int
    gripper: Gripper


@dataclass(frozen=True, slots=True, eq=False)
class InputPlan:
    """Everything that `VlaInputs` needs.

    cameras: pairs of slot and the environment's image, in the order of the slots; resizing: of π0's images; colours:
    value ranges of OpenVLA-OFT's two towers; state: name of the environment's array, "" without one; state_scaling: of
    its entries; parts: of a state in another form (GR00T); padding_counts: GR00T's head reads prompt padding, up to the
    configured length; embodiment: row of the per-embodiment weights.
    """

    form: InputForm
    cameras: tuple[tuple[str, str], ...]
    turn: bool
    resizing: Resizing
    colours: tuple[Colours, Colours]
    state: str
    state_scaling: Scaling
    parts: tuple[StatePart, ...]
    actions: ActionPlan
    prompts: PromptTable | StatePrompts
    padding_counts: bool
    embodiment: int


def plan_inputs(settings: InputSettings, env_spec: EnvSpec, form: InputForm, source: Checkpoint | None) -> InputPlan:
    """Plan all inputs and outputs that are known before the start. ConfigError, with both values: cameras, state,
    actions, statistics, robot, tokenizer or prompts do not match; ValueError: the environment's actions are not
    continuous."""
    choices: Mapping[str, Any] = source.config.get(CHOICES) or {} if source is not None else {}
    statistics = RobotStatistics()
    robot = settings.robot or choices.get("robot", "")
    if source is not None and settings.size != type(settings).model_fields["size"].default:
        _warn(f"policy.size is not used: checkpoint = {source.folder} has a network of its own; leave policy.size out")
    if source is not None and robot != BOUNDS:
        statistics = robot_statistics(source, form.architecture, robot, settings.data_config)
    release = folder_inputs(source)
    if release.relative and not settings.relative_entries:
        raise ConfigError(
            "policy.relative_entries = 0: by its policy_preprocessor.json the actions of the checkpoint are relative "
            "to the state; set it to how many leading entries are"
        )
    state, state_scaling = _plan_state(settings, env_spec, form, statistics)
    cameras = _plan_cameras(settings, env_spec, form, source)
    tokenizer = _tokenizer(settings, form, source, choices)
    return InputPlan(
        form=form,
        cameras=cameras,
        turn=settings.turn_images,
        resizing=release.resizing,
        colours=_colours(source),
        state=state,
        state_scaling=state_scaling,
        parts=statistics.parts,
        actions=plan_actions(settings, env_spec, form, statistics),
        prompts=_plan_prompts(settings, env_spec, form, tokenizer, len(cameras), state_scaling.size, release),
        padding_counts=settings.prompt_length > 0,
        embodiment=_embodiment(settings, form, statistics),
    )


def plan_actions(
    settings: InputSettings, env_spec: EnvSpec, form: InputForm, statistics: RobotStatistics
) -> ActionPlan:
    """ConfigError: chunk, entries, statistics and the environment's actions do not match."""
    action, found = env_spec.action, statistics.actions
    continuous_bounds(action, form.architecture)
    if settings.chunk > form.horizon:
        raise ConfigError(
            f"policy.chunk = {settings.chunk}: the network predicts {form.horizon} actions; lower it, or set "
            "policy.horizon to what it was trained with"
        )
    if statistics.origin and found is None:
        raise ConfigError(f"{statistics.origin} has no statistics of actions; copy it again from its release")
    if found is not None:
        size, whose = found.size, f" of {statistics.key}" if statistics.key else ""
        if size > form.action_dim or (size < form.action_dim and not form.pads):
            raise ConfigError(
                f"{statistics.origin} has statistics of {size} action entries{whose}, the network predicts "
                f"{form.action_dim}; copy that file again from the checkpoint's release, or set policy.robot to the "
                "robot that it was trained for"
            )
    if found is not None and found.size == form.action_dim and not settings.entries:  # as some releases have it
        found = found.without_padding(action.dim)
    entries = _entries(settings.entries, action.dim, form, None if found is None else found.size, statistics.origin)
    plan = scaling.bounds(action.low, action.high, method="min_max") if found is None else found.chosen(entries)
    if settings.relative_entries:
        state = env_spec.observation.get(settings.state)
        width = 0 if state is None else state.shape[0]
        if settings.relative_entries > min(len(entries), width):
            raise ConfigError(
                f"policy.relative_entries = {settings.relative_entries}, but the action has {len(entries)} entries and "
                f"the state {settings.state!r} {width}; set it to at most the smaller number"
            )
    return ActionPlan(
        settings.chunk, entries, plan, action.low, action.high, settings.relative_entries, settings.gripper
    )


def _entries(given: Sequence[int], dim: int, form: InputForm, found: int | None, origin: str) -> tuple[int, ...]:
    """The network's entry for each of the environment's entries. found: number of entries with statistics, in the
    file `origin`."""
    available = form.action_dim if found is None else min(found, form.action_dim)
    whose = "the network predicts" if found is None else f"{origin} has statistics of"
    if given:
        if len(given) != dim or not all(0 <= entry < available for entry in given) or len(set(given)) != len(given):
            raise ConfigError(
                f"policy.entries = {list(given)}: the environment takes {dim} entries and {whose} {available}; give "
                f"{dim} different numbers below {available}"
            )
        return tuple(given)
    if dim > available or (found is not None and dim != found):
        raise ConfigError(
            f"the environment takes actions of {dim} entries and {whose} {available}: choose the checkpoint of this "
            "robot, or set policy.entries to the policy's entry for each of the environment's"
        )
    return tuple(range(dim))


def _plan_cameras(
    settings: InputSettings, env_spec: EnvSpec, form: InputForm, source: Checkpoint | None
) -> tuple[tuple[str, str], ...]:
    seen = {name: spec for name, spec in env_spec.observation.items() if spec.dtype == "uint8" and len(spec.shape) == 3}
    there = ", ".join(f"{name} {list(spec.shape)}" for name, spec in seen.items())
    if not seen:
        raise ConfigError(
            f"policy.type = {form.architecture!r} needs an image, the environment shows {_shown(env_spec)}: switch its "
            "camera on in the env's settings"
        )
    slots = _slots(form, source)
    chosen = {_last(slot): name for slot, name in settings.cameras.items()}
    if not chosen:
        needs_all = form.architecture == "groot_n1d5" and source is not None
        if len(seen) > len(slots) or (needs_all and len(seen) < len(slots)):
            raise ConfigError(
                f"the environment has {len(seen)} cameras ({there}) and the policy {len(slots)} ({', '.join(slots)}): "
                "say in policy.cameras which image each of them gets"
            )
        chosen = dict(zip(slots, seen, strict=False))
        if source is not None and camera_names(source) and len(seen) < len(slots):
            _warn(
                f"checkpoint = {source.folder} has {len(slots)} cameras ({', '.join(slots)}), the environment "
                f"{len(seen)} ({there}): without an image, so masked: {', '.join(slots[len(seen) :])}; say in "
                "policy.cameras which image each gets, if it is another one"
            )
    for slot, name in chosen.items():
        if slot not in slots:
            raise ConfigError(
                f"policy.cameras names {slot!r}, the policy's cameras are {', '.join(slots)}: use these names"
            )
        if name not in seen or seen[name].shape[2] != 3:
            raise ConfigError(
                f"policy.cameras.{slot} = {name!r}: the environment has no such colour image; it has {there}: name one "
                "of these"
            )
    return tuple((slot, chosen[slot]) for slot in slots if slot in chosen)


@cache
def _warn(text: str) -> None:
    """Log a warning once per process, although inputs are planned several times."""
    log.warning("%s", text)


def _slots(form: InputForm, source: Checkpoint | None) -> tuple[str, ...]:
    """The policy's cameras in order: the folder's names, else the release's."""
    named = [_last(name) for name in camera_names(source)] if source is not None else []
    return tuple(name for name in named if not name.startswith("empty_camera")) or CAMERAS[form.architecture]


def _colours(source: Checkpoint | None) -> tuple[Colours, Colours]:
    """Image value ranges for DINOv2 and SigLIP: the folder's image processor's, else ImageNet's and 0.5."""
    file = source.folder / "preprocessor_config.json" if source is not None else None
    found = read_json(file).get("tvf_normalize_params") if file is not None and file.is_file() else None
    if not found:
        return IMAGENET, HALF
    try:
        dino, siglip = ((tuple(map(float, one["mean"])), tuple(map(float, one["std"]))) for one in found)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file}: tvf_normalize_params is not mean and std for two towers ({error}); copy it again from its release"
        ) from error
    return dino, siglip


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _plan_state(
    settings: InputSettings, env_spec: EnvSpec, form: InputForm, statistics: RobotStatistics
) -> tuple[str, Scaling]:
    spec = env_spec.observation.get(settings.state)
    if spec is None and not form.needs_state:
        return "", scaling.identity(0)
    if spec is None or len(spec.shape) != 1 or not spec.dtype.startswith("float"):
        raise ConfigError(
            f"policy.state = {settings.state!r}: policy.type = {form.architecture!r} needs the robot's state as a row "
            f"of floats, the environment shows {_shown(env_spec)}; name one of them"
        )
    (width,) = spec.shape
    taken = sum(part.taken for part in statistics.parts) or width
    if form.state_dim and (taken > form.state_dim or (taken < form.state_dim and not form.pads)):
        doubled = "" if taken == width else f" ({taken} in the network's form)"
        raise ConfigError(
            f"policy.state = {settings.state!r} has {width} entries{doubled}, the network takes {form.state_dim}; "
            "choose another array or checkpoint"
        )
    found = statistics.state
    if not statistics.origin or (found is None and not form.needs_state):
        return settings.state, scaling.identity(width)
    if found is None:
        raise ConfigError(f"{statistics.origin} has no statistics of the state; copy it again from its release")
    if found.size == form.state_dim:  # as some releases have it
        found = found.without_padding(width)
    if found.size != width:
        spared = "" if form.needs_state else ", or leave out the state, which only the value reads: \"policy.state=''\""
        raise ConfigError(
            f"policy.state = {settings.state!r} has {width} entries, {statistics.origin} has statistics of "
            f"{found.size}; make the environment show the state of that robot, or choose another policy.robot{spared}"
        )
    return settings.state, found


def _shown(env_spec: EnvSpec) -> str:
    return ", ".join(f"{name} {spec.dtype} {list(spec.shape)}" for name, spec in env_spec.observation.items())


def _tokenizer(
    settings: InputSettings, form: InputForm, source: Checkpoint | None, choices: Mapping[str, Any]
) -> PromptTokenizer:
    """The tokenizer of the settings or of the folder, else hashed words."""
    name = settings.tokenizer or choices.get("tokenizer", "")
    if name == WORDS or (not name and source is None):
        specials = {prompts.IMAGE_CONTEXT: form.image_token} if form.image_tokens else {}
        return WordTokenizer(form.words or form.vocabulary, bos=form.bos, specials=specials)
    if name:
        return folder_tokenizer(name)
    assert source is not None
    if source.tokenizer is None:
        raise MissingError(
            f"checkpoint = {source.folder}: it has no tokenizer; set policy.tokenizer to the folder of the one that "
            f"{form.architecture} was released with, or to {WORDS!r} if it was trained here with hashed words"
        )
    return folder_tokenizer(str(source.tokenizer))


def _plan_prompts(
    settings: InputSettings,
    env_spec: EnvSpec,
    form: InputForm,
    tokenizer: PromptTokenizer,
    cameras: int,
    entries: int,
    release: FolderInputs,
) -> PromptTable | StatePrompts:
    tasks = env_spec.tasks
    if tokenizer.bos < 0 and form.architecture != "groot_n1d5":
        raise ConfigError(
            f"{tokenizer.origin} has no begin token, which {form.architecture} needs: set policy.tokenizer to the "
            "folder of the one that it was released with"
        )
    length = settings.prompt_length or form.length
    if form.state_in_prompt:
        return prompts.state_prompts(tokenizer, tasks, max(entries, release.state_entries), length, form.vocabulary)

    def ids(instruction: str) -> list[int]:
        if form.architecture == "openvla_oft":
            return prompts.oft_ids(tokenizer, instruction, form.empty)
        if form.architecture == "groot_n1d5":
            return prompts.groot_ids(tokenizer, instruction, cameras, form.image_tokens, form.image_token)
        return prompts.pi0_ids(tokenizer, instruction, cleans=release.cleans)

    return prompts.table(
        [ids(task.instruction) for task in tasks],
        tasks,
        length=length,
        pad=form.pad,
        side=form.fill,
        vocabulary=form.vocabulary,
        origin=tokenizer.origin,
    )


def _embodiment(settings: InputSettings, form: InputForm, statistics: RobotStatistics) -> int:
    if not form.embodiments:
        return 0
    key = statistics.key if statistics.origin else "new_embodiment"
    found = settings.embodiment if settings.embodiment >= 0 else EMBODIMENTS.get(key, -1)
    if found < 0:
        raise ConfigError(
            f"policy.robot = {key!r}: its row of the per-embodiment weights is not known here; set policy.embodiment"
        )
    if found >= form.embodiments:
        if settings.embodiment < 0 and not statistics.origin:
            return form.embodiments - 1
        raise ConfigError(
            f"policy.embodiment = {found}: the network has {form.embodiments} embodiments; set policy.embodiment below "
            "that"
        )
    return found
