"""Every command and every Python block of README and docs/ is accepted.

All commands go through the parser and settings of shipped recipes are loaded. Those that take a moment run, with a
finished run of cartpole for what a reader names; a training is checked up to its start; PARSED has the reason for each
of the others. All Python is compiled, and what it imports from polyrhythm exists. Whole pages run in test_api.py
(python-api.md), test_own_environments.py (that page, first-environment.md), test_extending.py and
plugins/workflow/test_page.py.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

import polyrhythm
from polyrhythm.cli.main import command_parser, commands, main, split_command
from polyrhythm.config.explain import paths_to
from polyrhythm.config.load import load_config
from polyrhythm.config.recipes import recipe_names
from polyrhythm.config.schema import RunConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(polyrhythm(?: [^`]+)?)`")
#: What a reader replaces: RUN, FOLDER, SECTION.KEY, RUN_OR_CHECKPOINT.
_PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]*\b|…|\.\.\.")
#: Dotted paths of a recipe's keys.
KEYS = {*paths_to(None, RunConfig), "extends", "preset"}


def _id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _blocks(page: Path, *languages: str) -> list[str]:
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [textwrap.dedent(body) for _, language, body in found if language in languages]


def _commands(page: Path) -> Iterator[list[str]]:
    """Words after `polyrhythm` of each command in a block of a terminal or in the text."""
    text = page.read_text(encoding="utf-8")
    lines = "\n".join(_blocks(page, "", "bash", "console", "sh", "text")).replace("\\\n", " ").splitlines()
    found = [line.strip().removeprefix("$ ") for line in lines] + _INLINE.findall(_BLOCK.sub("", text))
    for command in found:
        if re.match(r"polyrhythm( |$)", command):
            yield list(itertools.takewhile(lambda word: not re.fullmatch("[|>&;]+", word), _words(command)))[1:]


def _words(command: str) -> Iterator[str]:
    """A shell's words; comments are left out, redirections are words."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|>&;")
    lexer.whitespace_split = True
    return iter(lexer)


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


ALL = sorted({(_id(page), tuple(words)) for page in PAGES for words in _commands(page)})


def test_the_pages_have_commands() -> None:
    assert len(ALL) > 100
    assert ("docs/planning.md", ("simulate", "small")) in ALL


#: A command's name alone, or with one option, stands for all of its uses.
WHOLE = [
    words
    for _, words in ALL
    if len(words) > 1 and words[0] != "COMMAND" and words[1] != "…" and (len(words) > 2 or not words[1].startswith("-"))
]


def test_commands_that_are_named_exist() -> None:
    names = {words[0] for _, words in ALL if words and not words[0].startswith("-")} - {"COMMAND"}
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


#: Why commands of the pages are parsed and not run: by their first words, or by one that they have.
PARSED = {
    "takes minutes": ("bench", "chaos", "demos", "sft", "sweep", "eval compare"),
    "starts a training that goes on": ("resume",),
    "serves until it is ended": ("watch",),
    "downloads, or asks a hub": ("envs setup", "--push", "hf://"),
    "needs a cluster, or its tools": ("cluster", "--cluster", "--slurm", "--kuberay", "launcher=ray"),
    "needs weights or adapters that are not in the repository": (
        "policies inspect", "policies merge", "policies export", "policy.checkpoint=NEW", "init_from=runs/start",
    ),
    "needs a server of a language model": ("policy.engine",),
    "needs a recipe or class of the page, which its own test runs": (
        "line.yaml", "pusht.yaml", "recipe.yaml", "reach", "mine:Settings", "module:Class", "module:function",
    ),
    "needs a simulator": ("check maniskill_pushcube", "check robosuite_lift", "doctor maniskill"),
    "searches, in tests/plugins/planning/test_placing.py": ("plan metaworld_pi0 devices=1 --gpus", "plan libero_groot"),
    "needs a GPU": ("plan metaworld_pi0", "plan quickstart_pi0"),
    "needs a package that make setup does not install": (
        "fetch_reach_pixels", "examples/fetch/fetch_reach.yaml", "--video", "--variants",
    ),
    "is a form, not a command": ("COMMAND", "NAME", "CODE", "train …", "completion words"),
    "is of two finished runs": ("compare",),
}  # fmt: skip


