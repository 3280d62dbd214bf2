"""Every code that a message can have is on docs/troubleshooting.md and the other way round, and codes are found."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from polyrhythm.cli.main import main
from polyrhythm.envs.mujoco import RenderingUnavailable
from polyrhythm.error_codes import CODES, COMMAND_LINE, code_of
from polyrhythm.errors import (
    ConfigError,
    HostLost,
    MissingError,
    PolyrhythmError,
    RunFolderError,
    RunHalted,
    StartError,
)

ROOT = Path(__file__).parents[1]


def test_the_page_has_exactly_the_codes() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (PR\d+)$", page, re.MULTILINE)
    assert len(headings) == len(set(headings))
    assert set(headings) == {code.name for code in CODES}
    assert COMMAND_LINE in headings
    described = re.findall(r"^### PR\d+\n\n\*\*\w", page, re.MULTILINE)
    assert len(described) == len(headings), "each begins with its kind in bold"


def test_the_words_of_each_code_are_those_of_a_message() -> None:
    """A message that is reworded takes its code along."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py")]
    texts = "\n".join(
        node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant) and _is_text(node)
    )
    table = (ROOT / "src/polyrhythm/error_codes.py").read_text(encoding="utf-8")
    own = {node.value for node in ast.walk(ast.parse(table)) if isinstance(node, ast.Constant) and _is_text(node)}
    for code in CODES:
        for word in code.words:
            copies = sum(word.lstrip("^") in text for text in own)
            assert texts.count(word.lstrip("^")) > copies, f"{code.name}: no message has {word!r}"


def _is_text(node: ast.Constant) -> bool:
    return isinstance(node.value, str)


def test_each_class_has_a_code_for_any_sentence() -> None:
    last = {code.error: code for code in CODES}
    assert [code.name for code in last.values() if code.words] == []
    names = [code.name for code in CODES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("env.tasks = a: no such key; did you mean b?"), "PR101"),
        (ConfigError("rollout.rows = 0: it must be at least 1", origin="cartpole"), "PR104"),
        (ConfigError("tracking.0.type = 'wandbb': did you mean wandb? known types are wandb"), "PR104"),
        (ConfigError("training.optimizer.lr: a range has no list of values; add --random N or --optuna N"), "PR110"),
        (ConfigError("env.reward = dense: push has no such reward", origin="cartpole"), "PR111"),
        (ConfigError("cartpole.env.reward = dense: odd"), "PR100"),
        (MissingError("env.type = a: the package b is not installed; run: pip"), "PR201"),
        (MissingError("anything"), "PR200"),
        (RunFolderError("/runs/a is not a run's folder: it has no config.yaml"), "PR308"),
        (RenderingUnavailable("shared memory: in its words"), "PR401"),
        (StartError("shared memory: 3 MB wanted"), "PR402"),
        (HostLost("host a is lost (silent); the last: b", "a", ()), "PR502"),
        (RunHalted("x"), "PR500"),
        (PolyrhythmError("x"), "PR600"),
        (ModuleNotFoundError("x"), "PR604"),
        (PermissionError("x"), "PR605"),
        (KeyError("x"), ""),
    ],
)
def test_a_code_follows_from_class_and_sentence(error: BaseException, code: str) -> None:
    assert code_of(error) == code


def test_the_command_line_prints_a_code_for_each_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "cartpole", "seed=1.5", "groups.sise=2"]) == 2
    head, *lines = capsys.readouterr().err.splitlines()
    assert head == "polyrhythm: error: cartpole: 2 problems"
    assert sorted(line.partition(" = ")[0] for line in lines) == ["  PR101: groups.sise", "  PR104: seed"]
    assert main(["train", "cartpole", "seed=1.5"]) == 2
    assert capsys.readouterr().err.startswith("polyrhythm: error: PR104: ")
    with pytest.raises(SystemExit):
        main(["train", "--colour"])
    assert f"error: {COMMAND_LINE}: " in capsys.readouterr().err


def test_more_problems_than_are_listed_have_no_code_in_their_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [f"training.unknown{number}=1" for number in range(12)]
    assert main(["train", "cartpole", *wrong]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "  and 4 more"
    assert all(line.startswith("  PR101: ") for line in lines[1:-1])
