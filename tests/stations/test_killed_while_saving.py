"""A trainer that is killed while it writes its state leaves the state before it, whole."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.long import long

from polyrhythm.plugins.ranks.sharded import ShardedRanks
from polyrhythm.stations.trainer_states import TrainerStates
from polyrhythm.training.checkpoint import load
from polyrhythm.training.ranks import ONE_RANK, Meeting

#: Large enough to be killed in: writing takes some tenths of a second.
NUMBERS = 2**26
PATIENCE_S = 60.0


def write_two(folder: Path, *, sharded: bool) -> None:
    """In a process of its own: write a small state, say so, and begin to write a large one."""
    ranks = ShardedRanks(0, 1, Meeting(folder / "store"), "cpu", None) if sharded else ONE_RANK
    end = "" if sharded else ".pt"
    ranks.save({"x": torch.ones(4), "updates": 1}, folder / f"trainer-00000001{end}", background=True).wait()
    sys.stdout.write("written\n")
    sys.stdout.flush()
    large = torch.ones(NUMBERS)
    ranks.save({"x": large, "updates": 2}, folder / f"trainer-00000002{end}", background=True).wait()
    time.sleep(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("file", marks=long(2, "in one file")), "folder"])
def test_a_trainer_that_is_killed_while_it_writes_leaves_the_state_before(kind: str, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-m", __name__, str(tmp_path), kind], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        until = time.monotonic() + PATIENCE_S
        while not (begun := list(tmp_path.glob("trainer-00000002*.part"))):
            assert time.monotonic() < until
            assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    (path,) = TrainerStates(str(tmp_path)).paths()
    assert TrainerStates.updates(path) == 1
    assert torch.equal(load(path)["x"], torch.ones(4))
    assert begun[0].exists(), "it was killed meanwhile"


if __name__ == "__main__":
    write_two(Path(sys.argv[1]), sharded=sys.argv[2] == "folder")
    dist.destroy_process_group()
