"""The list of checks: which rows run at a depth, in which order, and what a failure leaves out."""

from __future__ import annotations

import pytest
from tests.pipeline.runs import config

from polyrhythm import checks
from polyrhythm.checks import Check, CheckContext, Examined, examine_all, require_added, with_added
from polyrhythm.conformance import Finding
from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.pipeline.validation.check import CHECKS, validate_run
from polyrhythm.plugin import PluginError, load_all


def names(depth: checks.Cost) -> list[str]:
    return [check.name for check in with_added(CHECKS, depth)]


def test_deeper_rows_take_the_place_of_cheaper_ones() -> None:
    assert names("settings") == [
        "launcher",
        "trackers",
        "devices",
        "room on the cluster",
        "ranks",
        "placement",
        "notes",
    ]
    machine, trial, contract = map(names, ("machine", "trial", "contract"))
    assert "policy" in machine
    assert "policy's build" not in machine
    assert "policy" not in trial
    assert "policy's contract" not in trial
    assert "policy's trial" not in contract
    assert len({*trial}) == len(trial), "each name once"
    assert len({*contract}) == len(contract)
    assert len({*machine}) == len(machine)


def test_rows_of_plugins_stand_behind_those_that_they_name() -> None:
    for depth in ("machine", "trial", "contract"):
        found, core = with_added(CHECKS, depth), [check.name for check in CHECKS]
        for place, check in enumerate(found):
            if check.after in core:
                before = {one.name for one in found[:place] if one in CHECKS}
                assert before <= {*core[: core.index(check.after) + 1]}, check.name


def test_a_plugins_row_names_a_row_of_the_core_or_a_place_that_is_known() -> None:
    places = {"", "spec", "environment's trial", "custom objective", "episode", "policies", "doctor"}
    known = {check.name for check in CHECKS} | places | {"trackers"}
    assert {one.after for own in load_all("check") for one in own} <= known


def own_rows(monkeypatch: pytest.MonkeyPatch, *rows: Check) -> None:
    theirs = load_all("check")
    monkeypatch.setattr(checks, "load_all", lambda _: [*theirs, rows])


def test_a_row_follows_a_plugins_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own = [Check(f"after {name}", "recipe", "settings", refuse, after=name) for name in ("placement", "policy")]
    own_rows(monkeypatch, *own)
    assert names("contract").index("after placement") > names("contract").index("placement")
    for depth in ("settings", "machine", "trial", "contract"):
        found = names(depth)
        assert [found.count(one.name) for one in own] == [1, 1], depth


@pytest.mark.parametrize("after", ["no such row", "rendering", "own"])
def test_a_row_that_would_never_run_is_an_error(monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    own_rows(monkeypatch, Check("own", "recipe", "settings", refuse, after=after))
    with pytest.raises(PluginError, match=f"^check own: after = {after}: there is no such row; name one of devices, "):
        names("settings")


def test_before_a_run_with_a_checkpoint_each_row_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class WithCheckpoint(type(config().policy)):  # type: ignore[misc]
        checkpoint: str = "somewhere"

    runs: list[str] = []

    def count(_: CheckContext) -> None:
        runs.append("form")

    own_rows(monkeypatch, Check("counted", "recipe", "trial", count, needs=("form",), after="policy's form"))
    validate_run(config().model_copy(update={"policy": WithCheckpoint()}))
    assert runs == ["form"]


def refuse(_: CheckContext) -> str:
    raise ConfigError("a = 1: is wrong; set 2", "b = 1: is wrong; set 3")


def lack(_: CheckContext) -> str:
    raise MissingError("c = /no: there is no such folder; copy it")


@pytest.mark.parametrize(("depth", "state"), [("machine", "missing"), ("trial", "failed")])
def test_a_failure_stops_those_alone_that_need_its_result(depth: checks.Cost, state: str) -> None:
    rows = (
        Check("first", "recipe", "settings", refuse),
        Check("second", "recipe", "settings", lack),
        Check("third", "recipe", "settings", lambda _: "", needs=("spec",)),
        Check("fourth", "recipe", "settings", lambda _: [Examined("policy", Finding("own", "note", "odd", "look"))]),
        Check("fifth", "recipe", "settings", lambda _: ()),
        Check("sixth", "recipe", "settings", lambda _: "all of it"),
    )
    found = [(part, *finding[:4]) for part, finding in examine_all(rows, CheckContext(config(), depth))]
    assert found == [
        ("recipe", "first", "failed", "a = 1: is wrong", "set 2"),
        ("recipe", "first", "failed", "b = 1: is wrong", "set 3"),
        ("recipe", "second", state, "c = /no: there is no such folder", "copy it"),
        ("policy", "own", "note", "odd", "look"),
        ("recipe", "sixth", "ok", "all of it", ""),
    ]


def test_a_run_that_starts_is_stopped_by_a_plugins_row_and_warned_by_its_notes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = (
        Check("odd", "recipe", "settings", lambda _: Finding("odd", "note", "it is odd", "look"), after="devices"),
        Check("wrong", "recipe", "settings", refuse, after="devices"),
    )
    monkeypatch.setattr(checks, "load_all", lambda _: [rows])
    with pytest.raises(ConfigError, match="a = 1"):
        require_added(CheckContext(config()), "devices")
    assert caplog.messages == ["it is odd; look"]
