"""The checks of an environment: all of ours pass, each defect gives its sentence."""

from __future__ import annotations

import importlib
import re
import traceback
from typing import ClassVar

import numpy as np
import pytest
from pydantic import BaseModel
from tests.envs.broken_envs import WalkSettings

from polyrhythm.config.registry import known_types, settings_class
from polyrhythm.conformance import ContractViolation, own_place, run_checks, violation_of
from polyrhythm.envs.base import EnvTraits, batch_traits, traits_of
from polyrhythm.envs.gymnasium_env import GymnasiumSettings
from polyrhythm.envs.latency import LatencySettings
from polyrhythm.plugins.simulators.maniskill.env import ManiSkillSettings
from polyrhythm.plugins.simulators.metaworld.env import MetaWorldSettings
from polyrhythm.plugins.trial.checked_env import CheckedEnv
from polyrhythm.plugins.trial.env_contract import check_contract, observe_reset, trial_seed
from polyrhythm.stations.simulator.guard import EnvFault, GuardedEnv

OURS = {
    "gymnasium discrete": GymnasiumSettings(id="CartPole-v1", max_steps=20),
    "gymnasium box": GymnasiumSettings(id="Pendulum-v1", max_steps=20),
    "latency": LatencySettings(episode_steps=5, step_time="constant:0ms"),
    "metaworld": MetaWorldSettings(tasks=("door-close-v3", "reach-v3"), image_size=32, max_steps=12),
    "metaworld state": MetaWorldSettings(tasks=("reach-v3",), observation="state", max_steps=12),
    "maniskill": ManiSkillSettings(tasks=("PushCube-v1",), observation="rgb", image_size=32, max_steps=12),
    "maniskill state": ManiSkillSettings(tasks=("PickCube-v1",), reward="normalized_dense"),
    "walk": WalkSettings(),
    "walk on a device": WalkSettings(defect="on device"),
    "walk from fixed states": WalkSettings(defect="fixed states"),
}
HERE = r"\(.*broken_envs.py, line \d+\)"

#: Defect -> the check that finds it, what it says, what to do.
DEFECTS = {
    "spec raises": ("build", rf"spec raised KeyError: 'spec' {HERE}", "fix it there"),
    "build raises": ("build", rf"build raised OSError: no licence {HERE}", "fix it there"),
    "build imports": (
        "build",
        rf"build raised ModuleNotFoundError: No module named 'no_such_simulator' {HERE}",
        "install the missing package, or correct the import",
    ),
    "no batch": (
        "build",
        r"build\(2\) returned a str without spec, rows, reset, step, observe, close",
        "return an EnvBatch",
    ),
    "rows": ("build", r"build\(2\) returned rows = 1", "it must have 2 rows"),
    "other spec": ("build", r"the spec of build\(2\) has max_steps = 4, that of the settings 5", "return the same"),
    "reset raises": ("observe", rf"reset raised RuntimeError: no such state {HERE}", "fix it there"),
    "step raises": ("step", rf"step raised IndexError: .* {HERE}", "fix it there"),
    "clipless": ("step", rf"step raised AssertionError: a motor broke.* {HERE}", "fix it there"),
    "rebinds": ("observe", rf"observe raised TypeError: .* {HERE}", "`out` is read-only: write into it, out"),
    "unwritten": (
        "observe",
        r"observe leaves entries of out\['x'\] unwritten",
        r"write all of them: out\['x'\]\[i\] = …",
    ),
    "nan": ("observe", r"observe wrote NaN or infinity to 'x'", "check what the simulator returns"),
    "shape": ("observe", rf"observe raised ValueError: could not broadcast .* {HERE}", "fix it there"),
    "history": ("same seed, same state", r"the same task and seed gave another 'x' in another row", "draw the initial"),
    "row's own": (
        "same seed, same state",
        r"the same task and seed gave another 'x' in another row",
        "draw the initial",
    ),
    "wrong rows": (
        "rows in the order asked",
        r"observe writes 'x' of the wrong rows",
        r"write row rows\[i\] to out\[name\]\[i\]",
    ),
    "resets all": (
        "rows reset alone",
        r"reset\(\[0\]\) changes 'x' of row 1",
        "reset only these rows, or set reset_rows",
    ),
    "steps all": ("rows step alone", r"step\(\[0\]\) changes 'x' of row 1", "step only these rows, or set step_rows"),
    "autoreset": (
        "end of an episode",
        r"after its end \(step 4\) a row shows its first observation",
        "switch autoreset",
    ),
    "ended moves": (
        "end of an episode",
        "a row that ended changes 'x' while another row begins and steps",
        "leave a row that ended unchanged until it is reset",
    ),
    "ended stays": ("end of an episode", "after an episode the same seed gave another 'x'", "restore all state"),
    "nan reward": ("step", r"step returned a reward of NaN or infinity", "check what the simulator returns"),
    "tuple": ("step", r"step returned a tuple", r"return StepResult\(reward, terminated, truncated, success\)"),
    "success": ("step", r"step returned success as ndarray of shape \[2\] and float32", r"return .* \[2\] and bool"),
    "scalar": ("step", r"step returned truncated as bool.* of shape \[\] and bool", r"return an array of shape \[2\]"),
    "second task": ("tasks", rf"task 'b': reset raised KeyError: 'b' {HERE}", "fix it there"),
    "no expert": ("traits", "the trait expert is declared, but Walk has no expert_actions", "add it, or leave"),
    "no variants": ("traits", "the trait variants is declared, but WalkSettings has no variants", "add it, or leave"),
    "resets beside": ("traits", "row 0 shows another 'x' while a thread resets row 1", "leave the trait resets_ahead"),
    "other on device": ("traits", "observe_on_device gives another 'x' than observe", "return the same, as tensors"),
    "forgets": ("traits", "a row shows another 'x' after suspend and resume", "bring the state back unchanged"),
    "close raises": ("close", rf"close raised OSError: no such window {HERE}", "fix it there"),
}
NOTES = {
    "one state": ("same seed, same state", "another seed gave the same state"),
    "noise": ("observe", "'x' differs when it is observed again"),
}


