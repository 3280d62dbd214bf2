"""The doctor tries things: what works, what does not, and what it says then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import BaseModel
from tests.long import long

import polyrhythm
from polyrhythm.cli.main import main
from polyrhythm.config.catalog import check_installed
from polyrhythm.conformance import Finding
from polyrhythm.errors import MissingError
from polyrhythm.plugins.doctor import command as doctor
from polyrhythm.plugins.doctor.command import examine, line
from polyrhythm.plugins.simulators.libero.env import LiberoSettings
from polyrhythm.plugins.simulators.metaworld import env as metaworld
from polyrhythm.runtime.memory.shared_folder import shared_root


def run(name: str) -> Finding:
    """What the doctor's check of this name finds."""
    (check,) = (one for one in doctor.CHECKS if one.name == name)
    return next(check.findings(None)).finding


@long(2, "a frame of Meta-World")
@pytest.mark.slow
@pytest.mark.sim
def test_where_all_is_there_a_frame_is_drawn_and_the_status_is_0(
    simulator: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ready"]
    states = {check["name"]: check["state"] for check in told["checks"]}
    assert {"python", "packages", "torch", "cores", "memory", "shared memory", "processes", "messages"} <= states.keys()
    drawn = [check for check in told["checks"] if check["name"].startswith("rendering")]
    assert "a frame of door-close-v3 in" in drawn[0]["detail"]


def test_a_backend_that_cannot_draw_is_missing_with_one_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A window backend without a screen: a real failure, in the process that draws."""
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    monkeypatch.delenv("DISPLAY", raising=False)
    finding = metaworld.rendering("glfw", needed=True)
    assert finding.state == "missing"
    assert finding.detail.startswith("no frame of door-close-v3: ")
    assert finding.fix == "unset MUJOCO_GL"
    assert metaworld.rendering("glfw", needed=False).state == "note"
    assert next(iter(metaworld.backends().items())) == ("glfw", True)


def test_what_dead_runs_left_is_removed() -> None:
    folder = Path(tempfile.mkdtemp(prefix=f"polyrhythm-{os.getuid()}-", dir=shared_root()))
    (folder / "owner").write_text("1")
    found = run("leftovers")
    assert found.detail.startswith("removed the shared memory of ")
    assert not folder.exists()
    assert run("leftovers").detail == "no shared memory of dead runs"


def test_threads_beyond_the_cores_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "9999")
    assert run("cores").state == "note"
    assert run("cores").fix == "export OMP_NUM_THREADS=1"


def test_the_first_checks_need_no_simulator() -> None:
    found = examine()
    first = [next(found) for _ in range(9)]
    found.close()  # type: ignore[attr-defined]
    assert [finding.name for finding in first] == [
        *("python", "packages", "torch", "cores", "memory"),
        *("leftovers", "shared memory", "processes", "messages"),
    ]
    assert {finding.state for finding in first} <= {"ok", "note"}


def test_without_any_package_each_check_says_what_is_missing() -> None:
    """A bare Python, which finds our sources and nothing else."""
    program = (
        "import itertools, json\nfrom polyrhythm.plugins.doctor.command import examine\n"
        "print(json.dumps([finding._asdict() for finding in itertools.islice(examine(), 9)]))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={"PYTHONPATH": str(Path(polyrhythm.__file__).parents[1])},
    )
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert {name for name, finding in found.items() if finding["state"] == "missing"} == {
        *("torch", "memory", "shared memory", "messages")
    }
    assert all(found[name]["fix"] == "make setup" for name in ("torch", "memory", "shared memory", "messages"))


def test_a_finding_is_one_aligned_line_and_what_to_run() -> None:
    assert line(Finding("cores", "ok", "2 available")) == "ok       cores             2 available"
    lines = line(Finding("rendering egl", "missing", "no frame", "apt-get install x")).splitlines()
    assert lines == ["missing  rendering egl     no frame", f"{'':27}run: apt-get install x"]


class CrystalSettings(BaseModel):
    """An environment of a crystal, with checks of its own."""

    needs: ClassVar = ("pydantic",)
    type: Literal["crystal"] = "crystal"

    @classmethod
    def findings(cls) -> Iterator[Finding]:
        yield Finding("ball", "ok", "clear")
        yield Finding("driver", "failed", "cracked", "apt-get install driver")


class AbsentSettings(BaseModel):
    """An environment whose package nobody has."""

    needs: ClassVar = ("no_such_simulator",)
    type: Literal["absent"] = "absent"


def test_an_environment_has_its_own_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"{__name__}:CrystalSettings"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok       packages          pydantic 2")
    assert lines[1:3] == ["ok       ball              clear", "missing  driver            PR204: cracked"]
    assert lines[3:] == [f"{'':27}run: apt-get install driver", "missing: driver"]


def test_without_its_package_an_environment_is_not_checked_further(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"{__name__}:AbsentSettings"]) == 1
    assert "pip install no_such_simulator" in capsys.readouterr().out
    assert main(["doctor", "latency"]) == 0
    assert "ready for latency" in capsys.readouterr().out
    assert main(["doctor", "metawrold"]) == 2
    assert "did you mean metaworld?" in capsys.readouterr().err


@pytest.mark.parametrize(("robosuite", "apart"), [("1.5.1", True), ("1.4.0", False), ("", False)])
def test_an_extra_that_cannot_be_beside_an_installed_package_gets_a_python_of_its_own(
    robosuite: str, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packages of which only names and versions are there; libero is none of them."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if "site-packages" not in path)])
    for name, version in {"mujoco": "3.3.0", "robosuite": robosuite}.items():
        if version:
            (tmp_path / f"{name}.py").touch()
            (tmp_path / f"{name}-{version}.dist-info").mkdir()
            (tmp_path / f"{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    assert main(["doctor", "libero"]) == 1
    said = capsys.readouterr().out
    words = "robosuite 1.5.1 is installed here and the extra libero needs 1.4, so it takes a Python of its own"
    assert (words in said) == ("run: polyrhythm envs setup libero\n" in said) == apart
    assert ("'polyrhythm[libero]'" in said) != apart
    with pytest.raises(MissingError) as refused:
        check_installed("env", LiberoSettings(tasks=("libero_spatial",)))
    assert ("polyrhythm envs setup libero" in str(refused.value)) == apart


@pytest.mark.sim
def test_the_doctor_tries_maniskill(maniskill: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "maniskill", "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert list(checks) == ["packages", "Vulkan drivers", "GPU", "PickCube-v1"]
    assert "a frame of 128x128 pixels" in checks["PickCube-v1"]["detail"]


def test_setup_installs_what_the_doctor_names() -> None:
    script = Path(__file__).parents[3] / "tools" / "render_libs.sh"
    assert f'packages="{metaworld.RENDER_PACKAGES}"' in script.read_text()


def test_one_reason_is_told_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLYRHYTHM_SHARED_MEMORY", str(tmp_path / "nowhere"))
    found = examine()
    first = [next(found) for _ in range(9)]
    found.close()  # type: ignore[attr-defined]
    missing = {finding.name: finding.detail for finding in first if finding.state == "missing"}
    assert list(missing) == ["leftovers", "shared memory", "messages"]
    assert sum("nowhere" in detail for detail in missing.values()) == 1
    assert missing["messages"] == "could not be checked, for the same reason as leftovers"
