"""A run from its configuration to its summary.

    demonstrations → supervised warm start → evaluation → reinforcement learning → the same evaluation

Everything lands in the run's folder: config.yaml, metrics.jsonl, tensorboard/, trace.json, demonstrations.npz,
policy.pt, ledger.json and, last, summary.json. A run that is interrupted leaves the newest weights in policy.pt, so
that it can be evaluated.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polyrhythm.config.load import save_config
from polyrhythm.config.schema import RunConfig
from polyrhythm.envs.base import EnvBatch
from polyrhythm.observe import MetricsWriter, TraceWriter
from polyrhythm.pipeline.build import Pipeline, build_envs, build_pipeline
from polyrhythm.pipeline.check import Checked
from polyrhythm.pipeline.checkpoints import POLICY_FILE, save_policy
from polyrhythm.pipeline.demos import demonstrate
from polyrhythm.pipeline.episodes import held_out, tally
from polyrhythm.pipeline.observers import Episodes, Lags, Progress, Timeline, UpdateMetrics
from polyrhythm.policies.base import Policy
from polyrhythm.specs import Task
from polyrhythm.stations.slot import StepSettings
from polyrhythm.training.sft import SupervisedLearner
from polyrhythm.training.steps import finish

log = logging.getLogger(__name__)

#: What of an evaluation's tally goes to the metrics.
_MEASURED = ("rate", "low", "high", "mean_return")


class Phases:
    """Wall time of each phase, in order."""

    def __init__(self) -> None:
        self.wall_s: dict[str, float] = {}
        self.began = time.monotonic()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        log.info("%s …", name.replace("_", " "))
        begin = time.monotonic()
        yield
        self.wall_s[name] = time.monotonic() - begin
        log.info("%s: %.1f s", name.replace("_", " "), self.wall_s[name])

    def summary(self) -> dict[str, float]:
        """Seconds by phase, and `total` since the start."""
        return {**self.wall_s, "total": time.monotonic() - self.began}


def train(checked: Checked, folder: Path) -> dict[str, Any]:
    """Run all phases that the configuration asks for; the content of summary.json.

    checked: what `pipeline.check` gave; nothing is left to refuse, so the folder may be made before. Its policy is
    trained in place. Raises RunHalted when the run cannot go on.
    """
    config, spec, policy = checked
    phases = Phases()
    save_config(config, folder / "config.yaml")
    with phases("start"):
        envs = build_envs(config)
    with MetricsWriter(folder) as metrics, TraceWriter(folder / "trace.json") as trace:
        _warm_start(config, folder, envs[0], policy, phases, metrics)
        save_policy(policy.state_dict(), config, folder / POLICY_FILE, 0)
        pipeline = build_pipeline(config, envs, policy)
        try:
            summary = _learn(config, folder, pipeline, phases, (metrics, trace), spec.tasks)
        finally:
            pipeline.close()
    summary["wall_s"] = phases.summary()
    _write_json(folder / "summary.json", summary)
    return summary


def _warm_start(
    config: RunConfig, folder: Path, env: EnvBatch, policy: Policy, phases: Phases, metrics: MetricsWriter
) -> None:
    """Demonstrations, and the policy's imitation of them."""
    if config.demonstrations is None or config.supervised is None:
        return
    with phases("demonstrations"):
        step = StepSettings(policy.chunk, config.rollout.action_repeat)
        demonstrations = demonstrate(env, config.demonstrations, step)
        demonstrations.save(folder / "demonstrations.npz")
    with phases("supervised"):
        figures = finish(SupervisedLearner(policy, config.supervised, seed=config.seed).steps(demonstrations))
        metrics.log(0, figures, phases.summary()["total"])


def _learn(
    config: RunConfig,
    folder: Path,
    pipeline: Pipeline,
    phases: Phases,
    writers: tuple[MetricsWriter, TraceWriter],
    tasks: Sequence[Task],
) -> dict[str, Any]:
    """Evaluation, reinforcement learning, evaluation; the summary without wall times."""
    loop, launcher, versions = pipeline.loop, pipeline.launcher, config.training.versions
    summary = _evaluate(config, pipeline, phases, "before", tasks, writers[0])
    began, lags, episodes = loop.clock(), Lags(), Episodes(len(tasks))
    busy_before, done_before = dict(launcher.busy_s), launcher.transitions()
    metrics = UpdateMetrics(
        writers[0], loop.conductor.ledger, launcher.transitions, episodes, began=phases.began, now=began
    )
    updates = versions * config.freshness.sync_interval
    loop.observers += [episodes, metrics, lags, Timeline(writers[1], began), Progress(updates, episodes, began)]
    if versions:
        try:
            with phases("rl"):
                loop.train_until(versions)
        finally:
            _save_published(config, folder, pipeline)
        wall = phases.wall_s["rl"]
        loop.observers.clear()
        summary["transitions_per_s"] = (launcher.transitions() - done_before) / wall
        summary["utilisation"] = {name: (busy - busy_before[name]) / wall for name, busy in launcher.busy_s.items()}
        summary |= _evaluate(config, pipeline, phases, "after", tasks, writers[0])
    summary["lag"] = lags.summary()
    summary["ledger"] = loop.conductor.ledger.as_dict()
    summary["stations"] = launcher.statistics()
    _write_json(folder / "ledger.json", summary["ledger"])
    assert not loop.conductor.ledger.imbalance, f"the ledger does not balance: {summary['ledger']}"
    assert not launcher.payloads.leaked(), f"payloads were never released: {launcher.payloads.leaked()}"
    return summary


def _save_published(config: RunConfig, folder: Path, pipeline: Pipeline) -> None:
    """The newest published weights: whole even where an update was cut short or went wrong."""
    if pipeline.weights.newest >= 0:
        version, weights = pipeline.weights.fetch(pipeline.weights.newest)
        save_policy(weights, config, folder / POLICY_FILE, version)


def _evaluate(
    config: RunConfig, pipeline: Pipeline, phases: Phases, name: str, tasks: Sequence[Task], metrics: MetricsWriter
) -> dict[str, Any]:
    """{name: greedy tally, name_sampled: sampled tally}, of those asked for; the same seeds before and after.

    The metrics get them too, at the step of the version that was measured.
    """
    wanted = config.evaluation
    ways = [greedy for greedy, asked in ((True, wanted.greedy), (False, wanted.sampled)) if asked]
    if not wanted.episodes:
        return {}
    episodes = [
        episode for greedy in ways for episode in held_out(wanted.episodes, wanted.seed, len(tasks), greedy=greedy)
    ]
    with phases(f"evaluation_{name}"):
        results = pipeline.loop.evaluate(name, episodes)
    tallies = {}
    for greedy in ways:
        key = name if greedy else f"{name}_sampled"
        total = tallies[key] = tally([result for result in results if result.greedy == greedy], tasks)
        values = {f"evaluation/{'greedy' if greedy else 'sampled'}/{part}": total[part] for part in _MEASURED}
        metrics.log(results[0].version, values, phases.summary()["total"])
        log.info(
            "%s: return %.1f, success in %d of %d", key, total["mean_return"], total["successes"], total["episodes"]
        )
    return tallies


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
