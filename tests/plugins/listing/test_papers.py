"""Settings that the index of papers names exist, with the values that it names; quotations are short."""

from __future__ import annotations

import re

import pytest

from polyrhythm.cli.main import main
from polyrhythm.config.explain import paths_to
from polyrhythm.config.load import load_config
from polyrhythm.config.registry import settings_class
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.listing.papers import Sentence, sentences

SETTINGS = sorted({setting for one in sentences() for setting in one.settings})
#: Paths of settings, with those of the flow policies.
KNOWN = {*paths_to(None, RunConfig), *(f"policy.{path}" for path in paths_to(None, settings_class("policy", "pi0")))}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_and_its_value_exist(setting: str) -> None:
    path, _, value = setting.partition("=")
    assert path in KNOWN
    if not value or value in ("module:function", "even:N"):
        return
    section, _, key = path.rpartition(".")
    override = f"{section}={{type: {value}}}" if key == "type" else setting
    recipe = "metaworld_pi0" if section == "policy" else "cartpole"
    assert not {"PR101", "PR103", "PR104"} & {*_codes(recipe, override)}


def _codes(recipe: str, override: str) -> tuple[str, ...]:
    """Of what is wrong with it; it may not fit the rest of the recipe."""
    try:
        load_config(recipe, [override])
    except ConfigError as error:
        return error.codes
    return ()


@pytest.mark.parametrize("one", sentences(), ids=lambda one: f"{one.paper[:8]} {one.at}")
def test_an_entry_says_where_what_and_which_setting(one: Sentence) -> None:
    assert one.at
    assert bool(one.says) != bool(one.formula)
    assert len(one.says.split()) <= 15
    assert one.settings or one.also
    assert re.search(r"\d{4}", one.paper), "a year"


def test_a_setting_is_printed_with_its_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "freshness.max_lag"]) == 0
    told = capsys.readouterr().out
    assert "  ROLL Flash (Lu et al. 2025), 4.3: “the maximum allowable gap in policy version numbers”" in told
    assert main(["settings", "algorithm.proximal"]) == 0
    assert "  recompute: RLinf, page on asynchronous PPO (2025), 8: “" in capsys.readouterr().out
    assert main(["settings", "seed"]) == 0
    assert "“" not in capsys.readouterr().out
