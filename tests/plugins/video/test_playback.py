"""Episodes played again for a video: those that the evaluation counts."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image
from tests.long import long
from tests.pipeline.pictures import LampSettings
from tests.pipeline.runs import config

from polyrhythm.config.schema import RunConfig
from polyrhythm.envs.gymnasium_env import GymnasiumSettings
from polyrhythm.errors import ConfigError, RunFolderError, RunHalted
from polyrhythm.pipeline.array_specs import step_settings
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.pipeline.evaluation.standalone import Video, evaluate
from polyrhythm.pipeline.persistence.checkpoints import save_policy
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.video.playback import PlayedEpisode, play
from polyrhythm.policies.base import as_module


def _play(*words: Any) -> list[PlayedEpisode]:
    return list(play(*words))


def _lamp(**settings: Any) -> RunConfig:
    return config(
        env=LampSettings(**settings).model_dump(),
        policy={"type": "gaussian", "hidden": 8, "chunk": 2, "init_log_std": 0.5},
        rollout={"rows": 4, "action_repeat": 2},
    )


def _saved(path: Path, run: RunConfig) -> Path:
    checked = validate_run(run, trainer=False)
    save_policy(checked.policy.state_dict(), run, path, 1, checked.spec)
    return path


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("step_rows", [True, False])
def test_what_is_played_is_what_the_evaluation_counts(greedy: bool, step_rows: bool) -> None:
    """By task, so that every episode has a pair: with noise too, and where rows step only together."""
    run = _lamp(step_rows=step_rows)
    _, spec, policy = validate_run(run, trainer=False)
    episodes = held_out(8, 5, 2, greedy=greedy)
    pipeline = build_pipeline(RunContext(run, policy, trainer=False))
    counted = pipeline.evaluate("evaluation", episodes)
    pipeline.close()
    played = _play(LampSettings(step_rows=step_rows), policy, episodes, step_settings(run, policy.chunk), 3, 4)
    for task in range(2):
        own = sorted(one.episode_return for one in played if one.episode.task == task)
        theirs = sorted(one.episode_return for one in counted if one.task == task)
        np.testing.assert_allclose(own, theirs, atol=1e-4)
    assert sum(one.success for one in played) == sum(one.success for one in counted)
    assert all(2 <= len(one.pictures) <= 5 for one in played), "three, the first and the last"
    assert {one.pictures[0].shape for one in played} == {(16, 16, 3)}
    assert len(spec.tasks) == 2


def test_an_evaluation_with_a_video(tmp_path: Path) -> None:
    file = _saved(tmp_path / "policy.pt", _lamp())
    found = evaluate(file, 8, 5, video=Video(tmp_path / "new" / "shown.gif", 4))
    plain = evaluate(file, 8, 5)
    assert {key: value for key, value in found.items() if key != "video"} == plain
    assert found["video"]["episodes"] == 4
    with Image.open(tmp_path / "new" / "shown.gif") as shown:
        assert shown.n_frames >= 2
    with pytest.raises(RunFolderError, match="is there already"):
        evaluate(file, 8, 5, video=Video(tmp_path / "new" / "shown.gif"))


def test_rows_that_the_batch_draws_are_shown_too() -> None:
    run = _lamp(pictures="drawn")
    _, _, policy = validate_run(run, trainer=False)
    (played,) = _play(
        LampSettings(pictures="drawn"), policy, held_out(1, 5, 2, greedy=True), step_settings(run, policy.chunk), 9, 4
    )
    lit = [(picture[0, :, 0] == 255).sum() for picture in played.pictures]
    assert lit[0] in range(6, 16, 2), "two columns for each push that is left"


@pytest.mark.parametrize("step_rows", [True, False])
@pytest.mark.parametrize("wanted", [2, 6])
def test_where_only_the_runs_own_rows_can_be_built_the_same_is_played(wanted: int, step_rows: bool) -> None:
    run = _lamp(step_rows=step_rows)
    _, _, policy = validate_run(run, trainer=False)
    episodes, step = held_out(wanted, 5, 2, greedy=True), step_settings(run, policy.chunk)
    free, bound = (
        _play(LampSettings(step_rows=step_rows, only_rows=only), policy, episodes, step, 3, 4) for only in (0, 4)
    )
    assert [(one.episode, one.env_steps, len(one.pictures)) for one in bound] == [
        (one.episode, one.env_steps, len(one.pictures)) for one in free
    ]


def test_a_batch_that_cannot_be_built_to_be_seen_names_its_line() -> None:
    run = _lamp()
    _, _, policy = validate_run(run, trainer=False)
    said = r"env.type = tests.*: build raised ValueError: 3 rows or none \(.*pictures.py, line \d+\); fix it there"
    with pytest.raises(ConfigError, match=said):
        _play(LampSettings(only_rows=3), policy, held_out(2, 5, 2, greedy=True), step_settings(run, policy.chunk), 3, 4)


@pytest.mark.parametrize(
    ("pictures", "error", "said"),
    [
        ("none", ConfigError, "it has no pictures: no observation is an image"),
        ("misdrawn", RunHalted, "render returned uint8 \\[16, 16\\], it must be uint8 \\[H,W,3\\]"),
    ],
)
def test_where_there_is_nothing_to_see(pictures: Any, error: type[Exception], said: str, tmp_path: Path) -> None:
    file = _saved(tmp_path / "policy.pt", _lamp(pictures=pictures))
    with pytest.raises(error, match=said):
        evaluate(file, 4, 5, video=Video(tmp_path / "shown.gif"))
    assert not list(tmp_path.glob("shown*"))


@pytest.mark.parametrize("step_rows", [True, False])
@pytest.mark.parametrize(
    ("fails", "failure", "pictures"),
    [
        ("reset", "reset: ValueError: the lamp fell", 0),
        ("step", "step: ValueError: the lamp fell", 1),
        ("reward", "environment: reward is not finite", 1),
        ("observation", "environment: observation left is not finite", 1),
    ],
)
def test_an_episode_that_fails_is_shown_up_to_there(fails: Any, failure: str, pictures: int, step_rows: bool) -> None:
    run = _lamp(step_rows=step_rows)
    _, _, policy = validate_run(run, trainer=False)
    episodes, step = held_out(4, 5, 2, greedy=True), step_settings(run, policy.chunk)

    def played(**changes: Any) -> list[PlayedEpisode]:
        return _play(LampSettings(step_rows=step_rows, **changes), policy, episodes, step, 9, 4)

    (*others, bad), usual = played(bad_seed=episodes[3].seed, fails=fails), played()
    assert bad.failure == failure
    assert len(bad.pictures) == pictures
    for one, same in zip(others, usual, strict=False):
        assert (one.failure, one.episode_return, one.env_steps) == ("", same.episode_return, same.env_steps)
        assert np.array_equal(one.pictures, same.pictures)


@pytest.mark.parametrize("fails", ["reward", "observation"])
def test_a_row_with_numbers_that_are_not_finite_is_made_anew_for_the_next_episode(fails: Any) -> None:
    run = _lamp()
    _, _, policy = validate_run(run, trainer=False)
    episodes, step = held_out(8, 5, 2, greedy=True), step_settings(run, policy.chunk)
    lamps = LampSettings(only_rows=4, bad_seed=episodes[1].seed, fails=fails)
    assert [bool(one.failure) for one in play(lamps, policy, episodes, step, 9, 4)] == [False, True, *[False] * 6]


def test_a_call_that_fails_for_all_rows_fails_their_episodes() -> None:
    run = _lamp()
    _, _, policy = validate_run(run, trainer=False)
    episodes = held_out(3, 5, 2, greedy=True)
    lamps = LampSettings(bad_seed=episodes[0].seed, fails="all")
    for one in play(lamps, policy, episodes, step_settings(run, policy.chunk), 9, 4):
        assert re.fullmatch(r"step: ValueError: no row is known \(.*pictures\.py, line \d+\)", one.failure)
        assert len(one.pictures) == 1


def test_actions_that_are_not_finite_fail_their_episode() -> None:
    run = _lamp()
    _, _, policy = validate_run(run, trainer=False)
    with torch.no_grad():
        for parameter in as_module(policy).parameters():
            parameter.fill_(np.nan)
    (one,) = _play(LampSettings(), policy, held_out(1, 5, 2, greedy=True), step_settings(run, policy.chunk), 9, 4)
    assert one.failure == "policy: actions is not finite"
    assert one.env_steps == 0


def test_a_video_of_episodes_that_fail_is_written_and_the_evaluation_goes_on(tmp_path: Path) -> None:
    episodes = held_out(4, 5, 2, greedy=True)
    file = _saved(tmp_path / "policy.pt", _lamp(bad_seed=episodes[3].seed, fails="reset"))
    found = evaluate(file, 4, 5, video=Video(tmp_path / "reset.gif"))
    assert (found["dropped"], found["video"]["episodes"], found["video"]["failed"]) == (1, 4, 1)
    with Image.open(tmp_path / "reset.gif") as shown:
        tile = shown.size[0] // 2
        shown.seek(shown.n_frames - 1)
        mark = shown.convert("RGB").getpixel((tile + 1, shown.size[1] // 2 + 1))
    assert np.allclose(mark, (245, 158, 11), atol=20), "the tile of the fourth is orange"


@long(4, "another Python")
def test_an_environment_in_another_python_is_shown(tmp_path: Path) -> None:
    env = {"type": "gymnasium", "id": "tests.envs.vector_envs:Ageing-v0", "python": sys.executable}
    run = config(env=env, policy={"type": "gaussian", "hidden": 8}, rollout={"rows": 2})
    found = evaluate(_saved(tmp_path / "policy.pt", run), 2, 5, video=Video(tmp_path / "shown.gif"))
    assert found["video"]["episodes"] == 2
    with Image.open(tmp_path / "shown.gif") as shown:
        assert shown.n_frames == 2, "equal frames are one: while it runs, and its end"
        assert shown.convert("RGB").getpixel((20, 20)) == (1, 1, 1)


class Painted(gymnasium.Env[np.ndarray, np.ndarray]):
    """Draws itself without any package."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - as Gymnasium has it
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, False, False, {}

    def render(self) -> Any:
        return np.full((20, 30, 3), 77, np.uint8) if self.render_mode == "rgb_array" else None


def test_gymnasium_is_asked_to_render_where_it_can() -> None:
    gymnasium.register("Painted-v0", Painted, max_episode_steps=5)
    settings = GymnasiumSettings(id="Painted-v0")
    rendering = settings.rendering()
    assert rendering is not None
    batch = rendering.build(2)
    batch.reset([0, 1], [0, 0], [1, 2])
    assert batch.render(1).shape == (20, 30, 3)
    batch.close()
