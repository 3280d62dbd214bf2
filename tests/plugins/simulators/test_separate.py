"""Environments in another Python: the same results, errors in words, and no process left."""

from __future__ import annotations

import os
import signal
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.long import long
from tests.plugins.simulators.other_pythons import other_python
from tests.plugins.simulators.pinned_env import PinnedSettings

from polyrhythm.config.registry import resolve
from polyrhythm.env_warnings import forget_warnings
from polyrhythm.envs.base import (
    EnvSettings,
    EpisodeRefused,
    RowsFailed,
    batch_traits,
    traits_of,
)
from polyrhythm.envs.gymnasium_env import GymnasiumSettings
from polyrhythm.errors import ConfigError, EnvLost, MissingError
from polyrhythm.plugins.language.text.chains import ChainsSettings
from polyrhythm.plugins.simulators.separate.settings import SeparateSettings, environment, keep_sources
from polyrhythm.plugins.simulators.setup import find_python

PINNED = "tests.plugins.simulators.pinned_env:PinnedSettings"


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two Pythons by the version of `pinned_sim` that they have; this one has none."""
    folder = tmp_path_factory.mktemp("pythons")
    return {version: other_python(folder / str(version), version) for version in (1, 2)}


def separate(python: Path, defect: str = "", **others: Any) -> SeparateSettings:
    found = resolve("env", {"type": PINNED, "python": str(python), "defect": defect, **others})
    assert isinstance(found, SeparateSettings)
    return found


def servers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "separate.server" in str(child.cmdline())]


def test_two_versions_of_a_package_that_is_not_here_work_side_by_side(pythons: dict[int, Path]) -> None:
    with pytest.raises(ImportError):
        PinnedSettings().build(1)
    batches = {version: separate(python).build(3) for version, python in pythons.items()}
    for version, batch in batches.items():
        batch.reset([0, 2], [0, 1], [5, 2**62 + 7])
        result = batch.step([0, 2], np.zeros((2, 2), np.float32))
        assert result.reward.tolist() == [version, 1 + version]
        assert result.metrics["length"].tolist() == [5, (2**62 + 7) % 100]
        assert result.terminated.dtype == np.bool_
        out = {"x": np.full((2, 2), -1, np.float32), "image": np.zeros((2, 3, 5, 3), np.uint8)}
        batch.observe([0, 2], out)
        assert out["x"][:, 0].tolist() == result.reward.tolist()
        assert (out["image"][0] == 0).all()
        assert (out["image"][1] == 2).all()
        result.reward[:] = 0  # its own memory
    assert len(servers()) == 2
    for batch in batches.values():
        batch.close()
        batch.close()
    assert not servers()


def test_its_settings_are_those_of_the_environment_and_the_python(pythons: dict[int, Path]) -> None:
    settings = separate(pythons[1])
    assert isinstance(settings, EnvSettings)
    assert settings.spec() == PinnedSettings().spec()
    assert not servers()
    plain = settings.model_dump(mode="json")
    assert plain == {"type": PINNED, "python": str(pythons[1]), "defect": ""}
    assert resolve("env", plain) == settings
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        separate(pythons[1], colour="red")


def test_it_offers_what_the_environment_offers(pythons: dict[int, Path]) -> None:
    batch = separate(pythons[2]).build(2)
    try:
        assert batch_traits(batch).expert
        assert batch.expert_actions([1]).tolist() == [[0.5, 0.5]]
        assert not batch_traits(batch).draws_rows
    finally:
        batch.close()


def test_it_says_what_was_said(pythons: dict[int, Path]) -> None:
    found = resolve("env", {"type": "chains", "python": str(pythons[1])})
    batches = [settings.build(2) for settings in (found, ChainsSettings())]
    assert all(batch_traits(batch).texts for batch in batches)
    for batch in batches:
        batch.reset([0, 1], [0, 0], [5, 6])
        batch.step([1], batch.expert_actions([1]))
    there, here = ([batch.texts(row) for row in range(2)] for batch in batches)
    assert there == here
    assert [len(said) for said in here] == [1, 3]
    for batch in batches:
        batch.close()


@long(1, "a misspelt key")
def test_it_warns_of_a_misspelt_key_here(pythons: dict[int, Path], caplog: pytest.LogCaptureFixture) -> None:
    section = {"type": "gymnasium", "id": "tests.pipeline.reporting:Reporting-v0", "success": "sovled"}
    settings = resolve("env", {**section, "python": str(pythons[1])})
    forget_warnings()
    for _ in range(2):
        batch = settings.build(1)
        batch.reset([0], [0], [5])
        assert [batch.step([0], np.zeros((1, 1), np.int64)).success.tolist() for _ in range(4)] == [[-1]] * 4
        batch.close()
    (said,) = caplog.messages
    assert said.startswith("env.success = sovled: the environment's info has no such key, so it does not report")


@pytest.mark.parametrize(
    "kind",
    [
        "gymnasium",
        pytest.param("tests.plugins.simulators.pinned_env:PinnedSettings", marks=long(1, "one that cannot render")),
    ],
)
def test_its_pictures_are_those_of_the_environment(kind: str, pythons: dict[int, Path]) -> None:
    """A Gymnasium environment needs other keyword arguments for them; one that cannot render stays as it is."""
    name = {"id": "tests.envs.vector_envs:Ageing-v0"} if kind == "gymnasium" else {}
    settings = resolve("env", {"type": kind, "python": str(pythons[1]), **name})
    assert traits_of(settings).rendering
    rendering = settings.rendering()
    assert isinstance(rendering, SeparateSettings)
    assert not servers()
    batch = rendering.build(2)
    try:
        if kind != "gymnasium":
            assert rendering == settings
            assert not batch_traits(batch).draws_rows
            return
        assert rendering.own() == GymnasiumSettings(**name).rendering().model_dump(mode="json")  # type: ignore[arg-type, union-attr]
        assert batch_traits(batch).draws_rows
        batch.reset([0, 1, 1], [0] * 3, [1, 2, 3])
        assert batch.render(1).tolist() == np.full((20, 30, 3), 2, np.uint8).tolist()
    finally:
        batch.close()


def test_where_there_are_no_pictures_it_is_one_sentence(pythons: dict[int, Path]) -> None:
    without = {"type": "gymnasium", "id": "tests.envs.vector_envs:Countdown-v0", "python": str(pythons[1])}
    blind = resolve("env", without)
    assert isinstance(blind, SeparateSettings)
    assert blind.rendering() is None
    batch = resolve("env", {**without, "id": "tests.envs.vector_envs:Ageing-v0"}).build(1)
    try:
        batch.reset([0], [0], [1])
        with pytest.raises(RuntimeError, match="TypeError: None is not an array of numbers"):
            batch.render(0)
    finally:
        batch.close()


def test_only_paths_of_sources_are_passed_on() -> None:
    """Of a Python in /usr, the user's folders there are; a folder whose name begins alike is another."""
    installed = ["/usr/lib/python3.12", "/usr/bin", "/w/.venv/lib/python3.12/site-packages"]
    paths = ["", "/usr/lib/python312.zip", "/usr/lib/python3.12/lib-dynload", "/usr/bin", "/usr/local/project"]
    paths += ["/w/.venv2/src", "/w/.venv/lib/python3.12/site-packages/x", "/usr/lib/python3.12x", "/w", "/w"]
    assert keep_sources(paths, installed) == ["/usr/local/project", "/w/.venv2/src", "/usr/lib/python3.12x", "/w"]


