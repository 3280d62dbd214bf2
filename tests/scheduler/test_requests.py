import pytest

from polyrhythm.scheduler.inference.requests import ANY, RequestQueue
from polyrhythm.scheduler.records import Request


def request(slot: str, arrived: float, rows: int = 1) -> Request:
    return Request(slot, "sim", 1, rows, 0, "", arrived)


def slots(requests: tuple[Request, ...]) -> list[str]:
    return [r.slot for r in requests]


def test_served_in_order_of_arrival_even_when_pushed_again_later() -> None:
    queue = RequestQueue()
    for slot, arrived in (("b", 2.0), ("c", 3.0), ("a", 1.0)):
        queue.push(request(slot, arrived), ANY)
    assert queue.view((ANY,)) == (3, 3, 1.0)
    assert slots(queue.take((ANY,), 8, 8)) == ["a", "b", "c"]
    assert queue.view((ANY,)) == (0, 0, float("inf"))


def test_equal_keys_keep_the_order_of_pushing() -> None:
    queue = RequestQueue()
    for slot in "xaz":
        queue.push(request(slot, 1.0), ANY)
    assert slots(queue.take((ANY,), 8, 8)) == ["x", "a", "z"]


def test_user_key_decides_the_order_but_not_the_clock() -> None:
    queue = RequestQueue(key=lambda r: -r.rows)
    queue.push(request("old", 1.0, rows=1), ANY)
    queue.push(request("big", 2.0, rows=4), ANY)
    assert queue.view((ANY,))[2] == 1.0
    assert slots(queue.take((ANY,), 4, 8)) == ["big"]
    assert queue.view((ANY,)) == (1, 1, 1.0)


@pytest.mark.parametrize(
    ("max_rows", "max_requests", "taken"),
    [(4, 9, ["a"]), (5, 9, ["a", "b"]), (9, 2, ["a", "b"]), (2, 9, ["a"]), (99, 9, ["a", "b", "c"])],
)
def test_a_batch_ends_before_the_request_that_does_not_fit(max_rows: int, max_requests: int, taken: list[str]) -> None:
    queue = RequestQueue()
    for arrived, (slot, rows) in enumerate((("a", 3), ("b", 2), ("c", 4))):
        queue.push(request(slot, arrived, rows), ANY)
    assert slots(queue.take((ANY,), max_rows, max_requests)) == taken


def test_bound_requests_are_merged_with_common_ones_by_key() -> None:
    queue = RequestQueue()
    queue.push(request("a", 1.0), ANY)
    queue.push(request("b", 2.0), "g0")
    queue.push(request("c", 3.0), ANY)
    queue.push(request("d", 4.0), "g1")
    assert list(queue.bound) == ["g0", "g1"]
    assert slots(queue.take((ANY, "g0"), 9, 9)) == ["a", "b", "c"]
    assert list(queue.bound) == ["g1"]


def test_the_oldest_of_all_pools_in_view_counts() -> None:
    for common, bound in ((1.0, 2.0), (2.0, 1.0)):
        queue = RequestQueue()
        queue.push(request("a", common, rows=2), ANY)
        queue.push(request("b", bound, rows=3), "g0")
        assert queue.view((ANY, "g0")) == (2, 5, 1.0)
        assert queue.view((ANY,)) == (1, 2, common)


def test_requests_bound_to_a_lost_generator_become_anybodys_at_their_old_place() -> None:
    queue = RequestQueue()
    queue.push(request("common", 2.0), ANY)
    queue.push(request("bound", 1.0), "g0")
    queue.move_all("g0", ANY)
    assert slots(queue.take((ANY,), 9, 9)) == ["bound", "common"]


def test_removed_requests_are_neither_counted_nor_served() -> None:
    queue = RequestQueue()
    queue.push(request("a", 1.0, rows=5), ANY)
    queue.push(request("b", 2.0), ANY)
    assert queue.remove("a") is not None
    assert queue.remove("a") is None
    assert queue.view((ANY,)) == (1, 1, 2.0)
    assert slots(queue.take((ANY,), 9, 9)) == ["b"]


@pytest.mark.parametrize("queue", [RequestQueue(), RequestQueue(key=lambda r: r.slot)])
def test_the_heaps_stay_small_whoever_asks_which_of_them(queue: RequestQueue) -> None:
    for number in range(5000):
        queue.push(request("a", float(number)), ANY)
        queue.push(request("b", number + 0.5), ANY)
        assert len(queue.take((ANY,), 9, 9)) == 2
    pool = queue.pools[ANY]
    assert len(pool.by_arrival) < 200
    assert len(pool.by_key) < 200
