"""Evaluation during training in real runs: of one version each, beside training, and the best policy stays."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from tests.long import long
from tests.pipeline.runs import config
from tests.process.settings import once

from polyrhythm.config.schema import RunConfig
from polyrhythm.envs.gymnasium_env import GymnasiumBatch, GymnasiumSettings
from polyrhythm.errors import ConfigError, RunFolderError
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.background import BackgroundEvaluator, BestCheckpoints
from polyrhythm.pipeline.evaluation.episodes import held_out, tally
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.persistence.checkpoints import BEST_FILE, STATES, load_policy, save_policy
from polyrhythm.pipeline.run_loop import RunLoop
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.scheduler import records as r

WAYS = ("second_copy", "own_generator", "pause")
#: The usual one, and the others.
BY_WAY = [WAYS[0], *(pytest.param(way, marks=long(3, way)) for way in WAYS[1:])]
EVALUATION = {"every": 2, "every_episodes": 5, "rows": 3, "seed": 7}


def run(folder: Path, **evaluation: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    checked = validate_run(config(evaluation={**EVALUATION, **evaluation}, training={"versions": 6}))
    return train(checked, folder)


def listed(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "evaluations.json").read_text())
    return found


@pytest.mark.parametrize("weights", BY_WAY[:2])
def test_a_lockstep_run_learns_the_same_with_and_without(weights: str, tmp_path: Path) -> None:
    alone, with_it = tmp_path / "alone", tmp_path / "with"
    run(alone, every=0)
    summary = run(with_it, weights=weights)
    first, second = load_policy(alone)[1], load_policy(with_it)[1]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert summary["ledger"]["started"] == summary["ledger"]["trained"] == 60
    assert listed(with_it)


@pytest.mark.parametrize("weights", WAYS)
def test_every_evaluation_is_of_one_version_and_in_metrics_list_and_best(weights: str, tmp_path: Path) -> None:
    summary = run(tmp_path, weights=weights, episodes=4, sampled=True)
    entries = listed(tmp_path)
    versions = [entry["version"] for entry in entries]
    assert versions[-1] == 6, "the evaluation after training competes"
    assert all(later - earlier >= 2 for earlier, later in zip([0, *versions], versions[:-1], strict=False))
    assert [sorted(entry) for entry in entries] == [["greedy", "sampled", "version"]] * len(entries)
    assert [entry["greedy"]["episodes"] for entry in entries] == [5] * (len(entries) - 1) + [4]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    measured = [line["step"] for line in lines if "evaluation/greedy/rate" in line]
    assert measured == [0, *versions]
    best = max(entries, key=lambda entry: (entry["greedy"]["low"], entry["greedy"]["mean_return"]))
    assert summary["best"] == best
    assert load_policy(tmp_path / BEST_FILE)[2] == best["version"]
    assert [path.name for path in (tmp_path / STATES).glob("policy-*")] == [f"policy-{best['version']:06d}.pt"]


@pytest.mark.parametrize("weights", BY_WAY)
def test_an_evaluation_gets_what_its_version_alone_earns(weights: str, tmp_path: Path) -> None:
    """The kept policy, evaluated again with all else at rest, earns the same."""
    run(tmp_path, weights=weights)
    entry = listed(tmp_path)[0]
    best = BestCheckpoints(tmp_path, 9).path(entry["version"])
    settings = config(evaluation=EVALUATION)
    if not best.is_file():
        best = tmp_path / BEST_FILE
        entry = next(e for e in listed(tmp_path) if e["version"] == load_policy(best)[2])
    _, weights_of, version = load_policy(best)
    pipeline = build_pipeline(RunContext(settings, version=version, trainer=False), start=False)
    pipeline.weights.publish(version, weights_of)
    pipeline.loop.start()
    results = pipeline.loop.evaluate("again", held_out(5, 7, 1, greedy=True))
    pipeline.close()
    assert {result.version for result in results} == {version}
    assert tally(results, validate_run(settings).spec.tasks)["mean_return"] == pytest.approx(
        entry["greedy"]["mean_return"]
    )


class Saboteur(Observer):
    """Once, after some episodes of an evaluation: the generator is lost, and back at once."""

    hears: ClassVar[tuple[type, ...]] = (r.SampleEvaluated,)

    def __init__(self, loop: RunLoop) -> None:
        self._loop, self._done = loop, False

    def on_decision(self, now: float, event: r.Event, commands: Sequence[r.Command]) -> None:
        if not self._done and any(isinstance(command, r.SampleEvaluated) for command in commands):
            self._loop.submit_later(r.StationLost("generator-0", 0, "lost"))
            self._loop.submit_later(r.GeneratorJoined("generator-0", 0))
            self._done = True


@pytest.mark.parametrize("weights", BY_WAY)
def test_an_evaluation_that_is_given_up_is_no_result_and_the_next_one_is(
    weights: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(
        evaluation={**EVALUATION, "weights": weights, "every": 1},
        training={"versions": 8, "order": "arrival"},
        freshness={"max_lag": 3, "on_update": "continue"},
        batching={"type": "dynamic"},
    )
    pipeline = build_pipeline(RunContext(settings, folder=tmp_path))
    told: list[tuple[int, set[int]]] = []
    episodes = [r.Episode(0, 0, seed, greedy=True) for seed in range(30)]
    beside = BackgroundEvaluator(
        settings,
        pipeline,
        BestCheckpoints(tmp_path, 9),
        episodes,
        lambda version, results: told.append((version, {result.version for result in results})),
    )
    pipeline.loop.add_observers(beside, Saboteur(pipeline.loop))
    pipeline.loop.train_until(8)
    if beside.under_way:
        beside.complete()
    pipeline.loop.remove_observers(beside)
    pipeline.close()
    abandoned = "is abandoned" in caplog.text
    assert abandoned or weights != "second_copy", "generator-0 has the copy"
    assert told
    assert all(versions == {version} for version, versions in told)
    versions = [version for version, _ in told]
    assert versions == sorted(set(versions)), "no version twice"


def tally_of(low: float, mean_return: float) -> dict[str, dict[str, Any]]:
    return {"greedy": {"low": low, "mean_return": mean_return}}


def filled(folder: Path, keep: int) -> BestCheckpoints:
    """Versions 2, 4, 6, 8, of which 6 is the best by its lower end, then 8 and 4 by their returns."""
    best = BestCheckpoints(folder, keep)
    (folder / STATES).mkdir()
    for version, low, mean_return in ((2, 0.1, 9.0), (4, 0.3, 1.0), (6, 0.5, 0.0), (8, 0.3, 2.0)):
        save_policy({}, config(), best.path(version), version)
        best.add(version, tally_of(low, mean_return))
    return best


def kept(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("policy-")) for path in (folder / STATES).glob("policy-*.pt"))


@pytest.mark.parametrize(("keep", "stay"), [(1, [6]), (2, [6, 8]), (3, [4, 6, 8])])
def test_the_best_by_lower_end_then_return_stay(keep: int, stay: list[int], tmp_path: Path) -> None:
    best = filled(tmp_path, keep)
    assert kept(tmp_path) == stay
    assert best.best() == {"version": 6, **tally_of(0.5, 0.0)}
    assert load_policy(tmp_path / BEST_FILE)[2] == 6
    assert [entry["version"] for entry in listed(tmp_path)] == [2, 4, 6, 8]


def test_a_run_that_goes_back_forgets_what_it_measured_later(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    again = BestCheckpoints(tmp_path, 3)
    again.rewind(5)
    assert [entry["version"] for entry in listed(tmp_path)] == [2, 4]
    assert kept(tmp_path) == [4]
    assert load_policy(tmp_path / BEST_FILE)[2] == 4
    again.rewind(0)
    assert not (tmp_path / BEST_FILE).exists()
    assert again.best() is None


def settings(**evaluation: Any) -> RunConfig:
    return config(evaluation=evaluation)


@pytest.mark.parametrize(
    ("evaluation", "told"),
    [
        ({"every": 2}, "evaluation.every = 2: it needs episodes; set every_episodes or episodes"),
        ({"every": 2, "every_episodes": 3, "greedy": False}, "evaluation.every = 2: neither greedy nor sampled"),
        ({"every": 2, "every_episodes": 3, "rows": 0}, "evaluation.rows = 0: it must be at least 1"),
        ({"every": 2, "every_episodes": 3, "weights": "none"}, "evaluation.weights = 'none'"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(evaluation: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        settings(**evaluation)


def test_a_pause_would_throw_parked_episodes_away() -> None:
    with pytest.raises(ConfigError, match=r"evaluation.weights = 'pause': .* between segments; set it to"):
        config(evaluation={**EVALUATION, "weights": "pause"}, rollout={"segment_steps": 8})
    config(evaluation={**EVALUATION, "weights": "second_copy"}, rollout={"segment_steps": 8})


def test_a_damaged_list_is_named(tmp_path: Path) -> None:
    (tmp_path / "evaluations.json").write_text("[{")
    with pytest.raises(RunFolderError, match=r"evaluations.json is damaged .*; remove it to continue without it"):
        BestCheckpoints(tmp_path, 1)


class CutSettings(GymnasiumSettings):
    """CartPole whose user presses Ctrl-C when the episode with this seed begins, once per `marker`."""

    type: Literal["tests.pipeline.test_background:CutSettings"] = "tests.pipeline.test_background:CutSettings"  # type: ignore[assignment]
    seed: int = 0
    marker: str = ""

    def build(self, rows: int) -> Cut:
        return Cut(self, rows)


class Cut(GymnasiumBatch):
    def __init__(self, settings: CutSettings, rows: int) -> None:
        super().__init__(settings, rows)
        self._seed, self._marker = settings.seed, settings.marker

    def reset(self, rows: Any, tasks: Any, seeds: Any) -> None:
        if self._seed in seeds and once(self._marker):
            signal.raise_signal(signal.SIGINT)
        super().reset(rows, tasks, seeds)


@pytest.mark.parametrize("weights", BY_WAY)
@pytest.mark.parametrize("episode", [1, 39], ids=["while it trains", "when it has trained"])
def test_a_run_that_is_cut_in_an_evaluation_goes_on_and_evaluates(weights: str, episode: int, tmp_path: Path) -> None:
    """One row is still busy with the first evaluation when training ends, but for `pause`."""
    wanted = held_out(40, EVALUATION["seed"], 1, greedy=True)[episode].seed
    env = {"type": CutSettings.model_fields["type"].default, "id": "CartPole-v1", "max_steps": 40}
    changes: dict[str, Any] = {
        "env": {**env, "seed": wanted, "marker": str(tmp_path / "cut")},
        "evaluation": {**EVALUATION, "weights": weights, "every_episodes": 40, "rows": 1},
        "training": {"versions": 4},
    }
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        train(validate_run(config(**changes)), folder)
    assert (tmp_path / "cut").exists()
    assert not (folder / "summary.json").exists()
    ran = json.loads((max((folder / STATES).glob("run-*")) / "run.json").read_text())
    assert (ran["version"] == 4) is (episode == 39 and weights != "pause")
    summary = train(validate_run(config(**changes, resume=str(folder))), folder)
    assert summary["ledger"]["trained"] == 40
    again = [entry["version"] for entry in listed(folder)]
    assert again == [] if ran["version"] == 4 else again in ([2], [3])
