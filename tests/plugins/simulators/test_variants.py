"""Variants out of distribution: pictures, positions and words differ as declared, the rest does not."""

from __future__ import annotations

import importlib.util
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.long import long

from polyrhythm.envs.base import traits_of
from polyrhythm.plugins.simulators.libero.env import LiberoSettings
from polyrhythm.plugins.simulators.libero.library import INSTRUCTIONS as LIBERO
from polyrhythm.plugins.simulators.libero.library import in_other_words
from polyrhythm.plugins.simulators.metaworld.env import MetaWorldSettings
from polyrhythm.plugins.simulators.metaworld.scene import INSTRUCTIONS, OTHER_WORDS
from polyrhythm.plugins.simulators.robosuite.env import RobosuiteSettings
from polyrhythm.plugins.simulators.robosuite.library import INSTRUCTIONS as ROBOSUITE
from polyrhythm.plugins.simulators.robosuite.library import KNOWN
from polyrhythm.plugins.simulators.separate.settings import SeparateSettings
from polyrhythm.plugins.simulators.variation import Appearance, AppearanceSettings

TASKS = ("door-close-v3", "coffee-button-v3")
needs_metaworld = pytest.mark.skipif(importlib.util.find_spec("metaworld") is None, reason="needs the extra metaworld")
needs_robosuite = pytest.mark.skipif(importlib.util.find_spec("robosuite") is None, reason="needs the extra robosuite")


