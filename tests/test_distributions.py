"""What the two distributions of this checkout contain, by their build settings: Polyrhythm, and its benchmarks.

Polyrhythm's are also built, and its wheel trains in a folder of its own, without this checkout.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import polyrhythm
from polyrhythm.config.recipes import recipe_names

ROOT = Path(__file__).parents[1]


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
    assets = package / "plugins" / "report" / "assets"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    others = [path for path in files if assets not in path.parents]
    assert [str(path) for path in others if not (path.parent / "__init__.py").is_file()] == []


def test_the_benchmarks_are_of_the_version_that_they_need() -> None:
    project = _settings(ROOT / "bench")["project"]
    assert project["version"] == polyrhythm.__version__
    assert f"polyrhythm=={polyrhythm.__version__}" in project["dependencies"]


def test_the_changelog_has_a_section_of_this_version() -> None:
    assert f"\n## {polyrhythm.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {polyrhythm.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_image_copies_what_a_wheel_is_built_from() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    let_through = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert all((ROOT / name).exists() and f"!{name}" in let_through for name in copied)
    settings = _settings(ROOT)
    included = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {
        "src",
        "pyproject.toml",
        settings["project"]["readme"],
        *settings["project"]["license-files"],
        *included,
    } == copied


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist of this checkout and the wheel that is built from that sdist."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed; the extra dev has it")
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t"]
    subprocess.run([*build, "sdist"], cwd=ROOT, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    subprocess.run([*build, "wheel"], cwd=source, check=True, capture_output=True)
    return folder


def test_the_wheel_has_every_file_of_the_package_its_recipes_and_examples(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    listed = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard", "src/polyrhythm", "recipes", "examples"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    wanted = {name.removeprefix("src/") if name.startswith("src/") else f"polyrhythm/{name}" for name in files}
    assert inside == wanted | {"polyrhythm/constraints.txt"}
    assert wheel.stat().st_size < 4_000_000


def test_the_wheel_trains_in_a_folder_without_this_checkout(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    work = tmp_path / "work"
    work.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    few = ["launcher=inline", "training.versions=2", "evaluation.episodes=2"]
    commands = [["recipes"], ["train", "cartpole", "--out", "run", *few], ["new", "mine"]]
    code = (
        "import json, sys, polyrhythm; from polyrhythm.cli.main import main; print(polyrhythm.__file__)\n"
        "for words in json.loads(sys.argv[1]): print('status', main(words), flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)],
        cwd=work, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("status 0\n") == 3, done.stderr
    where, *listed = done.stdout.partition("status 0\n")[0].splitlines()
    assert Path(where).is_relative_to(tmp_path / "site")
    assert [line.split()[0] for line in listed] == recipe_names()
    assert json.loads((work / "run" / "summary.json").read_text(encoding="utf-8"))
    assert (work / "run" / "report.html").stat().st_size > 10_000  # its script and style came along
    assert (work / "mine" / "point.yaml").is_file()
