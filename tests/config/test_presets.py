"""Named modes: what they stand for, and what they lie over and under."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyrhythm.config.load import load_config, save_config
from polyrhythm.config.presets import PRESETS
from polyrhythm.errors import ConfigError

MODES = {
    "lockstep": (0.0, 1, "drain", "lockstep", False),
    "on_policy_pipeline": (0.0, 1, "drain", "dynamic", True),
    "stream_off_policy": (0.0, 4, "drain", "dynamic", True),
    "stale_stream": (1.0, 1, "drain", "dynamic", True),
    "partial_rollout": (1.0, 1, "continue", "dynamic", True),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_on_the_command_line_lies_over_the_recipe(name: str, tmp_path: Path) -> None:
    config = load_config("cartpole", [f"preset={name}"])
    freshness = config.freshness
    found = (freshness.max_lag, freshness.sync_interval, freshness.on_update, config.batching.type)
    assert (*found, config.training.streaming) == MODES[name]
    save_config(config, tmp_path / "config.yaml")
    assert "preset" not in [line.partition(":")[0] for line in (tmp_path / "config.yaml").read_text().splitlines()]
    assert load_config(tmp_path / "config.yaml").freshness == freshness


def test_streams_stay_where_a_preset_has_passes_that_do_not_wait() -> None:
    assert load_config("quickstart_lm", ["preset=partial_rollout"]).batching.type == "streams"
    assert load_config("quickstart_lm", ["preset=lockstep"]).batching.type == "lockstep"


def test_what_is_said_beside_a_preset_wins() -> None:
    words = ["freshness.max_lag=3", "preset=partial_rollout", "batching.max_rows=128"]
    config = load_config("cartpole", words)
    assert (config.freshness.max_lag, config.freshness.on_update) == (3.0, "continue")
    assert config.batching.max_rows == 128
    words = ["preset=partial_rollout", "preset=lockstep"]
    assert load_config("cartpole", words).batching.type == "lockstep", "the last one counts"


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["preset=lockstep", "freshness.max_lag=3"], ["preset = lockstep, …: freshness.max_lag = 3 (not 0.0)"]),
        (["preset=lockstep", "freshness.max_lag=0", "rollout.rows=8"], []),
        (["preset=stale_stream", "batching.max_rows=32", "training.streaming=true"], []),
        (
            ["preset=lockstep", "batching={type: dynamic}"],
            ["preset = lockstep, …: batching.type = dynamic (not lockstep)"],
        ),
        (
            ["preset=partial_rollout", "freshness={on_update: drain, max_lag: 1}"],
            ["preset = partial_rollout, …: freshness.on_update = drain (not continue)"],
        ),
        (
            ["objective=rlinf_libero", "algorithm.gamma=0.5", "algorithm.loss.clip_low=0.2", "rollout.segment_steps=0"],
            ["objective = rlinf_libero, …: algorithm.gamma = 0.5 (not 0.99)"],
        ),
    ],
)
def test_what_changes_a_preset_is_logged(
    words: list[str], changed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    load_config("cartpole", words)
    assert [line.replace("changed by what is set beside it", "…") for line in caplog.messages] == changed


def test_streams_beside_a_preset_do_not_change_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    load_config("quickstart_lm", ["preset=partial_rollout", "batching={type: streams}"])
    assert caplog.messages == []


def test_a_recipes_preset_lies_over_what_it_extends_and_under_what_it_says(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: cartpole\npreset: stream_off_policy\nfreshness: {max_lag: 0.5}\n")
    freshness = load_config(recipe).freshness
    assert (freshness.max_lag, freshness.sync_interval, freshness.on_update) == (0.5, 4, "drain")
    recipe.write_text("extends: cartpole\npreset: lockstepp\n")
    with pytest.raises(ConfigError, match=r"preset = lockstepp: did you mean lockstep\? presets are lockstep, on_pol"):
        load_config(recipe)
    with pytest.raises(ConfigError, match="preset = 3: presets are"):
        load_config("cartpole", ["preset=3"])
