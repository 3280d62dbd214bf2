"""GPUs through NVIDIA's library: the real one on a machine without a driver, and its numbers by a stand-in."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from polyrhythm.plugins.hardware.gpus import Model, Reading, open_gpus


class StandInError(Exception):
    """In the place of `pynvml.NVMLError`."""


class StandIn(ModuleType):
    """Module `pynvml` of a machine with these GPUs: (UUID, utilisation in percent or None, bytes)."""

    NVMLError = StandInError

    def __init__(self, *gpus: tuple[str, int | None, int]) -> None:
        super().__init__("pynvml")
        self.gpus, self.opened = gpus, 0

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return [own for own, _, _ in self.gpus].index(uuid)

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self.gpus[handle][0]

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if (share := self.gpus[handle][1]) is None:
            raise self.NVMLError("not supported")
        return type("Rates", (), {"gpu": share})

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return type("Memory", (), {"used": self.gpus[handle][2], "total": 80_000_000_000})

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"model of {self.gpus[handle][0]}"


FOUR = (
    ("GPU-aa1", 43, 12_300_000_000),
    ("GPU-ab2", 0, 0),
    ("GPU-b3", 100, 80_000_000_000),
    ("MIG-c", None, 5_000_000_000),
)


@pytest.mark.parametrize(
    ("visible", "shares"),
    [
        (None, [0.43, 0.0, 1.0, None]),
        ("0", [0.43]),
        ("2,0", [1.0, 0.43]),
        ("1, 2", [0.0, 1.0]),
        ("GPU-b", [1.0]),
        ("GPU-aa1,GPU-ab", [0.43, 0.0]),
        ("MIG-c", [None]),
        ("2,9,0", [1.0]),
        ("GPU-a", []),
        ("-1", []),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_indices_are_cudas(monkeypatch: pytest.MonkeyPatch, visible: str | None, shares: list[float | None]) -> None:
    library = StandIn(*FOUR)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    gpus = open_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    found = gpus.read() if gpus else {}
    assert [reading.utilization for reading in found.values()] == shares
    assert list(found) == list(range(len(shares)))
    if gpus:
        gpus.close()
    assert library.opened == 0


def test_memory_is_in_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", StandIn(*FOUR))
    gpus = open_gpus({})
    assert gpus is not None
    assert gpus.read()[0] == Reading(0.43, 12.3)
    assert gpus.read()[3] == Reading(None, 5.0)


def test_the_model_is_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", StandIn(*FOUR))
    gpus = open_gpus({"CUDA_VISIBLE_DEVICES": "2,1"})
    assert gpus is not None
    assert gpus.model() == Model(2, "model of GPU-b3", 80_000_000_000)


def test_without_a_gpu_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", StandIn())
    assert open_gpus({}) is None


def test_without_the_library_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpus() is None


def test_the_real_library_without_a_driver_gives_none() -> None:
    nvml = pytest.importorskip("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        assert open_gpus({}) is None
        return
    try:
        count = nvml.nvmlDeviceGetCount()
    finally:
        nvml.nvmlShutdown()
    gpus = open_gpus({})
    assert (len(gpus.read()) if gpus else 0) == count
