"""What the two distributions of this checkout contain, by their build settings: Polyrhythm, and its benchmarks."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import polyrhythm

ROOT = Path(__file__).parents[1]
#: Folders of data files that a module beside them reads.
ASSETS = ("plugins/report/assets",)


def _settings(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


def test_each_wheel_has_its_own_package_and_no_other() -> None:
    for folder, package in ((ROOT, "polyrhythm"), (ROOT / "bench", "polyrhythm_bench")):
        settings = _settings(folder)["tool"]["hatch"]["build"]["targets"]["wheel"]
        assert settings["packages"] == [f"src/{package}"]
        assert (folder / "src" / package / "__init__.py").is_file()
        assert [path.name for path in (folder / "src").iterdir() if path.suffix != ".egg-info"] == [package]
        included = settings.get("force-include", {})
        assert all((folder / source).exists() for source in included)
        assert not any("bench" in source for source in included)


def test_no_file_of_the_core_lies_in_a_folder_without_a_module() -> None:
    """A data file that a move left behind would be in the wheel, where nothing reads it."""
    package = ROOT / "src" / "polyrhythm"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assets = {path for folder in ASSETS for path in (package / folder).rglob("*")}
    assert [str(path) for path in files if not (path.parent / "__init__.py").is_file() and path not in assets] == []


def test_the_wheel_leaves_out_no_file_of_a_packages_folder() -> None:
    """It has every file that git does not ignore: pages need their scripts and styles."""
    build = _settings(ROOT)["tool"]["hatch"]["build"]
    assert not {"exclude", "include", "only-include"} & {*build, *build["targets"]["wheel"]}
    folders = [ROOT / "src" / "polyrhythm" / folder for folder in ASSETS]
    assert all(any(folder.iterdir()) and (folder.parent / "__init__.py").is_file() for folder in folders)
    ignored = [*(line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split())]
    files = [path.relative_to(ROOT) for folder in folders for path in folder.rglob("*")]
    assert [str(path) for path in files if {*ignored} & {*path.parts}] == []


def test_the_benchmarks_are_of_the_version_that_they_need() -> None:
    project = _settings(ROOT / "bench")["project"]
    assert project["version"] == polyrhythm.__version__
    assert f"polyrhythm=={polyrhythm.__version__}" in project["dependencies"]
