"""Every command and every Python block of README and docs/ is accepted, and runs.

All commands go through the parser and settings of shipped recipes are loaded. Those that take a moment run, with
finished runs of cartpole for what a reader names; a training is checked up to its start. The longer ones and the
trainings themselves are in test_page_commands_in_full.py; those that another file runs are named there; what is run
nowhere has its reason in page_commands.py. All Python is compiled, and what it imports from polyrhythm exists.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.page_commands import (
    ALL,
    ELSEWHERE,
    LONG,
    NOT_RUN,
    PAGES,
    ROOT,
    Runs,
    blocks,
    mark_of,
    not_run,
    one_of,
    page_id,
    quick,
    ready,
    status_of,
)

import polyrhythm
from polyrhythm.cli.main import command_parser, commands, split_command
from polyrhythm.config.explain import paths_to
from polyrhythm.config.load import load_config
from polyrhythm.config.recipes import recipe_names
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError

#: Dotted paths of a recipe's keys.
KEYS = {*paths_to(None, RunConfig), "extends", "preset"}


def _parsed(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> argparse.Namespace | None:
    """The arguments of a command; None if it prints help."""
    command, rest = split_command(words)
    _, parser = command_parser(command)
    # One letter stands for a number.
    given = [re.sub(r"(^|=)[A-Z]$", r"\g<1>1", word) for word in rest if word not in ("[--json]", "...]")]
    try:
        arguments, unknown = parser.parse_known_intermixed_args(given)
    except SystemExit as end:
        if end.code:
            pytest.fail(f"{words}: {capsys.readouterr().err}")
        return None
    if unknown:
        pytest.fail(f"{words}: unknown {unknown}")
    return arguments


def test_the_pages_have_commands() -> None:
    assert len(ALL) > 100
    assert ("docs/planning.md", ("simulate", "small")) in ALL


#: A command's name alone, or with one option, stands for all of its uses.
WHOLE = [
    words
    for _, words in ALL
    if len(words) > 1 and words[1] != "…" and (len(words) > 2 or not words[1].startswith("-"))
]


def test_commands_that_are_named_exist() -> None:
    names = {words[0] for _, words in ALL if words and not words[0].startswith("-")}
    assert names - set(commands()) == set()


@pytest.mark.parametrize("command", sorted({words[0] for words in WHOLE}))
def test_commands_of_the_pages_are_accepted(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By the parser; settings exist, and those of a shipped recipe have values that it takes."""
    for words in (one for one in WHOLE if one[0] == command):
        arguments = _parsed(words, capsys)
        own = [word for word in getattr(arguments, "overrides", []) if "=" in word and not word.startswith("[")]
        if command in ("train", "check", "sft", "demos") and arguments and arguments.recipe in recipe_names():
            assert load_config(arguments.recipe, own).env, words
        for key in (word.partition("=")[0] for word in own):
            assert key in KEYS or key.startswith(("env.", "policy.")), words


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("words", one_of([words for _, words in ALL if quick(words)]), ids=" ".join)
def test_commands_of_the_pages_run(
    words: tuple[str, ...], runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ready(words, runs.names(words, tmp_path / "new"))
    if "--episodes" in given:
        given[given.index("--episodes") + 1] = "2"
    if given[0] == "train" and "--check" not in given:
        given.append("--check")
    if given[0] == "profile" and "cartpole" in given:
        given += ["--minutes", "0.05", "--out", f"{tmp_path / 'new'}.json"]
    status, told = status_of(given, runs.folder), capsys.readouterr()
    assert told.out
    # 3, or 1 of a command that looks: this machine lacks a package, a checkpoint or a device, and the fix is named.
    lacks = {"train": 3, "doctor": 1, "check": 1}.get(words[0], 0)
    assert status in (0, lacks), told.err
    assert not status or re.search(r"fix: |run: |install", told.out), told.out


@pytest.mark.parametrize("mark", ELSEWHERE)
def test_what_another_file_runs_is_in_it(mark: str) -> None:
    file, says = ELSEWHERE[mark]
    assert says in (ROOT / file).read_text(encoding="utf-8")


def test_most_commands_run_and_no_reason_is_left_over() -> None:
    given = {words for _, words in ALL if words}
    assert len([words for words in given if quick(words)]) >= 75
    assert len([words for words in given if not_run(words)]) <= 20
    assert {not_run(words) for words in given} - {None} == NOT_RUN.keys()
    for marks in (*NOT_RUN.values(), ELSEWHERE, LONG):
        used = {mark_of(words, marks) for words in given}
        assert [mark for mark in marks if mark not in used] == []


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=page_id)
def test_python_of_a_page_compiles_and_imports_what_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "polyrhythm":
                module = importlib.import_module(node.module or "")
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []
            if isinstance(node, ast.Import):
                for name in node.names:
                    if name.name.split(".")[0] == "polyrhythm":
                        importlib.import_module(name.name)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pr":
                assert node.attr in polyrhythm.__all__, node.attr


#: What is wrong with a recipe whose keys or values are not known. A part of a recipe may lack another part.
_UNKNOWN = {"PR101", "PR103", "PR104"}
#: Recipes of which a page may show a part, and what a page leaves out of a whole one.
_SHOWN_OF = ("cartpole", "quickstart", "quickstart_lm", "metaworld_pi0")
_LEFT_OUT = {"training": {"versions": 1, "mini_batch_samples": 16}}
#: Pages whose recipes another file loads: they name classes of the page.
_LOADED_ELSEWHERE = {"docs/extending.md"}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=page_id)
def test_yaml_of_a_page_is_a_recipe_or_fits_one(page: Path) -> None:
    for block in blocks(page, "yaml"):
        content = yaml.safe_load(block)
        is_recipe = isinstance(content, dict) and content.keys() & RunConfig.model_fields.keys()
        if is_recipe and "…" not in block and page_id(page) not in _LOADED_ELSEWHERE:
            whole = "extends" in content or {"env", "policy"} <= content.keys()
            tried = [_codes(_LEFT_OUT | content)] if whole else [_codes(name, content) for name in _SHOWN_OF]
            assert any(not _UNKNOWN & set(codes) for codes in tried), f"{block}{tried}"


def _codes(recipe: str | dict[str, Any], *overrides: dict[str, Any]) -> tuple[str, ...]:
    """Of what is wrong with the recipe."""
    try:
        load_config(recipe, overrides)
    except ConfigError as error:
        return error.codes
    return ()
