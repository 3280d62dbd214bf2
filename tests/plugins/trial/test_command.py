"""`polyrhythm check`: a line for each check, what is wrong with its fix, and the exit status."""

from __future__ import annotations

import json

import pytest
from tests.long import long

from polyrhythm.cli.main import main
from polyrhythm.cli.show import finding_line as line
from polyrhythm.conformance import Finding

WALK = "env={type: 'tests.envs.broken_envs:WalkSettings', defect: '%s'}"
BROKEN = "policy={type: 'tests.pipeline.broken_policies:BrokenSettings', defect: '%s'}"


def test_a_recipe_that_can_be_trained_passes_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["check", "cartpole"]) == 0
    said = capsys.readouterr().out
    parts = [text for text in said.splitlines() if text in {"recipe", "environment", "policy", "training"}]
    assert parts == ["recipe", "environment", "policy", "training"]
    assert "  ✓ end of an episode             terminated after" in said
    assert said.endswith("checks passed, 1 with a note\n"), "CartPole has no success"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "failed"),
    [
        ([WALK % "resets all", BROKEN % "off by 1"], {"rows reset alone", "evaluate agrees with act"}),
        ([WALK % "reset raises", BROKEN % ""], {"observe"}),
        ([WALK % "reset hangs", BROKEN % "", "supervision.reset_s=0.2"], {"calls"}),
        ([WALK % "spec raises", BROKEN % ""], {"environment's spec"}),
        ([WALK % "spec hangs", BROKEN % "", "supervision.start_s=0.2"], {"environment's spec"}),
        ([WALK % "", BROKEN % "build raises"], {"policy's build"}),
        ([WALK % "", BROKEN % "", "placement.trainer.device=cuda:99"], {"devices"}),
        ([WALK % "", BROKEN % "", "algorithm.reward_level=action"], {"objective"}),
    ],
)
def test_what_fails_is_told_with_its_fix(words, failed, capsys):
    assert main(["check", "latency", "launcher=inline", "policy.chunk=1", *words, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["ready"]
    found = {check["name"]: check for check in told["checks"] if check["state"] == "failed"}
    assert failed <= found.keys()
    assert all(check["detail"] and check["fix"] for check in found.values())


def test_the_seats_of_all_stations_are_told(capsys):
    assert main(["check", "cartpole", "rollout.generators=2", "placement.generators.threads=2"]) == 0
    assert "generator-0, generator-1: cpu, 2 threads" in " ".join(capsys.readouterr().out.split())
    assert main(["check", "cartpole", "placement.trainer.threads=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seats"]["trainer"] == {"device": "cpu", "threads": 2}


def test_a_policy_is_not_checked_without_observations(capsys):
    words = ["check", "latency", "launcher=inline", WALK % "reset raises", "policy=gaussian"]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "  ! contract                      not checked: the check needs observations of the environment" in said
    assert said.splitlines()[-1] == "1 of 22 checks failed: environment: observe"


def test_a_wrong_key_is_one_line(capsys):
    assert main(["check", "latency", "rollout.row=3"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_line_wraps_below_itself_and_is_plain_where_it_must_be():
    failed = Finding("act", "failed", "word " * 30, "mend it")
    lines = line(failed).splitlines()
    assert lines[0].startswith("  ✗ act                           word word")
    assert all(text.startswith(" " * 34) for text in lines[1:])
    assert lines[-1].strip() == "fix: mend it"
    assert line(Finding("act", "ok", ""), encoding="ascii") == "  + act"
    assert line(Finding("act", "ok", ""), color=True) == "  \033[32m✓\033[0m act"


def test_each_problem_of_the_placement_is_a_finding_of_its_own(capsys):
    assert main(["check", "cartpole", "launcher=inline", "placement.simulators.devices=99", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    details = [check["detail"] for check in checks if check["name"] == "devices"]
    assert [check["state"] for check in checks if check["name"] == "devices"] == ["failed", "failed"]
    assert details[0].startswith("placement.simulators.devices: with launcher = inline")
    assert details[1].startswith("placement.simulators.devices = 99: torch sees")


def test_threads_beyond_the_cores_are_a_note(capsys):
    assert main(["check", "cartpole", "placement.trainer.threads=4096", "--json"]) == 0
    (note,) = [check for check in json.loads(capsys.readouterr().out)["checks"] if check["name"] == "placement"]
    assert note["state"] == "note"
    assert note["detail"].startswith("placement.trainer.threads = 4096: this machine has ")
    assert main(["check", "cartpole", "placement.trainer.threads=4096", "launcher=inline", "--json"]) == 0
    assert "placement.trainer.threads" not in capsys.readouterr().out


def test_the_objective_is_named_where_it_fits_and_where_it_does_not(capsys):
    cartpole = ["check", "cartpole", "launcher=inline", "--json"]
    assert main([*cartpole, "objective=rlinf_libero", "rollout.segment_steps=0"]) == 0
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["objective"]["detail"].startswith("rlinf_libero: RLinf's PPO on LIBERO")
    assert main([*cartpole, "objective=rlinf_maniskill"]) == 1
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["objective"]["detail"].startswith("objective = rlinf_maniskill: it needs a policy with one value per")
    assert "algorithm.reward_level=chunk" in found["objective"]["fix"]
    assert main([*cartpole, "objective=rlinf_maniskill", "algorithm.reward_level=chunk"]) == 0


@long(9, "checks of two larger recipes")
def test_the_fix_of_an_objective_names_the_policys_own_setting(capsys):
    words = ["check", "quickstart_agent", "objective=verl_ppo", "--json"]
    assert main(words) == 1
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["objective"]["fix"].startswith("set policy.value_head true, ")
    assert main([*words, "policy.value_head=true"]) == 0
    capsys.readouterr()
    assert main(["check", "quickstart_oft", "objective=rlinf_maniskill", "--json"]) == 1
    found = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert found["objective"]["fix"].startswith("set policy.value_level action, ")
