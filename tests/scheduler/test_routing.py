import pytest

from polyrhythm.scheduler.inference.generators import GeneratorState
from polyrhythm.scheduler.inference.requests import ANY
from polyrhythm.scheduler.inference.routing import Router, next_idle
from polyrhythm.scheduler.records import Request

NAMES = ["g0", "g1", "g2"]


def asking(slot: int = 0, *, rows: int = 1, generator: str | None = None) -> Request:
    return Request(f"slot-{slot}", "sim", 1, rows, 0, "", 0.0, generator)


def test_each_rule_names_the_pool_in_which_a_request_waits() -> None:
    assert [Router("least_loaded").pool(asking(slot), slot, NAMES) for slot in range(3)] == [ANY] * 3
    fixed = [Router("fixed").pool(asking(slot), slot, NAMES) for slot in (0, 1, 2, 3, 7)]
    assert fixed == ["g0", "g1", "g2", "g0", "g1"]
    turns = Router("round_robin")
    assert [turns.pool(asking(), 0, NAMES) for _ in range(4)] == ["g0", "g1", "g2", "g0"]


@pytest.mark.parametrize("rule", ["least_loaded", "fixed", "round_robin", "affinity"])
def test_a_slots_own_generator_comes_first_while_it_lives(rule: str) -> None:
    assert Router(rule).pool(asking(generator="g1"), 0, ["g0", "g1"]) == "g1"
    assert Router(rule).pool(asking(generator="g1"), 0, ["g0"]) == Router(rule).pool(asking(), 0, ["g0"])
    assert Router(rule).pool(asking(generator="g1"), 0, []) == ANY


def test_the_generator_that_served_fewest_rows_is_next_then_the_first_by_name() -> None:
    idle = [GeneratorState("g2", 0, served_rows=5), GeneratorState("g1", 0, served_rows=3), GeneratorState("g0", 0)]
    assert next_idle(idle).name == "g0"
    assert next_idle(idle[:2]).name == "g1"
    assert next_idle([GeneratorState("b", 0), GeneratorState("a", 0)]).name == "a"


def test_affinity_begins_where_fewest_rows_are_bound_and_stays() -> None:
    router = Router("affinity")
    first = [router.pool(asking(slot, rows=rows), slot, NAMES) for slot, rows in enumerate((4, 1, 1, 1, 1))]
    assert first == ["g0", "g1", "g2", "g1", "g2"]
    for _ in range(3):
        assert [router.pool(asking(slot), slot, NAMES) for slot in reversed(range(5))] == first[::-1]


def test_affinity_stays_with_the_generator_that_served_what_nobody_was_named_for() -> None:
    router = Router("affinity")
    assert router.pool(asking(), 0, []) == ANY
    router.served([asking()], "g2")
    assert router.pool(asking(), 0, NAMES) == "g2"


def test_a_binding_to_a_generator_that_is_gone_is_made_anew_and_not_remembered() -> None:
    router = Router("affinity")
    assert [router.pool(asking(slot), slot, NAMES) for slot in range(3)] == NAMES
    router.forget_generator("g1")
    assert [router.pool(asking(slot), slot, ["g0", "g2"]) for slot in range(3)] == ["g0", "g0", "g2"]
    assert router.loads == {"g0": 2, "g2": 1}
    assert router.pool(asking(1), 1, NAMES) == "g1", "it is back, and evens out what its loss left uneven"
    assert [router.pool(asking(slot), slot, NAMES) for slot in range(3)] == NAMES


def test_a_generator_that_comes_gets_its_share_and_then_slots_stay() -> None:
    router = Router("affinity")
    for slot in range(8):
        router.pool(asking(slot), slot, ["g0"])
    moved = [router.pool(asking(slot), slot, ["g0", "g1"]) for slot in range(8)]
    assert sorted(router.loads.values()) == [4, 4]
    assert [router.pool(asking(slot), slot, ["g0", "g1"]) for slot in range(8)] == moved


def test_a_slot_that_is_gone_leaves_its_place() -> None:
    router = Router("affinity")
    for slot in range(3):
        router.pool(asking(slot, rows=2), slot, NAMES)
    router.forget_slot("slot-1")
    router.forget_slot("slot-1")
    assert router.pool(asking(3), 3, NAMES) == "g1"