def _reason(words: Sequence[str]) -> str:
    """Why a command is not run; "" if it is. A name alone is run with --help."""
    line = " ".join(words)
    if len(words) < 2:
        return "" if words and words[0] in commands() else "is a form, not a command"
    return next((reason for reason, marks in PARSED.items() if any(_has(words, line, mark) for mark in marks)), "")


def _has(words: Sequence[str], line: str, mark: str) -> bool:
    return f"{line} ".startswith(f"{mark} ") or any(
        word.startswith(mark) or f"={mark}" in word for word in words[1:] if len(mark.split()) == 1
    )


def _ready(words: Sequence[str], run: Path, new: Path) -> list[str]:
    """The command with real names: the finished run, a recipe, a new folder; shortened."""
    if len(words) == 1:
        return [*words, *["--help"] * (words[0] not in ("recipes", "settings"))]
    named = {"RECIPE": "cartpole", "R": "cartpole", "SECTION": "training", "SECTION.KEY": "training.versions"}
    named |= dict.fromkeys(("NEW", "FOLDER"), str(new)) | dict.fromkeys(("RUN", "RUN_OR_CHECKPOINT"), str(run))
    named |= {"TYPE": "categorical" if words[0] == "policies" else "gymnasium", "FILE": "small"}
    ready = [
        str(run / "best.pt") if word.endswith("/best.pt")
        else str(run) if word.startswith("runs/")
        else named.get(word, re.sub(r"=N$", "=1", word))
        for word in words
        if word not in ("[section.key=value", "...]", "[--json]")
    ]  # fmt: skip
    if "--episodes" in ready:
        ready[ready.index("--episodes") + 1] = "2"
    if ready[0] == "train" and "--check" not in ready:
        ready.append("--check")
    if ready[0] == "profile" and "cartpole" in ready:
        ready += ["--minutes", "0.05", "--out", f"{new}.json"]
    return ready


#: Commands that are run; of those that differ in a seed or in numbers of episodes and versions alone, one.
_LENGTHS = re.compile(r" (?:(?:\w+\.)?seed|training\.versions|evaluation\.\w+)=\S+| --seed \d+")
_ONE_OF = {
    _LENGTHS.sub("", " ".join(_ready(words, Path("RUN"), Path("NEW")))): words for _, words in ALL if not _reason(words)
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of cartpole."""
    folder = tmp_path_factory.mktemp("pages") / "run"
    small = ["training.versions=2", "evaluation.episodes=4", "evaluation.every=1", "rollout.rows=4", "launcher=inline"]
    assert main(["train", "cartpole", *small, "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("words", sorted(_ONE_OF.values()), ids=" ".join)
def test_commands_of_the_pages_run(
    words: tuple[str, ...],
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    try:
        status = main(_ready(words, finished, tmp_path / "new"))
    except SystemExit as end:  # of --help
        status = end.code or 0
    # 3: this machine lacks a simulator, a checkpoint or a device of the recipe.
    assert status in ((0, 3) if words[0] == "train" else (0, 1) if words[0] == "doctor" else (0,)), (
        capsys.readouterr().err
    )
    assert capsys.readouterr().out


def test_most_commands_run_and_no_reason_is_left_over() -> None:
    parsed = [words for _, words in ALL if _reason(words)]
    assert len({words for _, words in ALL} - set(parsed)) >= 65
    assert {_reason(words) for words in parsed} == PARSED.keys()


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page, "python")], ids=_id)
def test_python_of_a_page_compiles_and_imports_what_exists(page: Path) -> None:
    for block in _blocks(page, "python"):
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


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page, "yaml")], ids=_id)
def test_settings_in_yaml_of_a_page_exist(page: Path) -> None:
    for block in _blocks(page, "yaml"):
        content = yaml.safe_load(block)
        if isinstance(content, dict) and content.keys() & RunConfig.model_fields.keys():
            assert [path for path in _paths(content) if path not in KEYS] == []


def _paths(section: dict[str, object], prefix: str = "") -> Iterator[str]:
    """Dotted paths of a recipe's keys, without those of env and policy, which depend on their type."""
    for key, value in section.items():
        yield prefix + key
        if isinstance(value, dict) and key not in ("env", "policy", "settings", "options", "dataset"):
            yield from _paths(value, f"{prefix}{key}.")
