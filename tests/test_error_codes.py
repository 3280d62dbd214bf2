"""Each error that a user can see has a code whose entry says what to do; a new sentence without one fails here."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest

import polyrhythm
from polyrhythm import errors
from polyrhythm.cli.main import main
from polyrhythm.config.schema import RunConfig
from polyrhythm.envs.mujoco import RenderingUnavailable
from polyrhythm.error_codes import COMMAND_LINE, CONTRACT, GROUPS, Code, code_of, codes
from polyrhythm.errors import ConfigError, HostLost, MissingError, PolyrhythmError, RunFolderError, StartError
from polyrhythm.pipeline.run_loop import OrderlyHalt
from polyrhythm.plugin import PluginError
from polyrhythm.plugins.workflow import WorkflowError

ROOT = Path(__file__).parents[1]
#: Codes of the rest of a class, which names no cause.
GENERAL = {"PR100", "PR200", "PR300", "PR400", "PR500", "PR600"}
#: Folder or file below src/polyrhythm → what a sentence that begins with a variable begins with there.
STARTS = {
    "envs/": "env.id = x",
    "plugins/simulators/": "env.type = x",
    "plugins/language/text/": "env.files = x",
    "plugins/language/causal_lm/": "policy.checkpoint = x",
    "plugins/lerobot/": "policy.checkpoint = x",
    "plugins/pretrained/": "policy.checkpoint = x",
    "plugins/vla/": "policy.checkpoint = x",
    "plugins/hub/": "policy.checkpoint = x",
    "plugins/scoring/": "scoring.function = x",
    "plugins/trial/objective": "algorithm.loss.type = x",
    "plugins/trial/": "env.type = x",
    "config/load": "placement.x = x",
    "config/presets": "placement.x = x",
    "config/catalog": "env.type = x",
    "config/registry": "env.type = x",
    "pipeline/validation/": "policy.type = x",
    "checks": "env.type = x",
    "conformance": "rollout.sharding = x",
}
#: Sentences whose cause nobody has to look up.
PLAIN = {"the start was interrupted"}


@cache
def _trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "src").rglob("*.py"))}


@cache
def _bases() -> dict[str, list[str]]:
    """Names of the bases of each class of the package."""
    return {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for tree in _trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


@cache
def _order(name: str) -> list[str]:
    """Names of a class and its bases, as in its `__mro__`."""
    return [name, *(one for base in _bases().get(name, []) for one in _order(base))]


@cache
def _constants() -> dict[str, str]:
    """Texts of the package that have a name in capitals."""
    return {
        target.id: _text(node.value)
        for tree in _trees().values()
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant | ast.JoinedStr)
    }


def _called(node: ast.Call) -> str:
    """Last part of the name of what is called."""
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _text(node: ast.AST | None, known: Mapping[str, str] = MappingProxyType({})) -> str:
    """The sentence of an expression, with {…} for what varies. known: texts by the name of their constant."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, known) for part in parts)
        case ast.FormattedValue(value=ast.Call() as call) if _called(call) == "raised":
            return "raised ValueError: x"
        case ast.FormattedValue(value=value):
            return _text(value, known)
        case ast.BinOp(left=left, right=right):
            return _text(left, known) + _text(right, known)
        case ast.IfExp(body=body):
            return _text(body, known)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return known.get(name) or "{…}"
    return "{…}"


def _sentences() -> Iterator[tuple[str, str, str]]:
    """File, class and sentence of each error that the package raises with a sentence of its own."""
    known = _constants()
    kinds = {name for name in _bases() if "PolyrhythmError" in _order(name)} | {"EnvLost"}
    for path, tree in _trees().items():
        file = path.relative_to(ROOT / "src/polyrhythm").as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (name := _called(node)) in kinds and node.args:
                text = _text(node.args[0], known)
                if re.search(r"\w", text.replace("{…}", "")):
                    yield file, name, text


def _code(name: str, sentence: str) -> str:
    """`code_of` by the names of classes."""
    for kind in _order(name):
        own = sorted((one for one in codes() if kind in one.errors), key=lambda one: not one.says)
        if found := next((one.code for one in own if one.fits(sentence)), ""):
            return found
    return ""


def test_every_sentence_of_an_error_has_a_code_of_its_cause() -> None:
    found = list(_sentences())
    assert len(found) > 600
    without = []
    for file, name, sentence in found:
        start = next((begin for folder, begin in STARTS.items() if file.startswith(folder)), "")
        whole = start + sentence.removeprefix("{…}") if sentence.startswith("{…}") else sentence
        if _code(name, whole) in GENERAL and sentence not in PLAIN:
            without.append((file, name, sentence[:150]))
    assert without == [], "give a code of error_codes.toml words of the sentence, or add a code"


@pytest.mark.parametrize("section", RunConfig.model_fields)
def test_every_section_of_a_recipe_has_a_code(section: str) -> None:
    """Whatever a validator says of it."""
    for sentence in (f"{section} = 1: anything", f"{section}.key = 1: anything", f"{section}: anything"):
        assert code_of(ConfigError(sentence)) not in GENERAL, sentence