def quietly(call):
    """Nobody waits."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.sim] * n.startswith("metaworld")) for n in OURS])
def test_our_environments_pass_without_a_note(name, request):
    if name.startswith("metaworld"):
        request.getfixturevalue("simulator")
    if name.startswith("maniskill"):
        request.getfixturevalue("maniskill")
    findings = list(check_contract(OURS[name], 3, quietly))
    odd = [finding.name for finding in findings if finding.state != "ok"]
    assert odd == ["success"] * name.startswith("gymnasium"), "neither of them has success"
    assert len(findings) == 12


@pytest.mark.parametrize("defect", DEFECTS)
def test_each_defect_is_found_by_its_check(defect):
    name, problem, fix = DEFECTS[defect]
    failed = {f.name: f for f in check_contract(WalkSettings(defect=defect), 2, quietly) if f.state == "failed"}
    assert name in failed
    assert re.match(problem, failed[name].detail), failed[name]
    assert re.match(fix, failed[name].fix), failed[name]


@pytest.mark.parametrize("defect", ["reset raises", "step raises", "clipless", "unwritten"])
def test_one_fault_is_reported_once(defect):
    found = list(check_contract(WalkSettings(defect=defect), 2, lambda call: None))
    failed = [finding for finding in found if finding.state == "failed"]
    assert [finding.name for finding in failed] == [DEFECTS[defect][0]]
    others = {finding.detail for finding in found if finding.state == "note"}
    assert others == {f"fails as '{failed[0].name}' does"}


def test_other_faults_of_one_line_are_reported():
    said = iter(["too far by 1.5", "too far by 2.5", "broke"])

    def fail():
        raise ContractViolation(next(said), "mend it")

    found = list(run_checks(dict.fromkeys(("a", "b", "c"), fail)))
    assert [(one.state, one.detail) for one in found] == [
        ("failed", "too far by 1.5"),
        ("note", "fails as 'a' does"),
        ("failed", "broke"),
    ]


@pytest.mark.parametrize("defect", NOTES)
def test_what_is_only_odd_is_a_note(defect):
    name, said = NOTES[defect]
    assert (
        said
        in {f.name: f.detail for f in check_contract(WalkSettings(defect=defect), 2, quietly) if f.state == "note"}[
            name
        ]
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_reward_that_is_not_finite_is_located(bad):
    env = CheckedEnv(WalkSettings(), 2, quietly)
    env.reset([0, 1], [0, 0], [1, 2])
    action = np.zeros((1, env.spec.action.dim), env.spec.action.dtype)
    env.step([1], action)
    step = env.inner.step
    env.inner.step = lambda rows, actions: step(rows, actions)._replace(reward=np.full(1, bad, np.float32))
    with pytest.raises(ContractViolation, match=rf"infinity: {bad} at step 2 of row 1, for the action \[0"):
        env.step([1], action)


def test_each_call_is_announced_before_it_begins():
    calls = []
    spec, rows = observe_reset(WalkSettings(), 4, calls.append)
    assert spec == WalkSettings().spec()
    assert calls == ["spec", "build", "reset", "observe", "observe", "close"]
    assert rows["x"].tolist() == BEGUN


#: Where the walk begins with the seeds of the trial.
BEGUN = [[float(trial_seed(number) % 97)] for number in (1, 2)]


class FixedRows(WalkSettings):
    """Only batches of one size can be built."""

    rows: int

    def build(self, rows):
        if rows != self.rows:
            raise ValueError(f"rows = {rows}: {self.rows} are wanted")
        return super().build(rows)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_two_rows_are_seen_whatever_the_number_of_rows(rows):
    seen = observe_reset(FixedRows(rows=rows), rows, quietly)[1]
    assert seen["x"].tolist() == BEGUN
    assert [f.state for f in check_contract(FixedRows(rows=rows), rows, quietly)] == ["ok"] * (12 if rows > 1 else 9)


def test_a_batch_that_cannot_be_built_says_why():
    with pytest.raises(ContractViolation, match=r"ValueError: rows = 6: 5 are wanted \(.*, line \d+\); fix it there"):
        observe_reset(FixedRows(rows=5), 6, quietly)


def test_observations_keep_their_dtypes():
    seen = observe_reset(GymnasiumSettings(id="CartPole-v1"), 2, quietly)[1]
    assert {name: (array.dtype, array.shape) for name, array in seen.items()} == {"state": (np.float32, (2, 4))}


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A function of an installed package, with which another one's is called."""
    site = tmp_path / "lib" / "site-packages"
    texts = {
        "contacts/__init__.py": "def solve():\n    assert False, 'no such body'\n",
        "pushing.py": "import contacts\n\n\ndef step(*_):\n    contacts.solve()\n",
        "py_contacts-7.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: py-contacts\nVersion: 7.0\n",
        "py_contacts-7.0.dist-info/top_level.txt": "contacts\n",
    }
    for name, text in texts.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    monkeypatch.syspath_prepend(str(site))
    return importlib.import_module("pushing").step


