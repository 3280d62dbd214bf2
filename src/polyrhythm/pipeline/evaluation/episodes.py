"""Chooses the held-out episodes of an evaluation and summarizes their results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from statistics import fmean
from typing import Any

from polyrhythm.errors import RunHalted
from polyrhythm.observe.intervals import of_samples, success_rate
from polyrhythm.scheduler.records import Episode, SampleEvaluated
from polyrhythm.scheduler.rollout.evaluation import noise_stream
from polyrhythm.specs import EnvSpec, Task
from polyrhythm.specs.hashing import mix, seed_in_state, split_seed

#: Hash domain that separates held-out seeds from those of training (domains 1 and 2) and of demonstrations.
_DOMAIN = 4


def held_out(
    count: int,
    seed: int,
    tasks: int,
    *,
    greedy: bool,
    swap: bool = False,
    initial_states: int = 0,
    shown: int = 0,
    samples: int = 1,
) -> list[Episode]:
    """`samples` episodes of each of `count` initial states, which are spread over the tasks and determined by the seed.

    The initial state of episode i is a hash of (seed, i) in a domain that training does not use. With `initial_states`
    fixed ones (`EnvSpec.initial_states`) each task takes them in turn, as benchmarks prescribe: tasks × initial_states
    episodes take each once. swap: show each task the next one's instruction; a policy that follows instructions then
    fails. shown: number of first states whose first sample records its conversation.
    """
    seeds = [split_seed(mix(seed, _DOMAIN, index), held_out=True) for index in range(count)]
    if initial_states:
        seeds = [seed_in_state(own, index // tasks, initial_states) for index, own in enumerate(seeds)]
    return [
        Episode(
            task=index % tasks,
            instruction=(index + swap) % tasks,
            seed=seeds[index],
            greedy=greedy,
            shown=index < shown and sample == 0,
            sample=sample,
        )
        for index in range(count)
        for sample in range(samples)
    ]


def tally(results: Iterable[SampleEvaluated], tasks: Sequence[Task], requested: int = 0) -> dict[str, Any]:
    """Summarize the results of one action mode.

    successes, episodes, rate, low, high (Wilson 95%), mean_return. If no episode reported success, the success fields
    are None; otherwise an episode without a report counts as a failure. `metrics`: means of the environment's own
    metrics, if any. `at`: mean@n and pass@k (`observe.intervals.of_samples`), if initial states have several samples;
    low and high are then those of mean@n. `tasks`, `suites`: the same by task name and by `Task.suite`, if there are
    several. `dropped`: number of `requested` episodes that failed and are missing, if any. RunHalted: every episode was
    dropped, or a return is not finite.
    """
    listed = list(results)
    if not listed:
        raise RunHalted("every evaluation episode was dropped; see the log for why")
    odd = next((result for result in listed if not math.isfinite(result.episode_return)), None)
    if odd is not None:
        raise RunHalted(
            f"an evaluation episode of {tasks[odd.task].name} has return {odd.episode_return}: the environment's "
            "reward is NaN or infinite; check what its step returns"
        )
    total = _with_samples(listed)
    if requested > len(listed):
        total["dropped"] = requested - len(listed)
    if len(tasks) > 1:
        by_task = {task.name: [r for r in listed if r.task == index] for index, task in enumerate(tasks)}
        total["tasks"] = {name: _with_samples(part) for name, part in by_task.items() if part}
    if len(suites := dict.fromkeys(task.suite for task in tasks)) > 1:
        by_suite = {suite: [r for r in listed if tasks[r.task].suite == suite] for suite in suites}
        total["suites"] = {suite or "others": _with_samples(part) for suite, part in by_suite.items() if part}
    return total


def per_episode(
    episodes: Sequence[Episode], results: Iterable[SampleEvaluated], tasks: Sequence[Task]
) -> list[dict[str, Any]]:
    """One entry for each completed episode, in the order of `episodes` (all of one action mode).

    index: of the held-out initial state; sample: number of the state's sample; seed; task; greedy; success: None if not
    reported; return; steps: primitive env steps; metrics: the environment's own, if any. Dropped episodes are missing.
    """
    return [
        {
            "index": index,
            "sample": episode.sample,
            "seed": episode.seed,
            "task": tasks[episode.task].name,
            "greedy": episode.greedy,
            "success": result.success,
            "return": result.episode_return,
            "steps": result.env_steps,
            **({"metrics": dict(result.metrics)} if result.metrics else {}),
        }
        for index, episode, result in _ended(episodes, results)
    ]


def _ended(
    episodes: Sequence[Episode], results: Iterable[SampleEvaluated]
) -> Iterator[tuple[int, Episode, SampleEvaluated]]:
    """Each completed episode with the index of its initial state and its result, in the order of `episodes`."""
    found, index = {result.noise: result for result in results}, -1
    for episode in episodes:
        index += episode.sample == 0
        if (result := found.get(noise_stream(episode))) is not None:
            yield index, episode, result


def conversations(
    episodes: Sequence[Episode], results: Iterable[SampleEvaluated], spec: EnvSpec
) -> list[dict[str, Any]]:
    """Recorded conversations, in the order of `episodes` (all of one action mode).

    index, task, seed: as in `per_episode`; prompt; turns: each the policy's message and the environment's reply;
    success: None if not reported; return; metrics: the environment's own.
    """
    return [
        {
            "index": index,
            "task": spec.tasks[episode.task].name,
            "seed": episode.seed,
            "prompt": result.texts[0],
            "turns": [
                {"message": message, "reply": reply}
                for message, reply in zip_longest(result.texts[1::2], result.texts[2::2], fillvalue="")
            ],
            "success": result.success,
            "return": result.episode_return,
            "metrics": dict(result.metrics),
        }
        for index, episode, result in _ended(episodes, results)
        if result.texts
    ]


def _with_samples(results: Sequence[SampleEvaluated]) -> dict[str, Any]:
    found = tally_all(results)
    by_start: dict[tuple[int, int], list[bool]] = {}
    for result in results:
        by_start.setdefault((result.task, result.seed), []).append(bool(result.success))
    if found["rate"] is None or len(by_start) == len(results):
        return found
    at = of_samples(list(by_start.values()))
    mean = next(iter(at.values()))
    return {**found, "low": mean["low"], "high": mean["high"], "at": at}


def tally_all(results: Sequence[SampleEvaluated]) -> dict[str, Any]:
    """Summary of at least one episode, without a breakdown by task."""
    interval = success_rate([result.success for result in results])
    mean_return = sum(result.episode_return for result in results) / len(results)
    means = mean_metrics(result.metrics for result in results)
    return {**interval, "mean_return": mean_return, **({"metrics": means} if means else {})}


def mean_metrics(episodes: Iterable[Sequence[tuple[str, float]]]) -> dict[str, float]:
    """Mean of each of the environment's own metrics over the episodes that report it, by name."""
    found: dict[str, list[float]] = {}
    for metrics in episodes:
        for name, number in metrics:
            found.setdefault(name, []).append(number)
    return {name: _mean(numbers) for name, numbers in sorted(found.items())}


def _mean(numbers: Sequence[float]) -> float:
    """Mean that is exact for equal numbers and does not overflow."""
    try:
        return fmean(numbers)
    except OverflowError:  # of the sum, not of the mean
        return sum(x / len(numbers) for x in numbers)
