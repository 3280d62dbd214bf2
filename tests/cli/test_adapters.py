"""What environments and policies there are, in words and for programs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import BaseModel, ConfigDict

import polyrhythm
from polyrhythm.cli.adapters import offered, spec_lines
from polyrhythm.cli.main import main
from polyrhythm.config.catalog import adapter
from polyrhythm.config.registry import known_types
from polyrhythm.errors import ConfigError, pip_install
from polyrhythm.plugins.simulators.metaworld.scene import INSTRUCTIONS
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task
from polyrhythm.specs.plain import from_plain

OWN = "tests.cli.test_adapters:Own"
SHOWN = "tests.cli.test_adapters:Shown"


class Own(BaseModel):
    """A user's environment
    on two lines.

    It needs what nobody has.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)
    needs: ClassVar = ("json", "no_such_simulator")
    type: Literal["own"] = "own"
    speed: float | None = None
    """Metres
    per second."""
    sizes: tuple[int, ...]


class Shown(BaseModel):
    """A user's environment that can be built."""

    type: str = SHOWN
    size: int = 4
    broken: bool = False

    def spec(self) -> EnvSpec:
        if self.broken:
            raise RuntimeError("no licence")
        action = ActionSpec("continuous", 2, low=(-1.0, 0.0), high=(1.0, 0.5))
        return EnvSpec({"joints": ArraySpec((self.size,), "float32")}, action, (Task("lift", "lift it"),), 30)

    def build(self, rows: int) -> None:
        raise AssertionError("nothing is built to tell")


@pytest.mark.parametrize(("command", "kind"), [("envs", "env"), ("policies", "policy")])
def test_all_are_listed_with_what_they_need(
    command: str, kind: Literal["env", "policy"], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[::2]] == list(known_types(kind))
    assert all(line.strip().startswith("needs ") for line in lines[1::2])
    told = dict(zip(known_types(kind), lines[1::2], strict=True))
    assert kind == "env" or ("transformers" in told["pi0"] and "transformers" not in told["gaussian"])
    for name in known_types(kind):
        capsys.readouterr()
        assert main([command, name, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert found["type"] == name
        assert found["summary"].endswith(".")
        assert all(setting["about"] for setting in found["settings"])
        assert main([command, name]) == 0
        shown = capsys.readouterr().out
        assert all(f"  {setting['name']}: {setting['kind']}, " in shown for setting in found["settings"])


def test_metaworld_shows_its_tasks_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "metaworld"]) == 0
    shown = capsys.readouterr().out
    assert "\n  image_size: int, 64\n" in shown
    assert '\n  render: cheap | full, "cheap"\n' in shown
    assert "\n  tasks: list of text, required\n" in shown
    for task, instruction in INSTRUCTIONS.items():
        assert f"  {task} " in shown
        assert instruction in shown


def test_what_is_missing_is_named_with_the_command_that_brings_it() -> None:
    own = adapter("env", OWN)
    assert (own.summary, own.about) == ("A user's environment on two lines.", "It needs what nobody has.")
    assert [need.found for need in own.needs] == [True, False]
    assert own.install == pip_install("no_such_simulator")
    kinds = {setting.name: (setting.kind, setting.required, setting.about) for setting in own.settings}
    assert kinds == {"speed": ("float | null", False, "Metres per second."), "sizes": ("list of int", True, "")}


def test_an_environment_of_ones_own_shows_what_it_offers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", SHOWN]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{SHOWN} A user's environment"), "a space between name and purpose"
    assert "  joints  float32 [4]\n" in shown
    assert "  float32 [2] in -1..1, 0..0.5\n" in shown
    assert "30 env steps" in shown
    assert "  lift: lift it" in shown
    assert main(["envs", SHOWN, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert from_plain(found["spec"]) == Shown().spec()


def test_a_type_in_its_short_form_shows_what_it_offers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "gymnasium:CartPole-v1"]) == 0
    assert "  state  float32 [4]\n" in (shown := capsys.readouterr().out)
    assert "  int64 [1] in 0..1\n" in shown


@pytest.mark.parametrize(
    ("name", "section", "said"),
    [
        ("metaworld", {}, "depend on tasks"),
        (OWN, {"sizes": [1]}, f"are unknown before: {pip_install('no_such_simulator')}"),
        (
            SHOWN,
            {"broken": True},
            r"are unknown: spec\(\) raised RuntimeError: no licence \(.*test_adapters.py, line \d+\)",
        ),
        (SHOWN, {"brokn": True}, r"are unknown: env.brokn = true: no such key; did you mean broken\?.*"),
        ("gymnasium", {}, "are unknown: env = .*"),
        (
            "gymnasium",
            {"id": "Blackjack-v1"},
            "are unknown: env.max_steps = 0: Blackjack-v1 registers no time limit; set max_steps above 0",
        ),
        ("gymnasium", {"id": "CartPole-v99"}, r"are unknown: env.id = CartPole-v99: no such .* with the module .*\)"),
        ("gymnasium", {"id": "nowhere:X-v0"}, "are unknown: env.id = nowhere:X-v0: .* the folder of nowhere.py"),
    ],
)
def test_why_an_environment_cannot_say_what_it_offers(name: str, section: dict[str, object], said: str) -> None:
    found = offered("env", {"type": name, **section}, adapter("env", name))
    first, line = spec_lines(found)
    assert first == ""
    assert re.fullmatch(f"observation and action {said}", line), line
    assert "pydantic" not in line


def test_an_unknown_type_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "metaworl"]) == 2
    told = capsys.readouterr().err
    assert "env.type = metaworl: did you mean metaworld?" in told
    assert told.count("\n") == 1
    with pytest.raises(ConfigError, match="cannot be imported"):
        adapter("policy", "no_such_module:Settings")


def test_listing_environments_imports_neither_torch_nor_a_simulator() -> None:
    program = (
        "import sys\nfrom polyrhythm.cli.main import main\nmain(['envs', 'metaworld'])\n"
        "print(sorted({'torch', 'mujoco', 'metaworld'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={"PYTHONPATH": str(Path(polyrhythm.__file__).parents[1])},
    )
    assert done.stderr == "[]\n"


def test_an_environment_shows_its_traits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "chains"]) == 0
    shown = capsys.readouterr().out
    assert "traits\n  transcribes: its samples can be written as conversations" in shown
    assert "  expert: its batches have a scripted expert, for demonstrations\n" in shown
    assert "resets_ahead" not in shown
    assert main(["envs", "gymnasium:CartPole-v1", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert {"resets_ahead", "discards_rows"} <= one["traits"].keys()
