"""`polyrhythm envs setup`: what a Python for a simulator gets, and what is refused. That it works is tried by hand: it
installs packages (docs/own-environments.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyrhythm.cli.main import main
from polyrhythm.plugins.simulators.setup import requirements


def test_it_has_the_packages_of_the_extra_and_not_those_of_training() -> None:
    names = [requirement.split(">")[0].split("<")[0] for requirement in requirements("metaworld")]
    assert {"metaworld", "mujoco", "numpy", "msgspec", "pydantic"} <= set(names)
    assert not {"torch", "tensorboard", "pytest", "transformers"} & set(names)
    assert requirements("mine", ["my-simulator==3"])[-1] == "my-simulator==3"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["setup"], "for which environment"),
        (["setup", "metawrld"], "no extra of polyrhythm has this name (dev, "),
        (["setup", "../there", "--with", "x"], "a name has letters"),
        (["metaworld", "more"], "belong to polyrhythm envs setup"),
        (["setup", "metaworld", "--interpreter", "/bin/false"], "a virtual environment cannot be made: /bin/false"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POLYRHYTHM_ENVS", str(tmp_path))
    assert main(["envs", *words]) == 2
    assert said in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
