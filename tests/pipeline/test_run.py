"""A whole run, from the recipe to its folder."""

from __future__ import annotations

import json
import signal
from shutil import rmtree
from typing import Literal

import pytest
import torch
import yaml
from tests.long import long
from tests.pipeline.runs import LOCKSTEP, config

from polyrhythm.cli.main import main
from polyrhythm.config.load import load_config
from polyrhythm.envs.gymnasium_env import GymnasiumBatch, GymnasiumSettings
from polyrhythm.errors import RunFolderError, RunHalted, StartError
from polyrhythm.pipeline.callbacks import Callbacks
from polyrhythm.pipeline.evaluation.episodes import held_out, tally
from polyrhythm.pipeline.evaluation.standalone import evaluate
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.persistence.checkpoints import load_policy
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.scheduler.records import SampleEvaluated
from polyrhythm.scheduler.samples.admission import Admission
from polyrhythm.scheduler.settings import SchedulerSettings
from polyrhythm.specs import Task
from polyrhythm.specs.hashing import library_seed


def test_two_versions_of_the_cartpole_recipe(tmp_path):
    config = load_config(
        "cartpole", ["launcher=inline", "training.versions=2", "evaluation.episodes=6", "evaluation.sampled=true"]
    )
    summary = train(validate_run(config), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert {"before", "after", "before_sampled", "after_sampled"} <= summary.keys()
    assert {"successes", "episodes", "rate", "low", "high", "mean_return"} <= summary["after"].keys()
    assert summary["after"]["episodes"] == 6
    assert {"start", "evaluation_before", "rl", "evaluation_after", "total"} == summary["wall_s"].keys()
    assert summary["transitions_per_s"] > 0
    assert all(0 < share <= 1 for share in summary["utilisation"].values())
    assert sum(summary["utilisation"].values()) <= 1, "one thread"
    moved = {who: {kind: one["versions"] for kind, one in own.items()} for who, own in summary["weights"].items()}
    each = 1 + config.training.versions  # those of the seed too
    assert moved == {"generator-0": {"reference": each, "apply": each}, "trainer": {"published": each}}
    assert summary["lag"]["max"] <= config.freshness.max_lag
    assert summary["ledger"]["trained"] == 2 * config.training.batch_size == sum(summary["lag"]["counts"].values())

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 0, 0, 1, 2, 2], "two evaluations, the updates, two evaluations"
    by_step = [set(line) - {"step", "time_s"} for line in lines]
    assert not (by_step[0] & by_step[1] | (by_step[0] | by_step[1]) & by_step[2]), "no name twice at one step"
    times = [line["time_s"] for line in lines]
    assert times == sorted(times), "one clock for all"
    for place, name in ((4, "after"), (5, "after_sampled")):
        way = "sampled" if name.endswith("sampled") else "greedy"
        measured = {part: lines[place][f"evaluation/{way}/{part}"] for part in ("rate", "low", "high", "mean_return")}
        assert measured == {part: summary[name][part] for part in measured}
    lines = lines[2:4]
    assert {
        "train/actor/policy_loss",
        "env/return",
        "staleness/lag_mean",
        "samples/trained",
        "throughput/transitions_per_s",
    } <= lines[0].keys()
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())}
    assert {"update 0", "publish 1", "apply 1", "stepping", "resetting", "generator", "in_batch"} <= names
    assert json.loads((tmp_path / "ledger.json").read_text()) == summary["ledger"]
    assert any((tmp_path / "tensorboard").iterdir())
    assert load_config(tmp_path / "config.yaml") == config

    result = evaluate(tmp_path)
    assert {name: result[name] for name in summary["after"]} == summary["after"]
    assert (result["version"], result["episodes"]) == (2, 6)
    assert evaluate(tmp_path / "policy.pt", 3, 1, greedy=False)["episodes"] == 3
    (tmp_path / "policy.pt").unlink()
    assert evaluate(tmp_path) == result, "the newest checkpoint's weights"
    rmtree(tmp_path / "checkpoints")
    with pytest.raises(RunFolderError, match=r"holds no policy\.pt and no whole checkpoint"):
        evaluate(tmp_path, 6, 0, greedy=True)


