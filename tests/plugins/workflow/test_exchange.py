"""Channels, without processes: what is given to whom, in which order, when one waits, and when that ends."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.plugins.workflow.exchange import SEND_AHEAD, TRACED, Answers, Entry, Exchange
from polyrhythm.plugins.workflow.protocol import Close, Denied, Done, Get, Given, Parcel, Put


def item(number: int) -> Parcel:
    return Parcel(1, str(number).encode())


def put(number: int, **more: Any) -> Put:
    return Put("c", item(number), **{"timeout_s": 9.0, **more})


def get(items: int | None = 1, **more: Any) -> Get:
    return Get("c", items=items, **{"timeout_s": 9.0, **more})


def numbers(given: Given) -> list[int]:
    return [int(parcel.content) for parcel, _, _ in given.items]


class Bench:
    """An exchange with one channel, whose requests are numbered; answers by number."""

    def __init__(self, capacity: int = 4, **more: Any) -> None:
        self.exchange, self.now, self.asked = Exchange(), 0.0, 0
        self.exchange.open("c", capacity, **more)
        self.answers: dict[int, Any] = {}

    def ask(self, request: Any, who: str = "a") -> Any:
        """The answer, or None if it has to wait."""
        number, self.asked = self.asked, self.asked + 1
        self.hear(self.exchange.ask((who, number), request, self.now))
        return self.answers.get(number)

    def hear(self, answers: Answers) -> None:
        for (_, number), answer in answers:
            assert number not in self.answers, "a request is answered once"
            self.answers[number] = answer

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.hear(self.exchange.expire(self.now))


def test_items_come_out_in_the_order_in_which_they_went_in() -> None:
    bench = Bench()
    assert [bench.ask(put(number)) for number in range(3)] == [Done()] * 3
    assert [numbers(bench.ask(get())) for _ in range(3)] == [[0], [1], [2]]
    assert bench.exchange.sizes() == {"c": 0}


def test_a_full_channel_makes_producers_wait_in_their_order() -> None:
    bench = Bench(capacity=2)
    assert [bench.ask(put(number)) for number in range(4)] == [Done(), Done(), None, None]
    assert numbers(bench.ask(get())) == [0]
    assert (bench.answers[2], bench.answers.get(3)) == (Done(), None)
    assert numbers(bench.ask(get(2))) == [1, 2]
    assert bench.answers[3] == Done()


def test_keys_are_served_by_themselves() -> None:
    bench = Bench()
    for number, key in enumerate(("x", 3, "x")):
        bench.ask(put(number, key=key))
    assert numbers(bench.ask(get(key=3))) == [1]
    assert bench.ask(get(key=3)) is None
    assert numbers(bench.ask(get(2))) == [0, 2]
    bench.ask(put(9, key=3))
    assert numbers(bench.answers[4]) == [9]


def test_a_batch_waits_until_it_is_whole() -> None:
    bench = Bench()
    assert bench.ask(get(3)) is None
    bench.ask(put(0))
    bench.ask(put(1))
    assert 0 not in bench.answers
    bench.ask(put(2))
    assert numbers(bench.answers[0]) == [0, 1, 2]


def test_a_batch_by_weight_is_the_fewest_next_items_that_weigh_as_much() -> None:
    bench = Bench()
    for number, weight in enumerate((1.0, 2.5, 3.0)):
        bench.ask(put(number, weight=weight))
    assert numbers(bench.ask(get(None, weight=3.0))) == [0, 1]
    assert bench.ask(get(None, weight=3.5)) is None
    bench.ask(put(7, weight=0.5))
    assert numbers(bench.answers[4]) == [2, 7]


def test_a_batch_that_a_full_channel_can_never_have_is_what_there_is() -> None:
    bench = Bench(capacity=2)
    bench.ask(put(0, weight=1.0))
    bench.ask(put(1, weight=1.0))
    assert numbers(bench.ask(get(None, weight=9.0))) == [0, 1]


def test_the_order_of_ones_own_decides_and_equals_go_as_they_came() -> None:
    bench = Bench(order=lambda entry: -entry.weight)
    for number, weight in enumerate((1.0, 3.0, 2.0, 3.0)):
        bench.ask(put(number, weight=weight))
    assert numbers(bench.ask(get(4))) == [1, 3, 2, 0]


def test_each_consumer_names_the_order_in_which_it_takes() -> None:
    last_key = {"oldest": lambda entry: entry.number, "by_key": lambda entry: str(entry.key)}
    bench = Bench(capacity=9, order=last_key)
    for number, (key, weight) in enumerate([("b", 2), ("a", 5), ("c", 1), ("a", 3), ("c", 4), ("b", 6)]):
        bench.ask(put(number, key=key, weight=float(weight)))
    assert numbers(bench.ask(get(order="heaviest"))) == [5]
    assert numbers(bench.ask(get(order="by_key"))) == [1]
    assert numbers(bench.ask(get())) == [0], "the first order is the channel's own"
    assert numbers(bench.ask(get(order="lightest", key="c"))) == [2]
    assert numbers(bench.ask(get(2, order="heaviest"))) == [4, 3]


@given(st.lists(st.tuples(st.sampled_from(["put", "", "arrival", "lightest", "heaviest"]), st.integers(0, 4))))
def test_several_orders_take_from_one_list(operations: list[tuple[str, int]]) -> None:
    """Against a plain list that is sorted anew each time."""
    order: dict[str, Any] = {
        "": lambda item: -item[0],
        "arrival": lambda item: item[0],
        "lightest": lambda item: (item[1], item[0]),
        "heaviest": lambda item: (-item[1], item[0]),
    }
    bench, there = Bench(capacity=100, order=lambda entry: -entry.number), list[tuple[int, int]]()
    for number, (kind, weight) in enumerate(operations):
        if kind == "put":
            bench.ask(put(number, weight=float(weight)))
            there.append((number, weight))
        elif there:
            expected = min(there, key=order[kind])
            assert numbers(bench.ask(get(order=kind))) == [expected[0]]
            there.remove(expected)


def test_an_order_that_raises_later_refuses_the_consumer_alone() -> None:
    bench = Bench(order={"own": lambda entry: entry.number, "odd": lambda entry: entry.key + 1})
    bench.ask(put(0, key="a"))
    denied = bench.ask(get(order="odd"))
    assert (denied.reason, "TypeError" in denied.why) == ("refused", True)
    assert numbers(bench.ask(get())) == [0]


def test_an_order_that_raises_refuses_the_item() -> None:
    def order(entry: Entry) -> float:
        return {"x": 1.0}[str(entry.key)]

    bench = Bench(order=order)
    denied = bench.ask(put(0, key="y"))
    assert denied == Denied("refused", "the order of channel 'c' raised KeyError: 'y'")
    assert bench.ask(put(1, key="x")) == Done()
    assert bench.exchange.sizes() == {"c": 1}


def test_after_the_last_producer_has_closed_consumers_get_the_rest_and_then_the_end() -> None:
    bench = Bench(producers=2)
    bench.ask(put(0))
    assert bench.ask(get(2)) is None
    bench.ask(Close("c"))
    assert 1 not in bench.answers
    bench.ask(Close("c"))
    assert numbers(bench.answers[1]) == [0]
    assert bench.ask(get()) == Denied("closed", "channel 'c' is closed, and has no more")
    assert bench.ask(put(1)).reason == "closed"
    assert bench.ask(Close("c")).reason == "refused"


def test_what_waited_for_room_is_still_given_after_the_end() -> None:
    bench = Bench(capacity=1)
    bench.ask(put(0))
    assert bench.ask(put(1)) is None
    bench.ask(Close("c"))
    assert numbers(bench.ask(get())) == [0]
    assert numbers(bench.ask(get())) == [1]
    assert bench.ask(get()).reason == "closed"


def test_waits_end_at_their_deadlines_and_say_for_what() -> None:
    bench = Bench(capacity=1)
    bench.ask(get(key="x", timeout_s=2.0))
    bench.ask(put(0))
    bench.ask(put(1, timeout_s=3.0))
    assert bench.exchange.deadline() == 2.0
    bench.pass_time(2.0)
    why = "2 s were over while it waited for 1 item of key 'x' of channel 'c' (it holds 1); look at who should"
    assert bench.answers[0].reason == "timeout"
    assert bench.answers[0].why.startswith(why)
    bench.pass_time(1.0)
    assert "for room in channel 'c' (it is full: 1)" in bench.answers[2].why
    assert bench.exchange.deadline() == math.inf
    assert numbers(bench.ask(get())) == [0], "what was not admitted is not there"


def test_a_producer_that_gives_up_makes_room_for_the_consumers_of_what_is_left() -> None:
    """The last wait for room keeps a closed channel open."""
    bench = Bench(capacity=1)
    bench.ask(put(0, key="x"))
    bench.ask(put(1, key="y", timeout_s=1.0))
    bench.ask(Close("c"))
    assert bench.ask(get(key="z")) is None
    bench.pass_time(1.0)
    assert bench.answers[3].reason == "closed"


def test_no_time_means_now_or_never() -> None:
    bench = Bench()
    assert bench.ask(get(timeout_s=0.0)) is None
    bench.pass_time(0.0)
    assert bench.answers[0].reason == "timeout"
    bench.ask(put(0))
    assert numbers(bench.ask(get(timeout_s=0.0))) == [0]


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Put("d", item(0)), "there is no channel 'd'"),
        (Close("d"), "there is no channel 'd'"),
        (put(0, weight=-1.0), "weight = -1.0: not a number of 0 or more"),
        (put(0, weight=math.nan), "weight = nan: not a number of 0 or more"),
        (put(0, timeout_s=math.nan), "timeout_s = nan: not 0 or more seconds"),
        (get(timeout_s=-1.0), "timeout_s = -1.0: not 0 or more seconds"),
        (get(0), "items = 0: not 1 to 4, the capacity"),
        (get(5), "items = 5: not 1 to 4, the capacity"),
        (get(None), "items and weight are None"),
        (get(None, weight=0.0), "weight = 0.0: not a number above 0"),
    ],
)
def test_what_cannot_be_granted_is_refused_at_once(request_: Any, why: str) -> None:
    bench = Bench()
    denied = bench.ask(request_)
    assert (denied.reason, denied.why[: len(why)]) == ("refused", why)
    assert not bench.exchange.waits()


def test_the_end_answers_everybody_who_waits_and_who_comes_later() -> None:
    bench = Bench()
    bench.ask(get())
    bench.hear(bench.exchange.end("why"))
    assert bench.answers[0] == bench.ask(put(0)) == Denied("over", "why")


def test_an_order_that_is_not_there_is_refused() -> None:
    bench = Bench(order={"short": lambda entry: entry.weight})
    denied = bench.ask(get(order="long"))
    assert denied.why == "order = 'long': there are arrival, lightest, heaviest, short (channel 'c')"
    for wrong in ("newest", {}, {"a": 1}):
        with pytest.raises(ValueError, match="order = "):
            Bench(order=wrong)


def test_two_channels_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="channel 'c' is there already"):
        Bench().exchange.open("c", 1)


def test_a_line_between_two_workers_is_made_when_it_is_first_used() -> None:
    bench = Bench()
    assert bench.ask(Get("a-0>b-1", timeout_s=9.0, direct=True)) is None
    assert bench.exchange.waits() == ["a waits for something from a-0"]
    for number in range(SEND_AHEAD + 1):
        assert bench.ask(Put("a-0>b-1", item(number), timeout_s=9.0, direct=True)) == Done()
    assert numbers(bench.answers[0]) == [0]
    assert bench.ask(Put("a-0>b-1", item(9), timeout_s=9.0, direct=True)) is None
    assert bench.exchange.waits() == ["a waits until b-1 receives something"]


def test_waiting_consumers_get_equal_weights() -> None:
    """Whatever the weights: while all wait, no two differ by more than the heaviest item."""
    bench, given = Bench(capacity=8), Counter[str]()
    waiting: dict[int, str] = {}
    for number, weight in enumerate((9, 1, 1, 1, 8, 2, 2, 7, 3, 3, 5, 1, 1, 6)):
        for who in {"a", "b", "c"} - set(waiting.values()):
            waiting[bench.asked] = who
            assert bench.ask(get(), who) is None
        bench.ask(put(number, weight=float(weight)), "producer")
        (served,) = [asked for asked in waiting if asked in bench.answers]
        given[waiting.pop(served)] += weight
        assert max(given[who] for who in "abc") - min(given[who] for who in "abc") <= 9
    assert sum(given.values()) == 50


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from([None, "x", 1]), st.integers(0, 5), st.integers(0, 3)),
        st.tuples(st.just("get"), st.sampled_from([None, "x", 1]), st.integers(1, 3), st.integers(0, 3)),
        st.tuples(st.just("weigh"), st.sampled_from([None, "x"]), st.integers(1, 9), st.integers(0, 3)),
        st.tuples(st.just("time"), st.none(), st.integers(0, 2), st.none()),
        st.tuples(st.just("close"), st.none(), st.none(), st.none()),
    ),
    max_size=60,
)


@given(OPERATIONS, st.integers(1, 4), st.booleans())
def test_no_item_is_lost_or_given_twice_and_the_bound_holds(
    operations: list[Any], capacity: int, by_weight: bool
) -> None:
    """Against a list of what was put, whatever is asked in whatever order."""
    order = (lambda entry: -entry.weight) if by_weight else None
    bench = Bench(capacity, producers=2, order=order)
    puts: dict[int, tuple[Any, float]] = {}  # by number of the request, which the item has too
    for kind, key, amount, seconds in operations:
        if kind == "put":
            puts[bench.asked] = (key, float(amount))
            bench.ask(put(bench.asked, key=key, weight=float(amount), timeout_s=float(seconds)), "p")
        elif kind == "get":
            bench.ask(get(min(amount, capacity), key=key, timeout_s=float(seconds)), f"consumer-{amount}")
        elif kind == "weigh":
            bench.ask(get(None, weight=float(amount), key=key, timeout_s=float(seconds)), f"consumer-{amount}")
        elif kind == "time":
            bench.pass_time(float(amount))
        else:
            bench.ask(Close("c"), "p")
        given = [number for answer in bench.answers.values() if isinstance(answer, Given) for number in numbers(answer)]
        done = {number for number in puts if bench.answers.get(number) == Done()}
        denied = {number for number in puts if isinstance(bench.answers.get(number), Denied)}
        assert len(given) == len(set(given)), "given twice"
        assert set(given) <= done, "given, but its producer was not told that it was taken"
        left = bench.exchange.sizes()["c"]
        assert len(done) - len(given) == left <= capacity
        assert not set(given) & denied, "given, though its producer was told that it was not put"
        for answer in bench.answers.values():
            if isinstance(answer, Given):
                assert answer.items
                assert all(puts[int(parcel.content)] == (own, weight) for parcel, own, weight in answer.items)
    # Nobody waits for what could be had; in the end everything that is there can be had, in its order.
    bench.pass_time(100.0)
    assert not bench.exchange.waits()
    left = bench.exchange.sizes()["c"]
    if left:
        rest = bench.ask(get(left))
        weights = [weight for _, _, weight in rest.items]
        assert len(rest.items) == left
        assert numbers(rest) == sorted(numbers(rest), key=lambda n: (-puts[n][1], 0)) if by_weight else True
        assert not by_weight or weights == sorted(weights, reverse=True)
        assert by_weight or numbers(rest) == sorted(numbers(rest))


def test_the_first_puts_and_gets_tell_who_feeds_whom() -> None:
    bench = Bench(capacity=2)
    for number in range(TRACED):
        bench.ask(put(number), "a")
        bench.ask(get(), "b")
    bench.ask(put(0), "late")
    bench.ask(get(), "late")
    assert bench.exchange.traffic == {"c": ({"a"}, {"b"})}