def test_the_line_is_the_users_where_compiled_code_raises():
    def drawing():
        np.random.default_rng(0).uniform(0.0, np.inf)

    with pytest.raises(OverflowError) as caught:
        drawing()
    assert any(frame.filename.endswith(".pyx") for frame in traceback.extract_tb(caught.value.__traceback__))
    assert own_place(caught.value).startswith(f" ({__file__}, line ")


def test_an_error_within_installed_packages_is_theirs(library):
    def own():
        library()

    theirs = "this error is of py-contacts 7.0, called by pushing, not of your code: try another version of it, or "
    for call, fix in ((library, f"{theirs}other settings"), (own, "fix it there")):
        with pytest.raises(AssertionError) as caught:
            call()
        violation = violation_of("step", caught.value)
        assert violation.problem.startswith("step raised AssertionError: no such body (")
        assert violation.fix == fix
    batch = OURS["gymnasium discrete"].build(1)
    batch.step = library
    with pytest.raises(EnvFault, match="step: AssertionError: no such body") as fault:
        GuardedEnv(batch).step([0], np.zeros((1, 1), np.int64))
    assert fault.value.place == " (in py-contacts 7.0, called by pushing)"


class Undeclared(BaseModel):
    """Settings of a user who declares nothing but has methods, and the class variable of earlier versions."""

    resets_beside: ClassVar[bool] = True

    def variants(self):
        return {}


def test_traits_that_are_not_declared_follow_from_methods():
    assert traits_of(Undeclared()) == traits_of(Undeclared) == EnvTraits(resets_ahead=True, variants=True)
    assert batch_traits(Discards()) == EnvTraits(discards_rows=True)
    assert traits_of(object()) == batch_traits(object()) == EnvTraits()


class Discards:
    def discard(self, row):
        """Nothing is kept."""


@pytest.mark.parametrize("kind", known_types("env"))
def test_every_type_declares_its_traits(kind):
    model = settings_class("env", kind)
    assert traits_of(model) == getattr(model, "traits", EnvTraits())