def test_a_run_without_training_measures_what_it_begins_with(tmp_path):
    summary = train(
        validate_run(load_config("cartpole", ["launcher=inline", "training.versions=0", "evaluation.episodes=4"])),
        tmp_path,
    )
    assert summary["before"]["episodes"] == 4
    assert "after" not in summary
    assert evaluate(tmp_path, 4, 1_000_000_000, greedy=True)["mean_return"] == summary["before"]["mean_return"]


def test_the_weights_file_is_plain_data(tmp_path):
    train(
        validate_run(load_config("cartpole", ["launcher=inline", "training.versions=0", "evaluation.episodes=0"])),
        tmp_path,
    )
    content = torch.load(tmp_path / "policy.pt", weights_only=True)
    assert content["config"]["name"] == "cartpole"


def test_a_folder_without_weights_and_a_damaged_file_are_refused(tmp_path):
    with pytest.raises(RunFolderError, match=r"holds no policy\.pt: the run did not get that far"):
        evaluate(tmp_path, 1, 0, greedy=True)
    (tmp_path / "policy.pt").write_bytes(b"rubbish")
    with pytest.raises(RunFolderError, match="cannot be read"):
        evaluate(tmp_path, 1, 0, greedy=True)


def test_held_out_episodes_are_dealt_over_tasks_and_never_trained_on():
    episodes = held_out(7, seed=0, tasks=3, greedy=True)
    assert [episode.task for episode in episodes] == [0, 1, 2, 0, 1, 2, 0]
    assert all(episode.instruction == episode.task for episode in episodes)
    assert episodes == held_out(9, seed=0, tasks=3, greedy=True)[:7]
    swapped = held_out(3, seed=0, tasks=3, greedy=True, swap=True)
    assert [episode.instruction for episode in swapped] == [1, 2, 0]
    evaluated = [episode.seed for episode in held_out(10_000, seed=0, tasks=3, greedy=True)]
    trained = [Admission(SchedulerSettings(batch_size=2)).start_of(group)[1] for group in range(10_000)]
    for seeds in (trained, evaluated), (map(library_seed, trained), map(library_seed, evaluated)):
        assert not set.intersection(*map(set, seeds))


def test_a_tally_has_intervals_and_tasks():
    results = [SampleEvaluated("e", i % 2, i % 2, True, i % 4 == 0, float(i), 0) for i in range(8)]
    total = tally(results, [Task("a", "a"), Task("b", "b")])
    assert (total["successes"], total["episodes"], total["rate"], total["mean_return"]) == (2, 8, 0.25, 3.5)
    assert total["low"] < 0.25 < total["high"]
    assert total["tasks"]["b"]["successes"] == 0
    assert "tasks" not in tally(results, [Task("a", "a")])
    assert "dropped" not in tally(results, [Task("a", "a")], 8)
    assert tally(results, [Task("a", "a")], 10)["dropped"] == 2
    with pytest.raises(RunHalted, match="dropped"):
        tally([], [Task("a", "a")])
    with pytest.raises(RunHalted, match="an evaluation episode of a has return nan: the environment's reward is NaN"):
        tally([SampleEvaluated("e", 0, 0, True, False, float("nan"), 0)], [Task("a", "a")])


class InterruptedSettings(GymnasiumSettings):
    """CartPole whose user presses Ctrl-C at these env steps, counted over all parts of a run."""

    type: Literal["tests.pipeline.test_run:InterruptedSettings"] = "tests.pipeline.test_run:InterruptedSettings"
    at: tuple[int, ...] = ()

    def build(self, rows):
        return Interrupted(self, rows)


class Interrupted(GymnasiumBatch):
    steps = 0

    def __init__(self, settings, rows):
        super().__init__(settings, rows)
        self._at = settings.at

    def step(self, rows, actions):
        Interrupted.steps += 1
        for _ in range(self._at.count(Interrupted.steps)):
            signal.raise_signal(signal.SIGINT)
        return super().step(rows, actions)


