"""Observations of requests on a simulated device, between two ends in one process and after the death of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from polyrhythm.runtime.memory.observed import DeviceSeat, ObservedBlock, ObservedReader
from polyrhythm.specs import ArraySpec

ARRAYS = {"image": ArraySpec((2, 3), "uint8"), "flag": ArraySpec((), "bool"), "x": ArraySpec((5,), "float32")}


def seat(folder: Path, name: str = "sim:0") -> DeviceSeat:
    return DeviceSeat(folder, name, "cpu")


def seen(rows: int, first: int = 0) -> dict[str, torch.Tensor]:
    """Observations that tell the rows apart."""
    number = torch.arange(first, first + rows)
    image = number[:, None, None].expand(rows, 2, 3).to(torch.uint8)
    return {"image": image, "flag": number % 2 == 0, "x": number[:, None].expand(rows, 5).float()}


def found(reader: ObservedReader, number: int, rows: int) -> list[int] | None:
    """The rows that the reader sees."""
    arrays = reader.find("s/0", number, rows)
    if arrays is None:
        return None
    assert all(torch.equal(arrays["image"][:, 1, 2].float(), arrays["x"][:, column]) for column in range(5))
    assert torch.equal(arrays["flag"], arrays["x"][:, 0] % 2 == 0)
    return [int(row) for row in arrays["x"][:, 0]]


def test_a_reader_sees_the_rows_of_the_request_that_is_open(tmp_path: Path) -> None:
    reader = ObservedReader(seat(tmp_path))
    assert found(reader, 0, 2) is None, "nobody has begun"
    block = ObservedBlock(seat(tmp_path), "s/0", 4, ARRAYS)
    block.record(np.arange(4), seen(4, 10))
    block.post(0, np.array([1, 3]))
    assert found(reader, 0, 2) == [11, 13]
    block.record(np.array([0, 3]), seen(2, 20))
    assert found(reader, 0, 2) == [11, 13], "a row that begins beside an open request changes nothing of it"
    assert found(reader, 1, 2) is None, "not posted yet"
    block.post(1, np.arange(4))
    assert found(reader, 1, 4) == [20, 11, 12, 21]
    assert found(reader, 0, 2) is None, "an abandoned request"
    assert reader.rows == 8
    block.close()
    assert found(reader, 1, 4) is None
    assert not list(tmp_path.rglob("device-*")), "the device's memory is freed"


def test_rows_observed_before_the_simulator_left_are_read_on_the_host(tmp_path: Path) -> None:
    reader, block = ObservedReader(seat(tmp_path)), ObservedBlock(seat(tmp_path), "s/0", 3, ARRAYS)
    block.record(np.arange(3), seen(3))
    block.close()
    block = ObservedBlock(seat(tmp_path), "s/0", 3, ARRAYS)
    block.record(np.array([1]), seen(1, 5))
    block.post(4, np.array([0, 1]))
    assert found(reader, 4, 2) is None
    block.post(5, np.array([1]))
    assert found(reader, 5, 1) == [5]
    block.close()


@pytest.mark.parametrize("other", ["sim:1", "cuda:0"])
def test_a_generator_on_another_device_reads_on_the_host(other: str, tmp_path: Path) -> None:
    block = ObservedBlock(seat(tmp_path), "s/0", 1, ARRAYS)
    block.record(np.array([0]), seen(1))
    block.post(0, np.array([0]))
    assert found(ObservedReader(seat(tmp_path, other)), 0, 1) is None
    assert found(ObservedReader(seat(tmp_path)), 0, 1) == [0]
    block.close()


def test_a_block_that_was_refused_is_replaced_by_one_that_is_read(tmp_path: Path) -> None:
    reader = ObservedReader(seat(tmp_path))
    for device, expected in (("sim:1", None), ("sim:0", [3]), ("sim:2", None), ("sim:0", [3])):
        block = ObservedBlock(seat(tmp_path, device), "s/0", 1, ARRAYS)
        block.record(np.array([0]), seen(1, 3))
        block.post(0, np.array([0]))
        assert [found(reader, 0, 1) for _ in range(2)] == [expected] * 2
        block.close()


WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from polyrhythm.runtime.memory.observed import ObservedBlock
from tests.runtime.test_observed import ARRAYS, seat, seen
block = ObservedBlock(seat(Path(sys.argv[1])), "s/0", 2, ARRAYS)
block.record(np.arange(2), seen(2, 30))
block.post(7, np.arange(2))
print("posted", flush=True)
time.sleep(300)
"""


def test_memory_of_a_dead_simulator_is_not_read(tmp_path: Path) -> None:
    reader = ObservedReader(seat(tmp_path))
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "posted\n"
            assert found(reader, 7, 2) == [30, 31], "in another process"
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert found(reader, 7, 2) is None
    block = ObservedBlock(seat(tmp_path), "s/0", 2, ARRAYS)
    assert found(reader, 7, 2) is None, "its successor has posted nothing"
    block.record(np.arange(2), seen(2, 40))
    block.post(7, np.arange(2))
    assert found(reader, 7, 2) == [40, 41]
    block.close()
