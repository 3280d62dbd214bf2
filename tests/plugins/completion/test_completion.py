"""What the shells offer after `polyrhythm`: asked of the words, and of each shell that is here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polyrhythm.cli.main import commands
from polyrhythm.config.recipes import recipe_names
from polyrhythm.plugins.completion.candidates import candidates
from polyrhythm.plugins.completion.command import SCRIPTS


@pytest.mark.parametrize(
    ("words", "some"),
    [
        (["tr"], ["train"]),
        (["eval", "co"], ["compare"]),
        (["envs", "se"], ["setup"]),
        (["envs", "mani"], ["maniskill"]),
        (["policies", "tiny"], ["tiny_vla"]),
        (["policies", "--recipe", "reac"], ["reach"]),
        (["train", "quickstart", "training.optimizer.l"], ["training.optimizer.lr=", "training.optimizer.lr_fin"]),
        (["train", "quickstart", "seed=1", "freshness.max"], ["freshness.max_lag="]),
        (["check", "quickstart", "batching.type=l"], ["batching.type=lockstep"]),
        (["train", "quickstart", "preset=lock"], ["preset=lockstep"]),
        (["train", "quickstart", "algorithm.loss=ci"], ["algorithm.loss=cispo"]),
        (["train", "quickstart", "launcher="], ["launcher=inline"]),
        (["train", "--ch"], ["--check"]),
        (["settings", "freshness.max"], ["freshness.max_lag"]),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_a_word_that_was_begun_is_completed(words: list[str], some: list[str]) -> None:
    found = candidates(words)
    assert all(any(one.startswith(wanted) for one in found) for wanted in some), found
    assert all(one.startswith(words[-1]) for one in found)


def test_each_command_and_recipe_is_offered() -> None:
    assert {name for name in commands() if " " not in name} <= set(candidates([""]))
    assert set(recipe_names()) <= set(candidates(["train", ""]))
    for command in commands():
        assert "--help" in candidates([*command.split(), "-"])


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense", ""],
        ["train", "quickstart", "nonsense.lr"],
        ["train", "quickstart", "training.epochs="],
        ["train", "--cluster", ""],
        ["train", "--cluster", "qui"],
        ["report", ""],
        ["train", "./my_recipe"],
        ["train", "quickstart", "=x"],
        ["completion", "bash", ""],
    ],
)
def test_files_and_free_values_are_left_to_the_shell(words: list[str]) -> None:
    assert candidates(words) == []


def test_an_answer_imports_neither_torch_nor_numpy() -> None:
    """0.25 s of CPU, most of it pydantic's; with torch it would be seconds."""
    code = (
        "import sys; from polyrhythm.plugins.completion.candidates import candidates;"
        "candidates(['train', 'quickstart', 'training.']); print({'torch', 'numpy', 'gymnasium'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


#: Types a line and prints what the shell would offer.
_ASK = {
    "bash": 'COMP_LINE="$LINE" COMP_POINT=${#LINE}; _polyrhythm 2>/dev/null; printf "%s\\n" "${COMPREPLY[@]}"',
    "fish": 'complete -C "$LINE"',
}


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("polyrhythm tra", "train"),
        ("polyrhythm train quickstart_f", "quickstart_flow"),
        ("polyrhythm train quickstart training.optimizer.we", "training.optimizer.weight_decay="),
        ("polyrhythm train quickstart batching.type=lo", "batching.type=lockstep"),
    ],
)
@pytest.mark.parametrize("shell", list(_ASK))
def test_a_shell_offers_it(shell: str, line: str, answer: str, tmp_path: Path) -> None:
    if (path := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")
    polyrhythm = tmp_path / "polyrhythm"
    polyrhythm.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "from polyrhythm.cli.main import entry; entry()" "$@"\n'
    )
    polyrhythm.chmod(0o755)
    environ = os.environ | {"LINE": line, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(
        [path, "-c", f"{SCRIPTS[shell]}\n{_ASK[shell]}"],
        capture_output=True, text=True, check=True, env=environ, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    wanted = answer.rpartition("=")[2] if shell == "bash" and not answer.endswith("=") else answer
    assert wanted in [row.partition("\t")[0] for row in done.stdout.splitlines()], done


@pytest.mark.parametrize("shell", list(SCRIPTS))
def test_the_script_of_each_shell_is_valid(shell: str) -> None:
    if (path := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([path, "-n"], input=SCRIPTS[shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
