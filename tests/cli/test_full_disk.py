"""A whole run on a disk without room, or that may open no more files: one clear error, what was there stays valid, and
with room again it goes on.

The disk is a limit of the system on the size of a file, which a process of its own meets at a real write.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.cli.test_damaged_folders import SMALL
from tests.long import long

from polyrhythm.cli.main import main
from polyrhythm.config.load import merge
from polyrhythm.pipeline.persistence.checkpoints import STATES, load_policy, newest_run

LIMITED = """
import resource, sys
from polyrhythm.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.exit(main(sys.argv[2:]))
"""


#: An environment that opens a file in each step and never closes it.
LEAKY = """
import os, resource, sys
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from polyrhythm.cli.main import main

class Leaky(CartPoleEnv):
    def step(self, action):
        try:
            os.open(os.devnull, os.O_RDONLY)
        except OSError:
            pass
        return super().step(action)

gymnasium.register("Leaky-v0", entry_point=Leaky, max_episode_steps=50)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
sys.exit(main(sys.argv[1:]))
"""


def words(recipe: Path, folder: Path, versions: int) -> list[str]:
    return ["train", str(recipe), "--out", str(folder), f"training.versions={versions}", "resume=auto"]


@pytest.mark.parametrize("limit", [4_000, pytest.param(14_000, marks=long(4, "another file that is too large"))])
def test_a_run_that_finds_no_room_says_so_and_goes_on_when_there_is_some(limit: int, tmp_path: Path) -> None:
    recipe, folder = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(yaml.safe_dump(merge(SMALL, {"evaluation": {"episodes": 0, "every": 0}})))
    assert main(words(recipe, folder, 2)) == 0
    before = (folder / "policy.pt").read_bytes()
    assert len(before) > limit / 2
    command = [sys.executable, "-c", LIMITED, str(limit), *words(recipe, folder, 4)]
    full = subprocess.run(command, capture_output=True, text=True, check=False)
    assert full.returncode == 2, full.stderr
    errors = [line for line in full.stderr.splitlines() if line.startswith("polyrhythm: error: ")]
    assert len(errors) == 1
    assert "(File too large)" in errors[0]
    assert "make room" in errors[0]
    assert str(folder) in errors[0]
    assert "Traceback" not in full.stderr
    _, _, version = load_policy(folder)
    assert version >= 2
    assert newest_run(folder / STATES) is not None
    assert main(words(recipe, folder, 4)) == 0
    assert load_policy(folder)[2] == 4
    assert json.loads((folder / "ledger.json").read_text())["trained"] == 16


def test_a_run_that_may_open_no_more_files_is_saved_and_goes_on_when_it_may(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    leaky = ["cartpole", "launcher=inline", "env=gymnasium:Leaky-v0", "training.versions=8", "evaluation.episodes=0"]
    command = [sys.executable, "-c", LEAKY, "train", *leaky, "--out", str(folder)]
    full = subprocess.run(command, capture_output=True, text=True, check=False)
    assert full.returncode == 2, full.stderr
    error, resume = full.stderr.splitlines()[-2:]
    assert "no more files can be opened (Too many open files)" in error
    assert resume == f"to resume: polyrhythm resume {folder}"
    assert "Traceback" not in full.stderr
    saved = newest_run(folder / STATES)
    assert saved is not None
    assert saved.version > 0, "it was saved when it ended"
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("Leaky-v0", "CartPole-v1"))
    assert main(["resume", str(folder)]) == 0
    assert load_policy(folder)[2] == 8
