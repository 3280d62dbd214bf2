from polyrhythm.flow.generators import GeneratorState
from polyrhythm.flow.requests import ANY
from polyrhythm.flow.routing import Router, next_idle


def test_each_rule_names_the_pool_in_which_a_request_waits() -> None:
    names = ["g0", "g1", "g2"]
    assert [Router("least_loaded").pool(None, slot, names) for slot in range(3)] == [ANY] * 3
    assert [Router("fixed").pool(None, slot, names) for slot in (0, 1, 2, 3, 7)] == ["g0", "g1", "g2", "g0", "g1"]
    turns = Router("round_robin")
    assert [turns.pool(None, 0, names) for _ in range(4)] == ["g0", "g1", "g2", "g0"]


def test_a_slots_own_generator_comes_first_while_it_lives() -> None:
    for rule in ("least_loaded", "fixed", "round_robin"):
        assert Router(rule).pool("g1", 0, ["g0", "g1"]) == "g1"
        assert Router(rule).pool("g1", 0, ["g0"]) == Router(rule).pool(None, 0, ["g0"])
        assert Router(rule).pool("g1", 0, []) == ANY


def test_the_generator_that_served_fewest_rows_is_next_then_the_first_by_name() -> None:
    idle = [GeneratorState("g2", 0, served_rows=5), GeneratorState("g1", 0, served_rows=3), GeneratorState("g0", 0)]
    assert next_idle(idle).name == "g0"
    assert next_idle(idle[:2]).name == "g1"
    assert next_idle([GeneratorState("b", 0), GeneratorState("a", 0)]).name == "a"