def seen(settings: Any, tasks: tuple[int, ...], seeds: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The first observation of each of these episodes."""
    batch = settings.build(len(seeds))
    try:
        batch.reset(range(len(seeds)), tasks, seeds)
        out = {name: np.zeros((len(seeds), *a.shape), a.dtype) for name, a in settings.spec().observation.items()}
        batch.observe(range(len(seeds)), out)
    finally:
        batch.close()
    return out


def test_an_appearance_follows_from_its_seed_and_is_as_far_away_as_the_settings_say() -> None:
    settings = AppearanceSettings(camera_shift=10, light_change=0.5, colour_change=0.3)
    drawn = [Appearance.draw(settings, seed) for seed in range(40)]
    assert drawn == [Appearance.draw(settings, seed) for seed in range(40)]
    assert len({one.colour for one in drawn if one}) == 40
    for one in drawn:
        assert one is not None
        assert np.degrees(angle_of_view(one)) == pytest.approx(10, abs=1e-3)
        assert one.brightness in (0.5, 1.5)
    assert {one.brightness for one in drawn if one} == {0.5, 1.5}
    assert Appearance.draw(AppearanceSettings(), 3) is None


def angle_of_view(appearance: Appearance) -> float:
    """By how much it turns a camera that looks down at 35 degrees."""
    down = np.radians(35)
    forward, up = np.array([np.cos(down), 0, -np.sin(down)]), np.array([np.sin(down), 0, np.cos(down)])
    camera = SimpleNamespace(pos=np.zeros(3), forward=forward.copy(), up=up)
    appearance.turn(camera)
    return float(np.arccos(np.clip(forward @ camera.forward, -1, 1)))


def test_every_task_has_other_words_that_a_policy_of_eight_words_can_read() -> None:
    assert OTHER_WORDS.keys() == INSTRUCTIONS.keys()
    robosuite = {name: task.other for name, task in KNOWN.items()}
    for usual, other in ((INSTRUCTIONS, OTHER_WORDS), (ROBOSUITE, robosuite)):
        assert len({*usual.values(), *other.values()}) == len(set(usual.values())) + len(other)
        assert all(words(other[name]) <= max(8, words(usual[name])) for name in usual)


def test_liberos_instructions_in_other_words_are_all_different_from_the_usual_ones() -> None:
    usual = set(LIBERO.values())
    other = {in_other_words(sentence) for sentence in usual}
    assert len(other) == len(usual)
    assert not other & usual
    told = "switch on the cooker and move the moka pot on it"
    assert in_other_words("turn on the stove and put the moka pot on it") == told


def test_libero_has_every_kind_of_variant() -> None:
    name = next(iter(LIBERO))
    assert [*LiberoSettings(tasks=(name,)).variants()] == ["camera", "lighting", "texture", "position", "instruction"]
    told = LiberoSettings(tasks=(name,), instructions={name: "up"}, initial_states="sampled")
    assert [*told.variants()] == ["camera", "lighting", "texture"]
    usual = LiberoSettings(tasks=(name,))
    for variant in ("position", "instruction"):
        varied = usual.model_validate({**usual.model_dump(), **usual.variants()[variant].settings})
        assert varied.spec().initial_states == (0 if variant == "position" else 50)
        assert (varied.spec().tasks[0].instruction != LIBERO[name]) == (variant == "instruction")


def words(sentence: str) -> int:
    return len(re.findall(r"\w+", sentence))


def test_only_what_a_policy_can_notice_is_a_variant() -> None:
    pixels = MetaWorldSettings(tasks=TASKS)
    assert traits_of(pixels).variants
    assert [*pixels.variants()] == ["camera", "lighting", "texture", "position", "instruction"]
    assert [*MetaWorldSettings(tasks=TASKS, observation="state").variants()] == ["position", "instruction"]
    all_of_them = ["camera", "lighting", "texture", "position", "instruction"]
    assert [*RobosuiteSettings(tasks=("Lift",)).variants()] == all_of_them
    told = RobosuiteSettings(tasks=("Lift",), observation="state", instructions={"Lift": "up"})
    assert [*told.variants()] == ["position"]
    for settings in (MetaWorldSettings, RobosuiteSettings):
        with pytest.raises(ValueError, match="observation: state has no pictures"):
            settings(
                tasks=("Lift",) if settings is RobosuiteSettings else TASKS,
                observation="state",
                appearance={"light_change": 0.5},
            )


def test_an_environment_in_another_python_has_its_variants_too() -> None:
    apart = SeparateSettings.of({"type": "metaworld", "tasks": list(TASKS), "python": "/no/python"})
    assert apart.variants() == MetaWorldSettings(tasks=TASKS).variants()


@long(13, "pictures of Meta-World's variants")
@needs_metaworld
def test_metaworlds_pictures_differ_and_the_state_does_not() -> None:
    usual = MetaWorldSettings(tasks=TASKS, image_size=32)
    tasks, seeds = (0, 1, 0), (5, 5, 6)
    before, found = seen(usual, tasks, seeds), {}
    for name in ("camera", "lighting", "texture"):
        varied = usual.model_validate({**usual.model_dump(), **usual.variants()[name].settings})
        found[name] = seen(varied, tasks, seeds)
        assert np.array_equal(found[name]["proprio"], before["proprio"]), "physics is the same"
        change = np.abs(found[name]["image"].astype(int) - before["image"]).mean(axis=(1, 2, 3))
        assert (change > 4).all(), f"{name} is seen in every episode: {change}"
        assert np.array_equal(seen(varied, tasks, seeds)["image"], found[name]["image"])
    mean = found["lighting"]["image"].mean(axis=(1, 2, 3)) / before["image"].mean(axis=(1, 2, 3))
    assert (np.abs(mean - 1) > 0.15).all(), f"brighter or darker: {mean}"


@needs_metaworld
def test_metaworlds_objects_are_placed_around_its_range() -> None:
    inside, beyond = (
        MetaWorldSettings(tasks=("coffee-button-v3",), observation="state", placement=placement)
        for placement in ("usual", "beyond")
    )
    seeds = tuple(range(12))
    at = [seen(one, (0,) * 12, seeds)["state"][:, 4:6] for one in (inside, beyond)]
    low, high = at[0].min(axis=0), at[0].max(axis=0)
    out = (at[1] < low - 1e-3) | (at[1] > high + 1e-3)
    assert out.any(axis=1).sum() >= 8, "beyond what twelve usual episodes show"
    assert (np.abs(at[1] - at[0].mean(axis=0)) < 0.2).all(), "and not far away"


def test_metaworlds_instructions_in_other_words() -> None:
    other = MetaWorldSettings(tasks=TASKS, wording="other").spec().tasks
    assert [task.instruction for task in other] == [OTHER_WORDS[name] for name in TASKS]


@needs_robosuite
def test_robosuites_pictures_differ_and_the_state_does_not() -> None:
    usual = RobosuiteSettings(tasks=("Lift",), image_size=32, cameras=("agentview", "robot0_eye_in_hand"))
    before = seen(usual, (0, 0), (5, 6))
    for name in ("camera", "lighting", "texture"):
        varied = usual.model_validate({**usual.model_dump(), **usual.variants()[name].settings})
        found = seen(varied, (0, 0), (5, 6))
        assert np.array_equal(found["proprio"], before["proprio"])
        change = np.abs(found["image"].astype(int) - before["image"]).mean(axis=(1, 2, 3))
        assert (change > 3).all(), f"{name}: {change}"
        if name == "camera":
            assert np.array_equal(found["robot0_eye_in_hand"], before["robot0_eye_in_hand"]), "it moves with the robot"


@needs_robosuite
@pytest.mark.parametrize("hard_reset", [False, True])
def test_robosuites_objects_are_placed_around_its_range(hard_reset: bool) -> None:
    """robosuite places Lift's cube up to 3 cm from the middle of the table in x and y."""
    seeds = tuple(range(4 if hard_reset else 12))
    usual, beyond = (
        RobosuiteSettings(tasks=("Lift",), observation="state", placement=placement, hard_reset=hard_reset)
        for placement in ("usual", "beyond")
    )
    distance = [np.abs(seen(one, (0,) * len(seeds), seeds)["state"][:, :2]).max(axis=1) for one in (usual, beyond)]
    assert (distance[0] <= 0.031).all()
    assert ((distance[1] > 0.029) & (distance[1] < 0.046)).all(), distance[1]


def test_positions_of_robosuites_bins_have_no_room_around_them() -> None:
    with pytest.raises(ValueError, match="PickPlaceCan has no room around its range; only Door, Lift"):
        RobosuiteSettings(tasks=("Lift", "PickPlaceCan"), placement="beyond")
    assert "position" in RobosuiteSettings(tasks=("Lift", "Stack")).variants()
    assert "position" not in RobosuiteSettings(tasks=("PickPlaceCan",)).variants()
