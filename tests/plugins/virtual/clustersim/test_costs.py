import random
from itertools import pairwise

import pytest
from tests.plugins.virtual.clustersim.clusters import run, settings, times

from polyrhythm.plugins.virtual.clustersim.costs import FREE, parse_cost, parse_count
from polyrhythm.scheduler.records import UpdateDone


@pytest.mark.parametrize(
    ("text", "units", "seconds"),
    [("10ms", 7, 0.010), ("10ms+0.1ms", 20, 0.012), ("1s + 2us", 1000, 1.002), ("constant:3ms+1ms", 2, 0.005)],
)
def test_a_cost_is_affine_in_its_units(text: str, units: int, seconds: float) -> None:
    assert parse_cost(text).draw(random.Random(0), units) == pytest.approx(seconds)


def test_the_base_may_be_any_law_and_a_mixture_keeps_its_pluses() -> None:
    mixture = "mixture:0.9*constant:10ms+0.1*constant:30ms"
    assert parse_cost(mixture).mean(5) == pytest.approx(0.012)
    assert parse_cost(mixture + "+1ms").mean(5) == pytest.approx(0.017)
    draws = [parse_cost("lognormal:10ms:0.5+1ms").draw(random.Random(seed), 3) for seed in range(4000)]
    assert sum(draws) / len(draws) == pytest.approx(0.013, rel=0.05)


def test_counts_are_whole_and_at_least_one() -> None:
    rng = random.Random(0)
    assert parse_count(40).draw(rng) == 40
    draws = [parse_count("lognormal:3steps:1.5").draw(rng) for _ in range(200)]
    assert min(draws) == 1
    assert all(isinstance(draw, int) for draw in draws)


def test_a_wrong_cost_says_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"cost 10 is not text; write a duration with a unit"):
        parse_cost(10)
    with pytest.raises(ValueError, match=r"duration '10' is not a number with a unit; write for example 10ms"):
        parse_cost("10")
    with pytest.raises(ValueError, match=r"count 0 is not a whole number of at least 1; write 40 or lognormal:40steps"):
        parse_count(0)


def test_what_is_parsed_already_stays() -> None:
    assert parse_cost(FREE) is FREE
    count = parse_count(3)
    assert parse_count(count) is count


def test_a_cost_changes_when_the_settings_say() -> None:
    changes = [{"at": "500ms", "cost": "step", "times": 4.0}, {"at": "900ms", "cost": "step", "times": 0.5}]
    cluster, _ = run(settings(versions=12, changes=changes, trainer={"update": "0ms", "publish": "0ms"}))
    # reset 50, three times (serve 6, step 10), apply 20 from the second episode on
    ends = [0.0, *times(cluster, UpdateDone)]
    seconds = [round(later - earlier, 3) for earlier, later in pairwise(ends)]
    assert seconds[:4] == [0.118, 0.118, 0.118, 0.118]
    assert max(seconds) == 0.208, "three steps of 40"
    assert seconds[-1] == 0.103, "three steps of 5"
