"""Language: schedules with engines that sleep, and engines that compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyrhythm_bench.cases import language_batches, language_figures, language_scaling, language_schedules
from polyrhythm_bench.workloads.answer_scenes import SCENES, TINY_MODES, TINY_SCENE
from polyrhythm_bench.workloads.roll_figures import FIGURES
from polyrhythm_bench.workloads.scaled_scenes import MODELS

#: Parts by name; `engines` needs the vla extra, and has vLLM where it is installed.
PARTS = (*SCENES, *FIGURES, *(f"scaled_{model}" for model in MODELS), "engines")
#: Parts that run only on request: whole trainings.
ON_REQUEST = ("require_batches",)


def run(parts: Sequence[str], versions: int, repeats: int) -> dict[str, Any]:
    """The parts, each under its name."""
    found = {name: language_schedules.run(SCENES[name], versions, repeats) for name in SCENES if name in parts}
    found |= {name: language_figures.run(FIGURES[name](), versions, repeats) for name in FIGURES if name in parts}
    for model in MODELS:
        if (name := f"scaled_{model}") in parts:
            found[name] = language_scaling.run(model, versions, repeats)
    if "require_batches" in parts:
        found["require_batches"] = language_batches.run(10 * versions, repeats)
    if "engines" in parts:
        from polyrhythm_bench.cases import language_engines

        found["engines"] = language_engines.run(repeats)
    return {"parts": found}


def run_tiny() -> dict[str, Any]:
    """A try of it: one small scene in three modes, once, with two versions. That is too little to judge by."""
    found = language_schedules.run(TINY_SCENE, versions=2, repeats=1, modes=TINY_MODES)
    return {"parts": {"tiny": {name: value for name, value in found.items() if name != "within_limits"}}}