class Recipe:
    """A lock-step run of `versions` that is interrupted `at` some env steps."""

    def __init__(self, folder, at=(), versions=50):
        Interrupted.steps = 0
        env = {"type": "tests.pipeline.test_run:InterruptedSettings", "id": "CartPole-v1", "max_steps": 40, "at": at}
        training = {**LOCKSTEP["training"], "versions": versions}
        self.path, self.folder = folder / "recipe.yaml", folder / "run"
        folder.mkdir(exist_ok=True)
        self.path.write_text(yaml.safe_dump({**LOCKSTEP, "env": env, "training": training}))

    def train(self, *overrides):
        return main(["train", str(self.path), "--out", str(self.folder), *overrides])

    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())

    def steps(self):
        return [json.loads(line)["step"] for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def weights(self):
        return load_policy(self.folder)[1:]


@pytest.mark.parametrize(("at", "versions"), [(20, {0}), (400, set(range(1, 40)))], ids=["at-first", "later"])
def test_an_interrupted_run_leaves_the_newest_whole_weights(at, versions, tmp_path, capsys):
    recipe = Recipe(tmp_path, (at, at))
    assert recipe.train() == 130
    assert f"to resume: polyrhythm resume {recipe.folder}\n" in capsys.readouterr().err
    assert not (recipe.folder / "summary.json").exists()
    result = evaluate(recipe.folder, 4, 0, greedy=True)
    assert result["version"] in versions


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 12 versions that nothing interrupts."""
    recipe = Recipe(tmp_path_factory.mktemp("whole") / "whole", (), 12)
    assert recipe.train() == 0
    return recipe


@pytest.mark.parametrize(
    "at",
    [
        pytest.param((150,), id="once", marks=long(3, "cut once")),
        pytest.param((150, 260), id="twice"),
        pytest.param((150, 150), id="at once", marks=long(4, "cut without a farewell")),
    ],
)
def test_a_run_that_was_cut_and_goes_on_learns_what_a_whole_one_does(at, whole, tmp_path):
    """Two signals at once end it without a farewell, so it has to go back to what was saved before.

    Weights are equal but for rounding: the rest of a batch that was cut is computed in smaller passes.
    """
    cut = Recipe(tmp_path / "cut", at, 12)
    assert cut.train("shutdown_s=60") == 130
    parts = 1
    while not (cut.folder / "summary.json").exists():
        assert cut.train("resume=auto", "shutdown_s=60") in (0, 130)
        parts += 1
    assert parts == (3 if at == (150, 260) else 2)
    version, found = reversed(cut.weights())
    assert version == 12
    for name, tensor in whole.weights()[0].items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4)
    assert cut.steps() == whole.steps() == list(range(12))
    assert cut.summary()["lag"]["counts"] == whole.summary()["lag"]["counts"] == {"0": 120}
    assert cut.summary()["ledger"]["trained"] == 120
    assert len(list(cut.folder.glob("trace*.json"))) == parts


class FailsAtItsEnd(Observer):
    def finish(self, now):
        raise RuntimeError("cannot finish")


class Finishes(Observer):
    finished = False

    def finish(self, now):
        self.finished = True


class Watches:
    """A display that adds observers of its own when training begins."""

    def __init__(self, *observers):
        self.observers = observers

    def phase(self, name, began):
        pass

    def watch(self, pipeline, parts=()):
        self.loop = pipeline.loop

    def train(self, updates, episodes, totals, lags, after_s):
        self.loop.add_observers(*self.observers)


class CannotStart(Watches):
    """A run whose stations cannot be started."""

    def watch(self, pipeline, parts=()):
        pipeline.loop.start = self.refuse

    def refuse(self):
        raise StartError("no room for the stations")


@pytest.mark.parametrize("ends", [ValueError("it is enough"), None], ids=["ended", "complete"])
def test_observers_are_finished_and_the_policy_is_written_whatever_one_of_them_raises(ends, tmp_path, caplog):
    def end(metrics):
        if ends is not None:
            raise ends

    last = Finishes()
    with pytest.raises(RuntimeError if ends is None else ValueError, match=str(ends or "cannot finish")):
        train(validate_run(config()), tmp_path, Watches(FailsAtItsEnd(), last), Callbacks(end))
    assert last.finished
    assert json.loads((tmp_path / "trace.json").read_text())
    assert load_policy(tmp_path)[2] >= 1
    assert ("an observer failed while the run ended" in caplog.messages) == (ends is not None)


def test_a_resumed_part_that_cannot_start_closes_its_timeline(tmp_path):
    def enough(metrics):
        raise ValueError("it is enough")

    with pytest.raises(ValueError, match="it is enough"):
        train(validate_run(config()), tmp_path, callbacks=Callbacks(enough))
    policy = (tmp_path / "policy.pt").read_bytes()
    with pytest.raises(StartError, match="no room"):
        train(validate_run(config(), begun=True), tmp_path, CannotStart())
    assert isinstance(json.loads((tmp_path / "trace-2.json").read_text()), list)
    assert (tmp_path / "policy.pt").read_bytes() == policy


def test_a_run_whose_samples_were_too_old_ends_in_an_error(tmp_path, capsys):
    recipe = Recipe(tmp_path, (150,), 12)
    assert recipe.train("shutdown_s=60") == 130
    saved = max((recipe.folder / "checkpoints").glob("run-*/run.json"))
    content = json.loads(saved.read_text())
    del content["crc32"]
    content["counts"]["lags"]["3"] = 1  # as if one sample of the first part had been older than the settings allow
    saved.write_text(json.dumps(content))
    assert recipe.train("resume=auto") == 2
    assert "the promise of freshness.max_lag = 0 (bound: sample) is broken" in capsys.readouterr().err
    assert not (recipe.folder / "summary.json").exists()


def test_weights_of_other_settings_are_refused(tmp_path):
    train(
        validate_run(load_config("cartpole", ["launcher=inline", "training.versions=0", "evaluation.episodes=0"])),
        tmp_path,
    )
    content = torch.load(tmp_path / "policy.pt", weights_only=True)
    content["config"]["policy"]["hidden"] = 32
    torch.save(content, tmp_path / "policy.pt")
    with pytest.raises(RunFolderError, match="do not fit the policy"):
        evaluate(tmp_path, 1, 0, greedy=True)


@pytest.mark.sim
@pytest.mark.parametrize(
    "recipe",
    ["quickstart", *(pytest.param(f"quickstart_{x}", marks=pytest.mark.slow) for x in ("flow", "pi0", "oft"))],
)
def test_two_versions_of_the_quickstart_recipe(recipe, tmp_path, simulator):
    """All five phases on the real simulator, as small as they can be."""
    small = {
        "training.versions": 2,
        "training.mini_batch_samples": 4,
        "training.critic_warmup_updates": 1,
        "env.tasks": "[coffee-button-v3, handle-press-v3]",
        "env.max_steps": 64,
        "rollout.rows": 4,
        "rollout.sharding": "even:2",
        "evaluation.episodes": 2,
        "demonstrations.episodes_per_task": 1,
        "supervised.steps": 2,
        "supervised.batch_size": 16,
        "supervised.warmup_steps": 1,
    }
    overrides = [f"{path}={value}" for path, value in small.items()]
    config = load_config(recipe, ["launcher=inline", *overrides])
    summary = train(validate_run(config), tmp_path)
    assert list(summary["wall_s"]) == [
        *("demonstrations", "supervised", "start", "evaluation_before", "rl", "evaluation_after", "total")
    ]
    assert summary["ledger"]["trained"] == 8
    assert summary["after"]["episodes"] == summary["before_sampled"]["episodes"] == 2
    assert set(summary["after"]["tasks"]) == set(config.env.tasks)
    assert (tmp_path / "demonstrations.npz").is_file()
    names = {name for line in (tmp_path / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert {"train/sft/loss", "evaluation/greedy/rate", "env/return", "train/critic/value_loss"} <= names
    if recipe == "quickstart":
        result = evaluate(tmp_path)
        assert {name: result[name] for name in summary["after"]} == summary["after"]


@pytest.mark.sim
def test_two_versions_of_the_reach_recipe(tmp_path, simulator):
    """From the state alone: every episode lasts as long as it may, and earns something at every step."""
    small = ("training.versions=2", "training.mini_batch_samples=4", "rollout.rows=4", "evaluation.episodes=4")
    summary = train(validate_run(load_config("reach", ["launcher=inline", *small])), tmp_path)
    assert summary["ledger"]["trained"] == 8
    assert summary["stations"]["simulator-0"]["env_steps"] == (4 + 8) * 100, "before, and in training"
    assert 0 < summary["before"]["mean_return"] < 100
    assert summary["after"]["episodes"] == 4


def test_two_versions_of_the_latency_recipe(tmp_path):
    summary = train(validate_run(load_config("latency", ["training.versions=2", "launcher=inline"])), tmp_path)
    assert summary["ledger"]["trained"] == 32
    assert len(summary["utilisation"]) == 5
