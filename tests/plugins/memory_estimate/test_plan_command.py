"""`polyrhythm plan RECIPE --memory`: tables, machines that are elsewhere, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.long import long

from polyrhythm.cli.main import main

SMALL = ["quickstart_pi0", "policy.train=expert"]


def _json(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    assert main(["plan", "--memory", "--json", *words]) == status
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_every_device_of_another_machine_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    there = ["--devices", "4", "--device-memory", "80", "--host-memory", "500"]
    words = [*SMALL, "placement=disaggregated", "rollout.generators=3", "rollout.simulators=3", *there]
    found = _json(capsys, *words)
    assert found["fits"]
    assert found["remedies"] == []
    assert list(found["devices"]) == ["cpu", "cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert found["devices"]["cuda:3"]["free"] == 80 * 10**9
    assert list(found["devices"]["cuda:3"]["stations"]) == ["trainer"]
    assert list(found["devices"]["cuda:0"]["stations"]) == ["generator-0"]
    generator = found["devices"]["cuda:0"]["stations"]["generator-0"]
    assert {"weights", "keys and values", "pass", "staging"} <= set(generator)
    own = found["devices"]["cuda:3"]
    assert own["total"] == sum(sum(parts.values()) for parts in own["stations"].values()) > own["certain"]

    assert main(["plan", "--memory", *words]) == 0
    said = capsys.readouterr().out
    assert "cuda:3: " in said
    assert "of 80.00 GB free, fits" in said
    assert "micro-batch ~" in said
    assert "not counted: simulators" in said


@long(4, "four plans of pi0")
def test_what_does_not_fit_ends_with_settings_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, *SMALL, "--host-memory", "1")
    gigabytes = 0.9 * found["devices"]["cpu"]["total"] / 1e9
    short = ["--host-memory", f"{gigabytes:.6f}"]
    refused = _json(capsys, *SMALL, *short, status=1)
    assert not refused["fits"]
    settings = refused["remedies"][0]["settings"]
    overrides = [f"{name}={value}" for name, value in settings.items()]
    assert overrides[0].startswith("training.micro_batch_steps=")
    assert _json(capsys, *SMALL, *short, *overrides)["fits"]

    assert main(["plan", *SMALL, "--memory", *short]) == 1
    said = capsys.readouterr().out
    assert "DOES NOT FIT" in said
    assert f"  {overrides[0]}  (cpu " in said


@long(5, "a plan of the released size")
def test_a_missing_checkpoint_stands_for_the_released_size(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quickstart_pi0", "policy.checkpoint=/no", "policy.train=head", "training.versions=0"]
    words += ["--host-memory", "3"]
    assert main(["plan", "--memory", *words]) == 1
    said = capsys.readouterr().out
    assert said.startswith("checkpoint = /no: ")
    assert "planned with the released size of this type" in said
    assert "no setting known here makes it fit" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory"], "plan --memory needs a recipe"),
        (["--memory", "quickstart", "--devices", "2"], "--devices = 2: how large are they? add --device-memory GB"),
        (["--memory", "quickstart", "--devices", "-2"], "--devices = -2: not a number of devices"),
        (["--memory", "quickstart", "--host-memory", "-1"], "--host-memory = -1.0: not an amount of memory"),
        (["--memory", "quickstart", "--device-memory", "nan"], "--device-memory = nan: not an amount of memory"),
        (["--memory", "quickstart", "rollout.row=3"], "rollout.row"),
        (["--memory", "quickstart", "placement=colocated"], "add --devices N --device-memory GB"),
        (["--theory", "somewhere", "rollout.rows=3"], "'rollout.rows=3' is not an option"),
    ],
)
def test_what_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert said in told.err
