"""What an environment may say of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task
from polyrhythm.specs.plain import as_plain, from_plain


def spec(**changes: Any) -> EnvSpec:
    said: dict[str, Any] = {
        "observation": {"x": ArraySpec((3,), "float32")},
        "action": ActionSpec("continuous", 1, (-1.0,), (1.0,)),
        "tasks": (Task("a", "do a"),),
        "max_steps": 1,
    }
    return EnvSpec(**{**said, **changes})


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: ArraySpec((0,), "float32"), r"integers above 0, got \(0,\)"),
        (lambda: ArraySpec((1.5,), "float32"), r"integers above 0"),  # type: ignore[arg-type]
        (lambda: ArraySpec((3,), "float23"), "'float23'"),
        (lambda: ArraySpec((3,), "object"), "'object'"),
        (lambda: ActionSpec("continuous", 2, (-1.0,), (1.0,)), "as many bounds, got 1 and 1"),
        (lambda: ActionSpec("continuous", 1, (1.0,), (1.0,)), "low is below its high"),
        (lambda: ActionSpec("continuous", 1, (float("nan"),), (1.0,)), "low is below its high"),
        (lambda: ActionSpec("continuous", 0), "dim = 0"),
        (lambda: ActionSpec("discrete", 1, choices=1), "2 or more choices"),
        (lambda: ActionSpec("discrete", 1, (0.0,), (1.0,), choices=2), "no bounds"),
        (lambda: ActionSpec("discrete", 2, counts=(3,)), r"2 counts, .* got \(3,\) and 3"),
        (lambda: ActionSpec("discrete", 2, counts=(3, 0)), r"got \(3, 0\) and 3"),
        (lambda: ActionSpec("discrete", 2, choices=4, counts=(3, 2)), r"got \(3, 2\) and 4"),
        (lambda: ActionSpec("discrete", 2, counts=(1, 1)), "2 or more choices"),
        (lambda: ActionSpec("box", 1), "kind = 'box'"),  # type: ignore[arg-type]
        (
            lambda: spec(observation={"progress": ArraySpec((), "float32")}),
            "no observation may be named instruction or progress",
        ),
        (lambda: spec(tasks=()), "one task or more"),
        (lambda: spec(tasks=(Task("a", "x"), Task("a", "y"))), r"got \['a', 'a'\]"),
        (lambda: spec(metrics={"a/b": "last"}), "letters, digits and _.-, letter first, 64 at most; got 'a/b'"),
        (lambda: spec(metrics={"x": "median"}), "metric x is last, sum, mean, max of its steps; got 'median'"),
        (lambda: spec(metrics={f"x{i}": "last" for i in range(33)}), "at most 32 metrics, got 33"),
        (lambda: spec(max_steps=0), "max_steps is 1 or more, got 0"),
        (lambda: spec(initial_states=-1), "initial_states is 0 or more, got -1"),
        (lambda: spec(initial_states=1, training_states=-1), "training_states is 0 or more, .* got -1"),
        (lambda: spec(training_states=2), "and 0 without initial_states; got 2"),
    ],
)
def test_what_cannot_be_is_refused_with_its_value(make: Callable[[], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


def test_a_spec_comes_back_from_plain_data_with_its_metrics() -> None:
    said = spec(metrics={"energy": "sum"}, step_rows=False, reports_success=False, initial_states=50)
    said = replace(said, training_states=9, data="digest")
    assert from_plain(as_plain(said)) == said
    added = ("metrics", "reports_success", "initial_states", "training_states", "data")
    old = {key: value for key, value in as_plain(said).items() if key not in added}
    assert from_plain({**old, "splits": True}) == spec(step_rows=False)


def test_an_action_comes_back_from_plain_data_with_its_counts() -> None:
    said = spec(action=ActionSpec("discrete", 3, counts=(10, 5, 2)))
    assert from_plain(as_plain(said)) == said
    content = as_plain(spec(action=ActionSpec("discrete", 2, choices=4)))
    del content["action"]["counts"]  # as old files have it
    assert from_plain(content).action.counts == (4, 4)
