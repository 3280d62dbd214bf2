"""One ManiSkill environment of one row (CPU) or many (GPU), with numpy arrays.

ManiSkill renders every camera at each reset and step. Here only `observe` renders, because an action chunk needs one
image, with camera and lights of the episode's appearance; physics is unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.base import StepResult
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.simulators.maniskill.library import episode_steps, make_env
from polyrhythm.plugins.simulators.maniskill.settings import (
    ManiSkillFields,
    TaskSentences,
    own_sentences,
    place_beyond,
    read_sentences,
)
from polyrhythm.plugins.simulators.variation import Appearance
from polyrhythm.specs import ActionSpec, ArraySpec, Task
from polyrhythm.specs.hashing import library_seed

#: ManiSkill's depth is in whole millimetres.
_MILLIMETRES = 1000.0


class World:
    """A ManiSkill environment of one task with `rows` rows; used by one thread. Raises the errors of `make_env`.

    sentences: of its episodes, if another world of the task has read them.
    """

    def __init__(self, settings: ManiSkillFields, task: str, rows: int, sentences: TaskSentences | None = None) -> None:
        self.settings, self.task, self.rows = settings, task, rows
        self.limit = episode_steps(settings, task)
        self.env = make_env(settings, task, rows)
        if rows > 1 and self.env.reconfiguration_freq:
            raise ConfigError(
                f"env.backend = gpu: {task} makes all objects anew at a reset, so rows cannot be reset alone; "
                "set it to cpu"
            )
        self._camera = "" if settings.observation == "state" else self._find_camera()
        self._info: Mapping[str, Any] = {}
        from mani_skill.envs.sapien_env import BaseEnv

        self._own_get_obs = self.env.get_obs if type(self.env).get_obs is not BaseEnv.get_obs else None
        if self._camera:  # its own get_obs, called by step and reset, would render
            self.env.get_obs = self._observe_numbers
        self._seen_scene: Any = None  # ManiSkill may rebuild it at a reset, which restores the usual lights and camera
        self._usual: tuple[Any, list[tuple[Any, Any]]] = (None, [])
        self._numbers, self._earned = np.zeros((rows, 0), np.float32), np.zeros(rows, np.float32)
        info = self._reset(list(range(rows)), 0)
        self.reports_success = "success" in info
        self._refuse_rewards(info)
        self.action = self._action_spec()
        self._bounds = np.array(self.action.low, np.float32), np.array(self.action.high, np.float32)
        self._own = "" if task in settings.instructions else next(iter(own_sentences(self.env)), "")
        self.sentences = sentences
        if self._own and sentences is None:
            self.sentences = read_sentences(self.env, task, self._choose)
            self._reset(list(range(rows)), 0)

    def tasks(self) -> list[Task]:
        """The task, or one task per sentence if its episodes have several."""
        if self.sentences is None or not self._own:
            return [Task(self.task, self.settings.instruction(self.task, self._own))]
        return [Task(f"{self.task}: {sentence}", sentence, self.task) for sentence in self.sentences.starts]

    def reset(self, row: int, seed: int, sentence: str = "") -> None:
        """Begin an episode in one row, without effect on other rows.

        seed: 0..2^63-1; ManiSkill gets its `library_seed`. On a GPU each row is reset by a separate call, because
        ManiSkill draws the states of rows that are reset together from the first row's seed. sentence: the instruction,
        if there are several `tasks`.
        """
        numbers = None
        if sentence:
            assert self.sentences is not None
            numbers = np.array([self.sentences.episode(sentence, seed)])
        self._reset([row], library_seed(seed), numbers)
        wanted = sentence or self._own
        if wanted and (told := own_sentences(self.env)[row]) != wanted:
            raise ConfigError(
                f"env.tasks = {self.task}: an episode says {told!r} instead of {wanted!r}, because its instructions do "
                f"not follow from its numbers (total_num_trials); give it one by env.instructions: {{{self.task}: ...}}"
            )
        if self.settings.placement == "beyond":  # with one row, as another appearance
            place_beyond(self.env, self.task, seed)
            self._numbers = self._to_numbers(self.env.get_obs(self.env.get_info()))
        if appearance := Appearance.draw(self.settings.appearance, seed):
            self._show(appearance)

    def step(self, actions: NDArray[np.generic]) -> StepResult:
        """Run one step of all rows, without a time limit; actions [rows,A], clipped to the bounds. terminated: by the
        task; metrics: NaN if missing."""
        low, high = self._bounds
        clipped = np.minimum(np.maximum(actions, low), high).astype(np.float32, copy=False)
        observation, reward, ended, _, info = self.env.step(clipped)
        self._numbers = self._to_numbers(observation)
        success, ended = self._flag(info.get("success")), self._flag(ended)
        if not self.settings.end_on_success:
            ended &= ~success | self._flag(info.get("fail"))
        if self.settings.reward_flags:
            weights = self.settings.reward_flags.items()
            flags = [weight * _numpy(info[name]).reshape(self.rows) for name, weight in weights]
            before, self._earned = self._earned, np.sum(flags, axis=0).astype(np.float32)
            reward = self._earned - before
        elif self.env.reward_mode == "none":
            reward = success.astype(np.float32) - self._flag(info.get("fail"))
        earned = np.array(_numpy(reward), np.float32).reshape(self.rows)
        metrics = {name: self._metric(name, info.get(name)) for name in self.settings.metrics}
        return StepResult(earned, ended, np.zeros(self.rows, np.bool_), success, metrics)

    def observe(self) -> dict[str, NDArray[np.generic]]:
        """Observe all rows, [rows, ...] by name; renders the images."""
        if not self._camera:
            return {"state": self._numbers}
        if self._own_get_obs is None:
            drawn = self.env._get_obs_sensor_data()[self._camera]
        else:  # the task changes what its cameras see, such as by a background
            drawn = self._own_get_obs(self._info)["sensor_data"][self._camera]
        image = resized(_numpy(drawn["rgb"]), self.settings.picture)
        found: dict[str, NDArray[np.generic]] = {"image": image, "proprio": self._numbers}
        if self.settings.observation == "rgbd":
            found["depth"] = (_numpy(drawn["depth"]) / _MILLIMETRES).astype(np.float32)
        return found

    def arrays(self) -> dict[str, ArraySpec]:
        """Specs of the arrays of `observe`, for one row."""
        return {name: ArraySpec(array.shape[1:], str(array.dtype)) for name, array in self.observe().items()}

    def render(self, row: int) -> NDArray[np.uint8]:
        """Image [H,W,3] of the row from ManiSkill's video camera. ConfigError: the task has none."""
        picture = self.env.render_rgb_array()
        if picture is None:
            raise ConfigError(f"env.tasks = {self.task}: it has no camera for videos; use env.observation=rgb")
        shown: NDArray[np.uint8] = _numpy(picture)[row]
        return shown

    def close(self) -> None:
        """Free the simulation."""
        self.env.close()

    def _reset(self, rows: list[int], seed: int, episodes: NDArray[np.int64] | None = None) -> Mapping[str, Any]:
        """Reset rows and return ManiSkill's info. episodes: [len(rows)] numbers, for tasks with numbered episodes."""
        from mani_skill.utils import common

        options = {"env_idx": common.to_tensor(np.array(rows, np.int64), device=self.env.device)}
        if episodes is not None:
            options["episode_id"] = common.to_tensor(episodes, device=self.env.device)
        # The same seed for all rows, so that a row's generator does not depend on its index.
        observation, info = self.env.reset(seed=[seed] * self.rows, options=options)
        self._earned[rows] = 0.0
        numbers = self._to_numbers(observation)
        if len(rows) < self.rows:
            kept = self._numbers.copy()
            kept[rows] = numbers[rows]
            numbers = kept
        self._numbers = numbers
        found: Mapping[str, Any] = info
        return found

    def _choose(self, episodes: NDArray[np.int64]) -> None:
        """Begin the episodes with these numbers [rows]. In RLinf's tasks, only select their objects without placing
        them, which takes a tenth of the time."""
        from mani_skill.utils import common

        if choose := getattr(self.env, "_initialize_episode_pre", None):
            rows, numbers = (common.to_tensor(a, device=self.env.device) for a in (np.arange(self.rows), episodes))
            choose(rows, {"episode_id": numbers})
        else:
            self._reset(list(range(self.rows)), 0, episodes)

    def _observe_numbers(self, info: Any = None, unflattened: bool = False) -> Any:  # noqa: ARG002
        """Replacement for ManiSkill's `get_obs` without images. Keeps the info for `observe`: evaluating again would
        count a grasp twice in tasks whose `evaluate` counts."""
        self._info = self.env.get_info() if info is None else info
        return self.env._get_obs_state_dict(self._info)

    def _refuse_rewards(self, info: Mapping[str, Any]) -> None:
        """ConfigError: the task reports no flag from which a reward could be computed."""
        if unknown := [name for name in self.settings.reward_flags if name not in info]:
            known = ", ".join(name for name, value in info.items() if np.size(_numpy(value)) == self.rows)
            raise ConfigError(f"env.reward_flags.{unknown[0]}: {self.task} reports no such flag; it has {known}")
        if self.env.reward_mode == "none" and not self.settings.reward_flags and not {"success", "fail"} & {*info}:
            raise ConfigError(
                f"env.reward = sparse: {self.task} has no such reward; choose another task, since this one has no "
                "reward, and reports neither success nor failure"
            )

    def _to_numbers(self, observation: Any) -> NDArray[np.float32]:
        """All numbers of an observation in a new array, [rows,N]."""
        if self._camera and self.settings.proprio == "joints":
            observation = observation["agent"]["qpos"]
        elif self._camera:
            from mani_skill.utils import common

            observation = common.flatten_state_dict(observation, use_torch=True, device=self.env.device)
        return np.array(_numpy(observation), np.float32)

    def _flag(self, value: Any) -> NDArray[np.bool_]:
        """Flags [rows]; False if the task has none."""
        return np.zeros(self.rows, np.bool_) if value is None else np.array(_numpy(value), np.bool_).reshape(self.rows)

    def _metric(self, name: str, value: Any) -> NDArray[np.floating]:
        """Numbers [rows]; NaN if the task has none."""
        if value is None:
            return np.full(self.rows, np.nan, np.float32)
        numbers = _numpy(value)
        if numbers.size != self.rows or numbers.dtype.kind not in "biuf":
            shape = list(numbers.shape)
            raise ConfigError(f"env.metrics.{name}: {self.task} gives an array {shape}, not a number; remove it")
        return numbers.astype(np.float32).reshape(self.rows)

    def _show(self, appearance: Appearance) -> None:
        """Replace the previous appearance of the one row. A camera that moves with the robot keeps its pose."""
        sensor = self.env._sensors[self._camera]
        if appearance.shift and sensor.entity is None:
            sensor.camera.set_local_pose(_turned(sensor.config.pose.sp, appearance))
        scene = self.env.scene.sub_scenes[0]
        if scene is not self._seen_scene:
            import sapien

            parts = [part for entity in scene.entities for part in entity.components]
            lights = [part for part in parts if isinstance(part, sapien.render.RenderLightComponent)]
            self._seen_scene = scene
            self._usual = np.array(scene.ambient_light), [(light, np.array(light.color)) for light in lights]
        ambient, lights = self._usual
        scene.set_ambient_light(list(appearance.brightness * ambient))
        for light, colour in lights:
            light.color = appearance.brightness * colour

    def _find_camera(self) -> str:
        known = list(self.env._sensors)
        wanted = self.settings.camera or (known[0] if known else "")
        if wanted not in known:
            fix = f"choose one of {', '.join(known)}" if known else "set env.observation to state"
            raise ConfigError(f"env.camera = {wanted!r}: {self.task} has no such camera; {fix}")
        return wanted

    def _action_spec(self) -> ActionSpec:
        space = self.env.single_action_space
        shape = getattr(space, "shape", None)
        if space is None or shape is None or len(shape) != 1:
            raise ConfigError(f"env.tasks = {self.task}: its action is {space}, not a vector; choose a one-robot task")
        return ActionSpec("continuous", shape[0], low=tuple(space.low), high=tuple(space.high))


def _numpy(value: Any) -> NDArray[Any]:
    """A tensor on any device, or a number, as an array that may share its memory."""
    return np.asarray(value.detach().cpu().numpy() if hasattr(value, "detach") else value)


def resized(pictures: NDArray[Any], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Resize [B,H,W,3] to uint8 images of this height and width, bilinearly like Pillow."""
    if pictures.shape[1:3] == size:
        return pictures.astype(np.uint8, copy=False)
    from PIL import Image

    whole = (Image.fromarray(one.astype(np.uint8)) for one in pictures)
    return np.stack([np.asarray(one.resize((size[1], size[0]), Image.Resampling.BILINEAR)) for one in whole])


def _turned(pose: Any, appearance: Appearance) -> Any:
    """A camera pose, which looks along x with z up, moved by the appearance."""
    import sapien

    usual = pose.to_transformation_matrix().astype(np.float64)
    camera = SimpleNamespace(pos=usual[:3, 3].copy(), forward=usual[:3, 0].copy(), up=usual[:3, 2].copy())
    appearance.turn(camera)
    turned = np.eye(4)
    turned[:3, :4] = np.stack([camera.forward, np.cross(camera.up, camera.forward), camera.up, camera.pos], axis=1)
    return sapien.Pose(turned)
