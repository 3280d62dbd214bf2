from collections.abc import Sequence

import numpy as np
import pytest

from polyrhythm.scheduler.rollout.rows import EnvBatchShape, shard


def by_half(batch: EnvBatchShape, generators: Sequence[str]) -> list[tuple[int, str | None]]:
    return [(batch.rows // 2, generators[0]), (batch.rows - batch.rows // 2, "any")]


def to_nobody(batch: EnvBatchShape, generators: Sequence[str]) -> list[tuple[int, str | None]]:
    return [(batch.rows, "g9")]


def nonsense(batch: EnvBatchShape, generators: Sequence[str]) -> str:
    return "half"


def too_few(batch: EnvBatchShape, generators: Sequence[str]) -> list[tuple[int, str | None]]:
    return [(batch.rows - 1, None)]


def broken(batch: EnvBatchShape, generators: Sequence[str]) -> list[tuple[int, str | None]]:
    raise KeyError(batch.name)


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("whole", [7]),
        ("rows", [1] * 7),
        ("even:2", [4, 3]),
        ("even:7", [1] * 7),
        ([3, 4], [3, 4]),
        (f"{__name__}:by_half", [3, 4]),
    ],
)
def test_slots_are_consecutive_and_cover_the_batch(strategy: str | list[int], sizes: list[int]) -> None:
    info = shard("b", 7, strategy, ["g0", "g1"])
    assert [slot.rows for slot in info.slots] == sizes
    assert [slot.first for slot in info.slots] == [sum(sizes[:index]) for index in range(len(sizes))]
    assert [slot.slot for slot in info.slots] == [f"b/{index}" for index in range(len(sizes))]


def test_a_strategy_may_bind_slots_to_generators() -> None:
    assert [slot.generator for slot in shard("b", 4, f"{__name__}:by_half", ["g0"]).slots] == ["g0", None]


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        ("evn:2", "'evn:2' is unknown; use whole"),
        ("even:9", "from 1 to the 7 rows"),
        ("even:x", "from 1 to the 7 rows"),
        ([3, 3], "6 rows together, the env batch has 7"),
        ([7, 0], "a slot has 0 rows"),
        ("no.such:function", "cannot be loaded"),
        (f"{__name__}:nonsense", "returned 'half'"),
        (f"{__name__}:too_few", "6 rows together, the env batch has 7"),
        (f"{__name__}:broken", "raised KeyError: 'b'; fix it there"),
    ],
)
def test_wrong_strategies_say_what_is_wrong(strategy: str | list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        shard("b", 7, strategy, ["g0"])


def test_unknown_generator_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no generator 'g9'; there are g0, g1"):
        shard("b", 7, f"{__name__}:to_nobody", ["g0", "g1"])


def of_another_library(batch: EnvBatchShape, generators: Sequence[str]) -> list[tuple[object, str]]:
    return [(np.int64(3), "any"), (np.int32(5), generators[0])]


def test_sizes_of_another_librarys_integers_are_sizes() -> None:
    info = shard("e.0", 8, "tests.scheduler.test_sharding:of_another_library", ["g"])
    assert [(slot.rows, type(slot.rows), slot.generator) for slot in info.slots] == [(3, int, None), (5, int, "g")]
