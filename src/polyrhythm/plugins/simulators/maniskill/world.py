"""One ManiSkill environment of one row (CPU) or many (GPU), with numpy arrays.

ManiSkill renders every camera at each reset and step. Here only `observe` renders, because an action chunk needs one
image, with camera and lights of the episode's appearance; physics is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.base import StepResult
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.simulators.maniskill.library import episode_steps, make_env
from polyrhythm.plugins.simulators.maniskill.pictures import as_numpy, resized, resized_tensor, turned
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

if TYPE_CHECKING:
    from polyrhythm.plugins.simulators.maniskill.resets import Resets

#: ManiSkill's depth is in whole millimetres.
_MILLIMETRES = 1000.0


class World:
    """A ManiSkill environment of one task with `rows` rows; used by one thread. Raises the errors of `make_env`.

    sentences: of its episodes, if another world of the task has read them.
    """

    def __init__(self, settings: ManiSkillFields, task: str, rows: int, sentences: TaskSentences | None = None) -> None:
        self.settings, self.task, self.rows = settings, task, rows
        self.limit = episode_steps(settings, task)
        self._played: list[NDArray[np.generic]] = []  # a single row's actions since its reset
        self._begin: Callable[[], object] = lambda: None  # repeats a single row's reset
        self._kept: tuple[Any, ...] = ()  # of several rows while they are away
        self._info: Mapping[str, Any] = {}
        self.env: Any = None
        self._resets: Resets | None = None
        resets = self._open()
        info = resets.reset(range(rows), [0] * rows)
        self.reports_success = "success" in info
        self._refuse_rewards(info)
        self.action = self._action_spec()
        self._bounds = np.array(self.action.low, np.float32), np.array(self.action.high, np.float32)
        self._own = "" if task in settings.instructions else next(iter(own_sentences(self.env)), "")
        self.sentences = sentences
        if self._own and sentences is None:
            self.sentences = read_sentences(self.env, task, self._choose)
            resets.reset(range(rows), [0] * rows)
        resets.check_rows()

    @property
    def calls(self) -> int:
        """How often ManiSkill's `reset` was called."""
        return self._resets.calls if self._resets is not None else 0

    def _open(self) -> Resets:
        """Start the simulation, whose rows are to be reset."""
        from mani_skill.envs.sapien_env import BaseEnv

        from polyrhythm.plugins.simulators.maniskill.resets import Resets  # torch

        settings = self.settings
        self.env = make_env(settings, self.task, self.rows)
        self._resets = self._resets or Resets(self.task, self.rows, self._on_reset)
        self._resets.use(self.env)
        self._camera = "" if settings.observation == "state" else self._find_camera()
        self._own_get_obs = self.env.get_obs if type(self.env).get_obs is not BaseEnv.get_obs else None
        if self._camera:  # its own get_obs, called by step and reset, would render
            self.env.get_obs = self._observe_numbers
        self._seen_scene: Any = None  # ManiSkill may rebuild it at a reset, which restores the usual lights and camera
        self._usual: tuple[Any, list[tuple[Any, Any]]] = (None, [])
        self._numbers: Any = None  # tensor [rows, N] on the simulation's device
        self._earned = np.zeros(self.rows, np.float32)
        return self._resets

    def _on_reset(self, rows: Sequence[int], observation: Any) -> None:
        self._earned[list(rows)] = 0.0
        numbers = self._to_numbers(observation)
        if len(rows) < self.rows and self._numbers is not None:
            at, kept = list(rows), self._numbers.clone()
            kept[at] = numbers[at]
            numbers = kept
        self._numbers = numbers

    def tasks(self) -> list[Task]:
        """The task, or one task per sentence if its episodes have several."""
        if self.sentences is None or not self._own:
            return [Task(self.task, self.settings.instruction(self.task, self._own))]
        return [Task(f"{self.task}: {sentence}", sentence, self.task) for sentence in self.sentences.starts]

    def reset(self, rows: Sequence[int], seeds: Sequence[int], sentences: Sequence[str]) -> None:
        """Begin an episode in each of these rows, without effect on the others, by one call of ManiSkill's `reset`; by
        one for each row, if the task draws numbers that do not belong to single rows.

        seeds: each 0..2^63-1; ManiSkill gets their `library_seed`. sentences: the instructions, "" without several
        `tasks`.
        """
        if self.rows == 1:
            self._played.clear()
            self._begin = lambda: self.reset(rows, seeds, sentences)
        resets = self._resets if self.is_open and self._resets is not None else self._open()
        order = np.argsort(rows)  # the order in which ManiSkill sets what it is given for some rows
        chosen = [int(rows[i]) for i in order]
        drawn, said = [int(seeds[i]) for i in order], [sentences[i] for i in order]
        numbers = None
        if any(sentences):
            assert self.sentences is not None
            numbers = np.array([self.sentences.episode(*one) for one in zip(said, drawn, strict=True)])
        resets.reset(chosen, list(map(library_seed, drawn)), numbers)
        spoken = own_sentences(self.env) if self._own or any(sentences) else []
        for row, sentence in zip(chosen, said, strict=True):
            wanted = sentence or self._own
            if wanted and spoken[row] != wanted:
                raise ConfigError(
                    f"env.tasks = {self.task}: an episode says {spoken[row]!r} instead of {wanted!r}, because its "
                    "instructions do not follow from its numbers (total_num_trials); give it one by "
                    f"env.instructions: {{{self.task}: ...}}"
                )
        if self.settings.placement == "beyond":  # with one row, as another appearance
            place_beyond(self.env, self.task, drawn[0])
            self._numbers = self._to_numbers(self.env.get_obs(self.env.get_info()))
        if appearance := Appearance.draw(self.settings.appearance, drawn[0]):
            self._show(appearance)

    def step(self, actions: NDArray[np.generic]) -> StepResult:
        """Run one step of all rows, without a time limit; actions [rows,A], clipped to the bounds. terminated: by the
        task; metrics: NaN if missing."""
        if self.rows == 1:
            self._played.append(actions.copy())
        low, high = self._bounds
        clipped = np.minimum(np.maximum(actions, low), high).astype(np.float32, copy=False)
        observation, reward, ended, _, info = self.env.step(clipped)
        self._numbers = self._to_numbers(observation)
        success, ended = self._flag(info.get("success")), self._flag(ended)
        if not self.settings.end_on_success:
            ended &= ~success | self._flag(info.get("fail"))
        if self.settings.reward_flags:
            weights = self.settings.reward_flags.items()
            flags = [weight * as_numpy(info[name]).reshape(self.rows) for name, weight in weights]
            before, self._earned = self._earned, np.sum(flags, axis=0).astype(np.float32)
            reward = self._earned - before
        elif self.env.reward_mode == "none":
            reward = success.astype(np.float32) - self._flag(info.get("fail"))
        earned = np.array(as_numpy(reward), np.float32).reshape(self.rows)
        metrics = {name: self._metric(name, info.get(name)) for name in self.settings.metrics}
        return StepResult(earned, ended, np.zeros(self.rows, np.bool_), success, metrics)

    def observe(self) -> dict[str, NDArray[np.generic]]:
        """Observe all rows, [rows, ...] by name; renders the images."""
        return {name: as_numpy(array) for name, array in self._observe(resized).items()}

    def tensors(self) -> dict[str, Any]:
        """As `observe`, in tensors where ManiSkill made them, on its device."""
        return self._observe(resized_tensor)

    def _observe(self, resize: Callable[[Any, tuple[int, int]], Any]) -> dict[str, Any]:
        if not self._camera:
            return {"state": self._numbers}
        if self._own_get_obs is None:
            drawn = self.env._get_obs_sensor_data()[self._camera]
        else:  # the task changes what its cameras see, such as by a background
            drawn = self._own_get_obs(self._info)["sensor_data"][self._camera]
        found = {"image": resize(drawn["rgb"], self.settings.picture), "proprio": self._numbers}
        if self.settings.observation == "rgbd":
            found["depth"] = drawn["depth"] / _MILLIMETRES
        return found

    def arrays(self) -> dict[str, ArraySpec]:
        """Specs of the arrays of `observe`, for one row."""
        return {name: ArraySpec(array.shape[1:], str(array.dtype)) for name, array in self.observe().items()}

    def render(self, row: int) -> NDArray[np.uint8]:
        """Image [H,W,3] of the row from ManiSkill's video camera. ConfigError: the task has none."""
        picture = self.env.render_rgb_array()
        if picture is None:
            raise ConfigError(f"env.tasks = {self.task}: it has no camera for videos; use env.observation=rgb")
        shown: NDArray[np.uint8] = as_numpy(picture)[row]
        return shown

    @property
    def is_open(self) -> bool:
        return self.env is not None

    def suspend(self) -> None:
        """Keep on the host what `resume` needs, and end the simulation, with all of its memory."""
        if self.rows > 1 and self.is_open and self._resets is not None:
            self._kept = self._resets.keep_states(), self._numbers.cpu(), self._earned
        self.close()

    def resume(self) -> None:
        """Make the simulation anew in the state that it had.

        A single row repeats its episode: equal to the bit, where a state that is set is not, since PhysX's contacts are
        no part of it. Several rows, of different ages, are set to their states (`Resets.put_states`); contacts on a GPU
        are not reproducible anyway.
        """
        if self.is_open:
            return
        if self.rows == 1:
            played = list(self._played)
            self._open()
            self._begin()
            for actions in played:
                self.step(actions)
            return
        states, numbers, earned = self._kept
        self._open().put_states(states)
        self._numbers, self._earned, self._kept = numbers.to(self.env.device), earned, ()

    def close(self) -> None:
        """Free the simulation."""
        if self.env is not None:
            self.env.close()
            self.env = None

    def _choose(self, episodes: NDArray[np.int64]) -> None:
        """Begin the episodes with these numbers [rows]. In RLinf's tasks, only select their objects without placing
        them, which takes a tenth of the time."""
        from mani_skill.utils import common

        if choose := getattr(self.env, "_initialize_episode_pre", None):
            rows, numbers = (common.to_tensor(a, device=self.env.device) for a in (np.arange(self.rows), episodes))
            choose(rows, {"episode_id": numbers})
        else:
            assert self._resets is not None
            self._resets.reset(range(self.rows), [0] * self.rows, episodes)

    def _observe_numbers(self, info: Any = None, unflattened: bool = False) -> Any:  # noqa: ARG002
        """Replacement for ManiSkill's `get_obs` without images. Keeps the info for `observe`: evaluating again would
        count a grasp twice in tasks whose `evaluate` counts."""
        self._info = self.env.get_info() if info is None else info
        return self.env._get_obs_state_dict(self._info)

    def _refuse_rewards(self, info: Mapping[str, Any]) -> None:
        """ConfigError: the task reports no flag from which a reward could be computed."""
        if unknown := [name for name in self.settings.reward_flags if name not in info]:
            known = ", ".join(name for name, value in info.items() if np.size(as_numpy(value)) == self.rows)
            raise ConfigError(f"env.reward_flags.{unknown[0]}: {self.task} reports no such flag; it has {known}")
        if self.env.reward_mode == "none" and not self.settings.reward_flags and not {"success", "fail"} & {*info}:
            raise ConfigError(
                f"env.reward = sparse: {self.task} has no such reward; choose another task, since this one has no "
                "reward, and reports neither success nor failure"
            )

    def _to_numbers(self, observation: Any) -> Any:
        """All numbers of an observation in a new tensor [rows,N], on its device."""
        import torch

        if self._camera and self.settings.proprio == "joints":
            observation = observation["agent"]["qpos"]
        elif self._camera:
            from mani_skill.utils import common

            observation = common.flatten_state_dict(observation, use_torch=True, device=self.env.device)
        return torch.as_tensor(observation).to(torch.float32, copy=True)

    def _flag(self, value: Any) -> NDArray[np.bool_]:
        """Flags [rows]; False if the task has none."""
        return (
            np.zeros(self.rows, np.bool_) if value is None else np.array(as_numpy(value), np.bool_).reshape(self.rows)
        )

    def _metric(self, name: str, value: Any) -> NDArray[np.floating]:
        """Numbers [rows]; NaN if the task has none."""
        if value is None:
            return np.full(self.rows, np.nan, np.float32)
        numbers = as_numpy(value)
        if numbers.size != self.rows or numbers.dtype.kind not in "biuf":
            shape = list(numbers.shape)
            raise ConfigError(f"env.metrics.{name}: {self.task} gives an array {shape}, not a number; remove it")
        return numbers.astype(np.float32).reshape(self.rows)

    def _show(self, appearance: Appearance) -> None:
        """Replace the previous appearance of the one row. A camera that moves with the robot keeps its pose."""
        sensor = self.env._sensors[self._camera]
        if appearance.shift and sensor.entity is None:
            sensor.camera.set_local_pose(turned(sensor.config.pose.sp, appearance))
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