def _error(name: str, message: str) -> BaseException:
    found = _KINDS[name]
    error = found.__new__(found)
    error.args = (message,)
    return error


_KINDS = {
    kind.__name__: kind
    for kind in (
        *vars(errors).values(), RenderingUnavailable, PluginError, WorkflowError, ModuleNotFoundError, OSError,
    )
    if isinstance(kind, type) and issubclass(kind, BaseException)
}  # fmt: skip


@pytest.mark.parametrize("one", codes(), ids=lambda one: one.code)
def test_an_entry_has_an_example_with_its_code_cause_and_remedy(one: Code) -> None:
    assert {code_of(_error(name, one.message)) for name in one.errors if name in _KINDS} == {one.code}
    assert set(one.errors) <= _KINDS.keys()
    assert one.what
    assert not one.what.endswith(".")
    for sentence in (one.cause, one.remedy):
        assert sentence.endswith((".", ";")), "a sentence"
    assert one.code[:3] in GROUPS
    assert (one.code in GENERAL) == (one.message == "anything else")


def test_codes_are_few_and_each_is_given_once() -> None:
    names = [one.code for one in codes()]
    assert len(names) == len(set(names)) < 60
    assert {COMMAND_LINE, CONTRACT} <= set(names)


def test_each_class_has_a_code_for_any_sentence() -> None:
    for kind in _KINDS.values():
        if issubclass(kind, PolyrhythmError) and kind.__module__ == errors.__name__:
            assert code_of(_error(kind.__name__, "anything")), kind


def test_the_words_of_each_code_are_those_of_a_message() -> None:
    """A message that is reworded takes its code along."""
    texts = "\n".join(
        node.value
        for tree in _trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    sections = set(RunConfig.model_fields)
    for one in codes():
        for words in one.says:
            text = words.removeprefix("^")
            assert text in texts or text.strip(" .=") in sections, f"{one.code}: no message has {text!r}"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("env.tasks = a: no such key; did you mean b?"), "PR101"),
        (ConfigError("rollout.rows = 0: it must be at least 1", origin="cartpole"), "PR104"),
        (ConfigError("tracking.0.type = 'wandbb': did you mean wandb? known types are wandb"), "PR104"),
        (ConfigError("training.optimizer.lr: a range has no list of values; add --random N or --optuna N"), "PR110"),
        (ConfigError("env.reward = dense: push has no such reward", origin="cartpole"), "PR111"),
        (ConfigError("env.files = a.jsonl, line 2: it is not JSON; correct or delete it"), "PR118"),
        (ConfigError("cartpole.env.reward = dense: odd"), "PR100"),
        (MissingError("env.type = a: the package b is not installed; run: pip"), "PR201"),
        (MissingError("policy.checkpoint = a: there is no such folder here"), "PR202"),
        (ConfigError("policy.checkpoint = hf://a/b: a/b has no revision c; name one of its branches"), "PR205"),
        (MissingError("anything"), "PR200"),
        (RunFolderError("/runs/a is not a run's folder: it has no config.yaml"), "PR308"),
        (RenderingUnavailable("shared memory: in its words"), "PR401"),
        (StartError("shared memory: 3 MB wanted"), "PR402"),
        (HostLost("host a is lost (silent); the last: b", "a", ()), "PR502"),
        (OrderlyHalt("the run cannot go on: no space is left"), "PR508"),
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


def test_errors_of_the_python_api_have_their_codes_and_a_note() -> None:
    with pytest.raises(PolyrhythmError) as caught:
        polyrhythm.load_recipe("cartpole", "seed=1.5", "groups.sise=2")
    assert sorted(caught.value.codes) == ["PR101", "PR104"]
    (note,) = caught.value.__notes__
    assert "polyrhythm explain PR10" in note
    with pytest.raises(PolyrhythmError) as caught:
        polyrhythm.train("no_such_recipe")
    assert caught.value.codes == ("PR102",)
    with pytest.raises(PolyrhythmError) as caught:
        polyrhythm.resume("/no/such/run")
    assert caught.value.codes == ("PR308",)


def test_findings_of_a_check_have_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["placement.trainer.devices=99", f"init_from={tmp_path / 'none'}"]
    assert main(["train", "cartpole", *wrong, "--check", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)["checks"]
    coded = {one["code"] for one in found if one["state"] in ("failed", "missing")}
    assert coded == {"PR202", "PR203"}
    assert {one["code"] for one in found if one["state"] in ("ok", "note")} == {""}
    main(["train", "cartpole", *wrong, "--check"])
    assert "PR202: init_from = " in capsys.readouterr().out


def test_a_code_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("PR104", "pr104", "104"):
        assert main(["explain", word]) == 0
        told = capsys.readouterr().out
        assert told.startswith("PR104: A value of the wrong kind")
        assert "\nremedy   `polyrhythm settings SECTION.KEY`" in told
    assert main(["explain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(codes())
    assert main(["explain", "PR999"]) == 2
    assert "error: PR110: explain PR999: no such code; " in capsys.readouterr().err
