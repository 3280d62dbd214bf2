"""Several samples of each initial state: mean@n and pass@k."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from tests.long import long
from tests.pipeline.runs import config
from tests.plugins.language.test_language_runs import SINGLE, run

import polyrhythm as pr
from polyrhythm.cli.main import main
from polyrhythm.errors import ConfigError
from polyrhythm.observe.intervals import of_samples, pass_at, wilson
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.pipeline.evaluation.standalone import Conditions, evaluate
from polyrhythm.pipeline.persistence.checkpoints import save_policy
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.scheduler.records import SampleEvaluated


def counted(successes: list[bool], k: int) -> Fraction:
    """The share of all sets of k samples that have a success."""
    sets = list(combinations(successes, k))
    return Fraction(sum(map(any, sets)), len(sets))


def test_pass_at_k_is_the_share_of_all_sets_of_k_samples() -> None:
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                assert pass_at(k, n, c) == pytest.approx(float(counted([i < c for i in range(n)], k)), abs=1e-15)
    assert pass_at(1, 64, 64) == 1.0
    assert pass_at(64, 64, 0) == 0.0
    assert pass_at(2, 10_000, 1) == pytest.approx(2 / 10_000), "large counts too"


def test_means_over_initial_states_and_their_intervals() -> None:
    successes = [[True] * 4 + [False] * 4, [False] * 8, [True] + [False] * 7, [True] * 8, [True, False, False]]
    found = of_samples(successes)
    assert list(found) == ["mean@8", "pass@1", "pass@2", "pass@4", "pass@8"]
    expected = fmean([4 / 8, 0, 1 / 8, 1, 1 / 3])
    assert found["mean@8"]["rate"] == pytest.approx(expected)
    assert found["mean@8"]["starts"] == 5
    for k in (1, 2, 4, 8):
        own = [one for one in successes if len(one) >= k]
        assert found[f"pass@{k}"]["rate"] == pytest.approx(float(sum(counted(one, k) for one in own) / len(own)))
        assert found[f"pass@{k}"]["starts"] == len(own), "one has three samples, since others were dropped"

    shares = [4 / 8, 0, 1 / 8, 1, 1 / 3]
    spread = sum((share - expected) ** 2 for share in shares) / 4 / 5
    n, z = min(35, max(5, expected * (1 - expected) / spread)), 1.959963984540054
    middle = (expected + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(expected * (1 - expected) / n + z * z / (4 * n * n))
    assert (found["mean@8"]["low"], found["mean@8"]["high"]) == pytest.approx((middle - half, middle + half))

    one = of_samples([[True], [False], [False]])["mean@1"]
    assert (one["low"], one["high"]) == pytest.approx(wilson(1, 3)[3:]), "without repetition it is Wilson's"


@pytest.mark.parametrize("shape", [0.3, 1.0, 20.0], ids=["all or nothing", "spread", "alike"])
def test_the_intervals_cover_the_truth(shape: float) -> None:
    """States of which each has a probability of its own, drawn from a beta distribution with mean 0.3."""
    random, covered, naive = Random(1), 0, 0
    for _ in range(400):
        states = [random.betavariate(0.3 * shape, 0.7 * shape) for _ in range(40)]
        successes = [[random.random() < p for _ in range(8)] for p in states]
        found = of_samples(successes)["mean@8"]
        covered += found["low"] <= 0.3 <= found["high"]
        plain = wilson(sum(map(sum, successes)), 320)
        naive += plain.low <= 0.3 <= plain.high
    assert covered >= 0.925 * 400
    assert covered > naive or shape == 20.0, "samples of one state are not independent"


def test_samples_of_a_state_differ_in_noise_alone() -> None:
    from polyrhythm.scheduler.rollout.evaluation import noise_stream

    once, several = (held_out(5, 7, 2, greedy=False, shown=2, samples=n) for n in (1, 3))
    assert [(e.task, e.seed) for e in several] == [(e.task, e.seed) for e in once for _ in range(3)]
    assert len({noise_stream(e) for e in several}) == 15
    assert several[::3] == once, "the first sample is that of an evaluation without more"
    assert [e.shown for e in several] == [True, False, False, True, *[False] * 11]


def test_a_run_measures_mean_and_pass_at_k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    easy = ("env.terms=[2,2]", "policy.width=32", "supervised.steps=100", "supervised.lr=1.0e-2")
    many = (*easy, "evaluation.samples=4", "training.versions=2", "evaluation.conversations=2")
    beside = ("evaluation.every=1", "evaluation.every_episodes=4", "evaluation.weights=pause")
    summary, _ = run(tmp_path, *SINGLE, "launcher=inline", *many, *beside)
    after, greedy = summary["after_sampled"], summary["after"]
    assert (after["episodes"], greedy["episodes"]) == (32, 8)
    assert "at" not in greedy
    found = evaluate(tmp_path, greedy=False)
    assert {name: found[name] for name in after} == after, "of the run's own samples"
    by_state: dict[int, list[bool]] = {}
    for one in found["per_episode"]:
        by_state.setdefault(one["seed"], []).append(one["success"])
        assert one["sample"] == len(by_state[one["seed"]]) - 1
        assert one["index"] == len(by_state) - 1
    assert [len(own) for own in by_state.values()] == [4] * 8
    assert any(0 < sum(own) < 4 for own in by_state.values()), "samples differ"
    for k in (1, 2, 4):
        expected = float(sum(counted(own, k) for own in by_state.values()) / 8)
        assert after["at"][f"pass@{k}"]["rate"] == pytest.approx(expected)
    assert after["at"]["mean@4"]["rate"] == pytest.approx(after["rate"])
    assert after["low"] == after["at"]["mean@4"]["low"] <= wilson(after["successes"], 32).low

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    during, line = (one for one in lines if one["step"] and "evaluation/sampled/rate" in one)
    assert (during["step"], line["step"]) == (1, 2)
    assert {name for name in line if "_at_" in name} == {name for name in during if "_at_" in name}
    for name, one in after["at"].items():
        key = f"evaluation/sampled/{name.replace('@', '_at_')}"
        assert [line[key], line[f"{key}_low"], line[f"{key}_high"]] == [one["rate"], one["low"], one["high"]]

    alone = evaluate(tmp_path, greedy=False, conditions=Conditions(samples=1))
    assert [one["return"] for one in alone["per_episode"]] == [one["return"] for one in found["per_episode"][::4]]
    assert "at" not in alone
    api = pr.evaluate(tmp_path, episodes=4, samples=2)
    assert (api.greedy, api.episodes, list(api.at)) == (False, 8, ["mean@2", "pass@1", "pass@2"])

    assert main(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "pass@4" in page
    capsys.readouterr()
    assert main(["eval", str(tmp_path), "--episodes", "4", "--samples", "2", "--conversations", "0"]) == 0
    out = capsys.readouterr().out
    assert ", mean@2 " in out
    assert ", pass@2 " in out
    assert main(["eval", str(tmp_path), "--greedy", "--samples", "2"]) == 2
    assert "samples = 2: greedily all are equal" in capsys.readouterr().err


@pytest.mark.parametrize("launcher", ["inline", pytest.param("local", marks=long(2, "with processes"))])
def test_any_environment_has_samples_and_each_task_its_own(tmp_path: Path, launcher: str) -> None:
    env = {"type": "tests.pipeline.pictures:LampSettings", "pictures": "none"}
    own = config(env=env, policy={"type": "gaussian", "init_log_std": 1.0}, launcher=launcher)
    checked = validate_run(own, trainer=False)
    file = tmp_path / "policy.pt"
    weights = checked.policy.state_dict()
    mean = next(tensor for name, tensor in weights.items() if name.endswith("bias") and tensor.numel() == 1)
    mean += 0.5
    save_policy(weights, own, file, 0, checked.spec)
    found = evaluate(file, 12, greedy=False, conditions=Conditions(samples=4))
    listed = found["per_episode"]
    assert [(one["index"], one["sample"]) for one in listed] == [(i, s) for i in range(12) for s in range(4)]
    for name, part in (("first", found["tasks"]["first"]), ("second", found["tasks"]["second"]), ("", found)):
        states = {one["index"]: [] for one in listed if name in ("", one["task"])}
        for one in listed:
            if one["index"] in states:
                states[one["index"]].append(one["success"])
        assert any(0 < sum(own) < 4 for own in states.values())
        for k in (1, 2, 4):
            expected = float(sum(counted(own, k) for own in states.values()) / len(states))
            assert part["at"][f"pass@{k}"]["rate"] == pytest.approx(expected)


def test_where_no_success_is_reported_there_is_none_of_samples(tmp_path: Path) -> None:
    checked = validate_run(config(), trainer=False)
    file = tmp_path / "policy.pt"
    save_policy(checked.policy.state_dict(), config(), file, 0, checked.spec)
    found = evaluate(file, 3, greedy=False, conditions=Conditions(samples=2))
    assert len({one["return"] for one in found["per_episode"]}) > 3
    assert "at" not in found


def test_variants_and_samples_of_a_state_are_not_independent() -> None:
    """The interval of a kind of variants is that of their initial states."""
    from polyrhythm.pipeline.evaluation.standalone import tally_kind

    variants = [
        [SampleEvaluated("e", 0, 0, False, seed % 2 == 0, 0.0, 0, seed=seed) for seed in range(20) for _ in range(4)]
        for _ in range(3)
    ]
    found = tally_kind(variants)
    assert (found["episodes"], found["rate"]) == (240, 0.5)
    assert (found["low"], found["high"]) == pytest.approx(wilson(10, 20)[3:])


def test_samples_without_sampling_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.samples = 4: it is for sampled actions; set sampled to true"):
        config(evaluation={"episodes": 4, "samples": 4})
