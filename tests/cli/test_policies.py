"""`polyrhythm policies TYPE --recipe R`: the form, and what each station needs, without building anything."""

from __future__ import annotations

import json

import pytest

from polyrhythm.cli.main import main


def test_the_form_and_the_memory_of_each_station_are_told_as_json(capsys):
    assert main(["policies", "gaussian", "--recipe", "reach", "--json", "rollout.generators=2"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    form, memory = one["form"], one["memory"]
    assert one["type"] == "gaussian"
    size = sum(4 * _count(spec["shape"]) for spec in form["published"].values())
    assert form["parameters"] * 4 == size
    assert set(memory) == {"shared", "simulator-0", "generator-0", "generator-1", "trainer"}
    assert memory["trainer"]["optimizer"] == 2 * memory["trainer"]["gradients"] == 2 * form["trainable_bytes"]
    assert memory["generator-1"] == {"weights": form["act_bytes"]}
    assert 0 < memory["simulator-0"]["arena blocks"] <= memory["shared"]["arena"]
    assert memory["shared"]["published weights"] >= 2 * size


def _count(shape):
    count = 1
    for size in shape:
        count *= size
    return count


def test_the_recipes_own_settings_are_taken_and_others_where_it_has_another_policy(capsys):
    assert main(["policies", "categorical", "--recipe", "cartpole", "policy.hidden=8", "policy.layers=1"]) == 0
    said = capsys.readouterr().out
    assert "chunk of 1 actions of 1 entries, one value per chunk" in said
    assert "  actor.linears.0.weight  float32 [8, 4]" in said
    assert "\n  trainer " in said
    assert said.startswith("memory by station"), "the table of tensors is long"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gaussian", "--recipe", "cartpole"], "policy.type = 'gaussian' needs continuous actions"),
        (["--recipe", "cartpole"], "--recipe = cartpole: no policy is named"),
    ],
)
def test_what_cannot_be_told_is_one_sentence(words, said, capsys):
    assert main(["policies", *words]) != 0
    assert said in capsys.readouterr().err