def test_a_folder_beside_what_is_installed_is_found_there(
    pythons: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in /usr/local of a Python there: in the prefix, but in none of its folders."""
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"data": str(tmp_path), "purelib": str(tmp_path / "lib")})
    (tmp_path / "project").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    known = environment()["PYTHONPATH"].split(os.pathsep)
    assert str(tmp_path / "project") in known
    assert str(tmp_path / "lib") not in known


def test_what_it_raises_is_told_and_it_goes_on(pythons: dict[int, Path]) -> None:
    batch = separate(pythons[1], "step raises").build(1)
    try:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"ValueError: the solver diverged \(.*pinned_env\.py, line \d+\)"):
                batch.step([0], np.zeros((1, 2), np.float32))
        batch.reset([0], [0], [1])
    finally:
        batch.close()
    with pytest.raises(ConfigError, match="size = 3: it must be even"):
        separate(pythons[1], "build refuses").build(1)
    assert not servers()


@pytest.mark.parametrize("name", ["Path", "as_root"])
def test_only_names_of_errors_are_looked_up(name: str, pythons: dict[int, Path]) -> None:
    """Another version may have error classes that this one lacks."""
    batch = separate(pythons[1], name).build(1)
    try:
        with pytest.raises(RuntimeError, match="an error of another version"):
            batch.step([0], np.zeros((1, 2), np.float32))
    finally:
        batch.close()


def test_a_process_that_ended_loses_the_batch(pythons: dict[int, Path]) -> None:
    batch = separate(pythons[1], "step ends the process").build(1)
    for _ in range(3):
        batch.step([0], np.zeros((1, 2), np.float32))
    with pytest.raises(EnvLost, match="the environment's process ended with status 7"):
        batch.step([0], np.zeros((1, 2), np.float32))
    batch.close()
    other = separate(pythons[1]).build(1)
    os.kill(servers()[0].pid, signal.SIGKILL)
    with pytest.raises(EnvLost, match="was ended by SIGKILL"):
        other.reset([0], [0], [1])
    other.close()
    assert not servers()


def test_a_python_that_is_not_there_or_lacks_something_is_one_sentence(
    pythons: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYRHYTHM_ENVS", str(tmp_path))
    with pytest.raises(MissingError, match=r"kitchen: .* is not a Python .*: polyrhythm envs setup kitchen --with"):
        find_python("kitchen", "env.python")
    with pytest.raises(MissingError, match=r"did you mean metaworld\? or make it"):
        find_python("metaword", "env.python")
    with pytest.raises(MissingError, match="run: polyrhythm envs setup metaworld"):
        find_python("metaworld", "env.python")
    with pytest.raises(MissingError, match="name an interpreter, or the folder of an environment"):
        find_python(str(tmp_path / "nowhere"), "env.python")
    assert find_python(str(pythons[1].parents[1]), "env.python") == pythons[1]
    (tmp_path / "empty").mkdir()
    bare = other_python(tmp_path / "bare", None)
    next((tmp_path / "bare").glob("lib/python*/site-packages/others.pth")).unlink()
    with pytest.raises(MissingError, match=r"env\.python = .*is polyrhythm installed there\? polyrhythm envs setup"):
        separate(bare).spec()
    with pytest.raises(ImportError, match="No module named 'pinned_sim'"):
        separate(other_python(tmp_path / "other", None)).build(1)
    assert not servers()


def test_nothing_is_asked_on_the_terminal(pythons: dict[int, Path]) -> None:
    with pytest.raises(ConfigError, match="EOFError"):
        separate(pythons[1], "spec asks").spec()
    assert not servers()


def test_what_only_the_other_python_can_validate_is_refused_there_in_one_sentence(pythons: dict[int, Path]) -> None:
    for section, said in (
        ({"type": "no_such_module:Settings"}, r"no_such_module:Settings cannot be imported"),
        ({"type": "tests.plugins.simulators.pinned_env:Nothing"}, "has no Nothing"),
    ):
        settings = resolve("env", {**section, "python": str(pythons[1])})
        assert isinstance(settings, SeparateSettings)
        with pytest.raises(ConfigError, match=said) as refused:
            settings.spec()
        assert str(refused.value).startswith("env.python = ")


def test_modules_of_the_users_paths_are_found_there(
    pythons: dict[int, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_env.py").write_text(
        "from tests.plugins.simulators.pinned_env import PinnedSettings\n\n\n"
        "class Own(PinnedSettings):\n    type: str = 'own_env:Own'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = resolve("env", {"type": "own_env:Own", "python": str(pythons[1])})
    assert isinstance(settings, SeparateSettings)
    assert settings.spec() == PinnedSettings().spec()


def test_a_refused_episode_is_refused_here_too(pythons: dict[int, Path]) -> None:
    batch = separate(pythons[1], "refuses").build(3)
    with pytest.raises(RowsFailed) as raised:
        batch.reset(range(3), [0] * 3, [0] * 3)
    assert {row: type(error) for row, error in raised.value.errors.items()} == {0: EpisodeRefused, 1: RuntimeError}
    assert str(raised.value.errors[0]) == "too long"
    assert batch_traits(batch).expert
    with pytest.raises(RowsFailed) as raised:
        batch.expert_actions([0, 2])
    assert {row: type(error) for row, error in raised.value.errors.items()} == {2: EpisodeRefused}
    assert raised.value.result.tolist() == [[0.5, 0.5]] * 2
    batch.close()
