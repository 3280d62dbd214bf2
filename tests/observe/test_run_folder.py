from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from polyrhythm.config.load import load_config
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.observe.run_folder import find_run, new_run_folder, take_folder
from polyrhythm.pipeline.persistence.resume_rules import started

NOON = datetime(2030, 1, 2, 12, 0, 5, tzinfo=UTC)


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    folders = [new_run_folder(tmp_path / "runs", "cartpole", NOON) for _ in range(3)]
    assert [folder.name for folder in folders] == ["20300102-120005", "20300102-120005-2", "20300102-120005-3"]
    assert all(folder.parent == tmp_path / "runs" / "cartpole" and folder.is_dir() for folder in folders)


def test_a_named_folder_is_made_or_taken_when_empty(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert take_folder(folder) == take_folder(folder) == folder
    (folder / "x").touch()
    with pytest.raises(RunFolderError, match="not empty"):
        take_folder(folder)
    with pytest.raises(RunFolderError, match="cannot be made"):
        take_folder(folder / "x")


def test_a_taken_folder_is_refused_before_a_placement_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("latency", ["placement=auto"])
    Path("latency.profile.json").write_text("{}")
    with pytest.raises(ConfigError, match="profile"):
        started(config, tmp_path / "new")
    Path("config.yaml").touch()
    with pytest.raises(RunFolderError, match="holds a run that is not finished"):
        started(config, tmp_path)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root in (Path("/proc/x"), tmp_path / "file"):
        with pytest.raises(RunFolderError, match=r"cannot be made.*out_dir"):
            new_run_folder(root, "cartpole", NOON)


@pytest.mark.parametrize("folder", ["runs", "runs/name", "runs/name/2"])
def test_the_newest_run_is_found_by_its_own_folder_its_name_or_out_dir(tmp_path: Path, folder: str) -> None:
    for number in (1, 2):
        run = tmp_path / "runs" / "name" / str(number)
        run.mkdir(parents=True)
        (run / "config.yaml").touch()
        os.utime(run / "config.yaml", (number, number))
    assert find_run(tmp_path / folder) == tmp_path / "runs" / "name" / "2"
