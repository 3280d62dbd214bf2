"""The small forms of the paper's rows train two updates on their own simulators, as commands.

A simulator is taken from the Python that `polyrhythm envs setup` made for it; `make test-all` makes them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.long import long

from polyrhythm.plugins.simulators.setup import envs_folder

pytestmark = pytest.mark.timeout(600)

#: Recipe -> the extra of its simulator and the overrides without assets that no package has.
ROWS: dict[str, tuple[str, list[str]]] = {
    "metaworld_pi0_tiny": ("metaworld", []),
    "libero_groot_tiny": ("libero", []),
    "libero_oft_tiny": ("libero", []),
    "maniskill_pi05_tiny": ("maniskill", []),
    # RoboCasa's kitchens are not on PyPI: the same in robosuite's Lift, as the recipe's first lines say.
    "robocasa_pi0_tiny": (
        "robosuite",
        ["env.tasks=[Lift]", "env.registered_by=''", "env.robot=Panda", "env.cameras=[agentview,robot0_eye_in_hand]"],
    ),
}


@long(10, "the small forms of the papers' rows")
@pytest.mark.parametrize("name", ROWS)
def test_a_small_row_trains_two_updates_on_its_own_simulator(name: str, tmp_path: Path) -> None:
    extra, overrides = ROWS[name]
    own = envs_folder() / extra / "bin" / "python"
    if own.is_file():
        overrides = [*overrides, f"env.python={own}"]
    elif importlib.util.find_spec(extra) is None:
        pytest.skip(f"{extra} is neither installed here nor set up (polyrhythm envs setup {extra}, or make test-all)")
    folder = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "polyrhythm", "train", name, "--out", str(folder), *overrides],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    updates = [line for line in lines if "train/actor/optimizer_steps" in line]
    assert len(updates) == 2
    for line in updates:  # groups without a success are equal, and give no gradient
        assert line["train/actor/optimizer_steps"] > 0
        assert line["train/actor/grad_norm"] > 0 or line["train/actor/zero_advantage_fraction"] == 1
