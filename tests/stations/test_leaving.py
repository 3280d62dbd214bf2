"""Generators and trainers leave the device that they lease and come back with the same bits; on the CPU their memory is
really free meanwhile (proportional set size of a process of its own)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MB = 10**6


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    command = [sys.executable, "-m", "tests.stations.leaving", str(tmp_path_factory.mktemp("offload"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("station", "size"), [("generator", 32 * MB), ("trainer", 96 * MB)])
def test_the_memory_of_a_station_off_the_host_is_free_and_it_goes_on_with_the_same_bits(
    measured: dict[str, dict[str, int]], station: str, size: int
) -> None:
    found = measured[station]
    assert found["same"] is True
    assert 0.98 * size < found["freed"] < 1.1 * size
    assert found["less"] > 0.9 * size
