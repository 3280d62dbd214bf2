"""What is read of the machine's limits on threads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from polyrhythm.runtime.processes.limits import cgroup_threads


@pytest.mark.parametrize(
    ("own", "folder"),
    [
        ("0::/box\n", "box"),
        ("9:name=systemd:/\n8:pids:/box\n0::/elsewhere\n", "pids/box"),
    ],
)
def test_the_threads_that_are_left_are_those_of_the_own_control_group(own: str, folder: str, tmp_path: Path) -> None:
    assert cgroup_threads(own, tmp_path) == math.inf, "no limit that we can see"
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "pids.max").write_text("max\n")
    (tmp_path / folder / "pids.current").write_text("90\n")
    assert cgroup_threads(own, tmp_path) == math.inf
    (tmp_path / folder / "pids.max").write_text("100\n")
    assert cgroup_threads(own, tmp_path) == 10
