"""The campaign on a GPU: what it refuses, how it keeps, cuts off, skips and goes on, and a whole small one."""

from __future__ import annotations

import json
import time

import pytest
import torch
from tests.long import long
from tests.process.runs import children, orphaned_folders

from polyrhythm.cli.main import main
from polyrhythm.errors import ConfigError
from polyrhythm_bench.cases import gpu
from polyrhythm_bench.cases.gpu import Campaign, Figure, Part

SCENE = {"card": "a CPU", "tiny": True, "torch": torch.__version__}


def part(tmp_path, name, code, **given):
    """Of a module that is written there; it adds a letter to a file each time."""
    (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'a').write('x')\n{code}\n")
    file = tmp_path / name
    figures = lambda: [Figure("times", str(len(file.read_text())))] if file.is_file() else []  # noqa: E731
    return Part(name, [name], given.pop("limit_s", 30.0), given.pop("least_s", 0.0), figures, **given)


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def go(*parts, seconds=60.0):
        made = Campaign(tmp_path / "out", SCENE, parts)
        made.go(time.monotonic() + seconds)
        return made.result(), (tmp_path / "out" / gpu.PAGE).read_text()

    return go


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_one_sentence_says_what_to_do(capsys):
    assert main(["bench", "gpu"]) == 2
    said = capsys.readouterr().err
    assert "torch sees no CUDA device here" in said
    assert "--tiny" in said


def test_what_has_ended_is_kept_and_what_failed_is_tried_last(campaign, tmp_path):
    good, bad = part(tmp_path, "good", ""), part(tmp_path, "bad", "raise SystemExit('no memory')")
    result, page = campaign(bad, good)
    assert [(x["part"], x["status"]) for x in result["failed"]] == [("bad", gpu.FAILED)]
    assert "no memory" in result["failed"][0]["said"]
    assert page.index("no memory") < page.index("| good | times | 1 |")
    result, _ = campaign(bad, good)
    assert {x["part"]: x["value"] for x in result["figures"]} == {"bad": "2", "good": "1"}


def test_a_part_that_is_cut_off_keeps_its_figures_and_leaves_no_process(campaign, tmp_path):
    code = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    result, page = campaign(part(tmp_path, "slow", code + "time.sleep(60)", limit_s=2.0))
    assert result["failed"][0]["status"] == gpu.CUT
    assert "| slow | times | 1 |" in page
    assert not children()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"needs": ("no_such_package",)}, "needs the package no_such_package"),
        ({"why_not": "no such folder"}, "no such folder"),
        ({"least_s": 1000.0}, "were left and it takes 1000 or more"),
    ],
)
def test_what_cannot_run_is_named_with_the_reason(campaign, tmp_path, given, why):
    result, page = campaign(part(tmp_path, "one", "", **given))
    assert not (tmp_path / "one").exists()
    assert why in result["not_run"][0]["why"]
    assert f"- one: {result['not_run'][0]['why']}." in page


@pytest.mark.parametrize(("code", "lacks"), [("PR203", True), ("PR401", True), ("PR101", False)])
def test_what_a_machine_lacks_is_a_reason_and_any_other_refusal_a_failure(campaign, tmp_path, code, lacks):
    text = f"import sys; sys.stderr.write('polyrhythm: error: {code}: the device is too small'); sys.exit(2)"
    result, _ = campaign(part(tmp_path, "one", text))
    assert [one["why"] for one in result["not_run"]] == [f"{code}: the device is too small"] * lacks
    assert len(result["failed"]) == (not lacks)


def test_tests_that_have_ended_count_where_the_others_are_cut_off(tmp_path):
    log_file = tmp_path / "tests.txt"
    lines = ("x.py::test_a[one two] PASSED [ 1%]", "x.py::test_b FAILED", "y.py::test_c SKIPPED (no device)")
    log_file.write_text("".join(f"tests/gpu/{line}\n" for line in lines) + "tests/gpu/y.py::test_d")
    figures = {one.name: one.value for one in gpu.test_figures(log_file)}
    assert figures == {"passed, failed, skipped": "1, 1, 1", "failed": "tests/gpu/x.py::test_b"}


def test_the_better_sharing_of_a_device_is_named_for_each_drawing():
    rates = {"full_async-osmesa": 300.0, "full_async_process-osmesa": 330.0, "full_async-egl": 200.0}
    modes = {name: (name.partition("-")[0], rate) for name, rate in rates.items()}
    (one,) = gpu._sharing_figures({**modes, "lockstep-osmesa": ("lockstep", 900.0)})
    assert one.name == "placement.sharing, osmesa"
    assert one.value.startswith("process is the better (process 1.10 times share")
    (one,) = gpu._sharing_figures({**modes, "full_async_mps-egl": ("full_async_mps", 150.0)})[1:]
    assert one.value.startswith("share is the better (mps 0.75 times share")


def test_results_of_another_card_are_refused(campaign, tmp_path):
    one = part(tmp_path, "one", "")
    campaign(one)
    with pytest.raises(ConfigError, match=r"one\.json is of .*name another folder"):
        Campaign(tmp_path / "out", {**SCENE, "card": "NVIDIA H100"}, [one])


@long(16, "two parts of the campaign")
def test_a_dry_run_of_two_parts_has_their_figures(tmp_path, capsys):
    """The cheapest parts; the test below has all."""
    words = ["bench", "gpu", "--tiny", "--minutes", "5", "--only", "pi0,language", "--out", str(tmp_path / "out")]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["failed"] == []
    assert list(dict.fromkeys(x["part"] for x in result["figures"])) == ["pi0", "language"]
    assert any("lending gains" in x["value"] for x in result["figures"])


@long(120, "every part of the campaign")
@pytest.mark.slow
def test_the_whole_campaign_as_small_as_it_can_be(tmp_path, capsys):
    """Every part runs and has figures. Without a device its tests are skipped one by one."""
    assert main(["bench", "gpu", "--tiny", "--minutes", "12", "--out", str(tmp_path / "out"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["failed"] == []
    assert result["not_run"] == []
    names = [part.name for part in gpu.parts(tmp_path, tiny=True)]
    assert list(dict.fromkeys(x["part"] for x in result["figures"])) == names
    assert not children()
    assert not orphaned_folders()
