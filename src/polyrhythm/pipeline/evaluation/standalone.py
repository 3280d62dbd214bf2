"""Evaluates a trained policy with the stations of a run, without training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, NamedTuple

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.running import JoinSettings
from polyrhythm.errors import RunFolderError, RunHalted
from polyrhythm.observe.intervals import wilson
from polyrhythm.observe.run_folder import take_file
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.episodes import conversations, held_out, per_episode, tally, tally_all
from polyrhythm.pipeline.evaluation.overrides import (
    acts_greedily,
    changed_env,
    sampling_of,
    with_overrides,
    with_variants,
)
from polyrhythm.pipeline.hooks import Display
from polyrhythm.pipeline.persistence.checkpoints import BEST_FILE, load_policy
from polyrhythm.pipeline.persistence.resume_rules import refuse_missing_folders
from polyrhythm.pipeline.validation.check import refuse_swapping, validate_run
from polyrhythm.plugin import load
from polyrhythm.policies.base import as_module
from polyrhythm.policies.form import load_published
from polyrhythm.scheduler.records import Episode, SampleEvaluated
from polyrhythm.specs import EnvSpec

log = logging.getLogger(__name__)

#: Default number of episodes, if neither the caller nor the run's configuration sets it.
EPISODES = 128


class Video(NamedTuple):
    """A video to write. file: a new .gif or .mp4; episodes: number of first episodes to show."""

    file: Path
    episodes: int = 9

    def of_variant(self, name: str | None) -> Video:
        """The video of a variant, whose name is appended to the file's stem; None: the environment without a
        variant."""
        return self if name is None else self._replace(file=self.file.with_stem(f"{self.file.stem}-{name}"))


class Conditions(NamedTuple):
    """Conditions of an evaluation; None takes the run's own setting.

    swap_instructions: show each task the next one's instruction; a policy that follows instructions then fails.
    variants: names of environment variants, or `all`; each plays the same episodes in addition. conversations: number
    of first episodes whose transcript is in the result. samples: sampled episodes of each initial state.
    """

    swap_instructions: bool = False
    variants: tuple[str, ...] = ()
    conversations: int | None = None
    samples: int | None = None


def evaluate(
    path: Path,
    episodes: int | None = None,
    seed: int | None = None,
    greedy: bool | None = None,
    conditions: Conditions | None = None,
    live: Display | None = None,
    video: Video | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Evaluate the policy of a run folder or checkpoint: success rate with its Wilson 95% interval, and mean return.

    episodes: initial states, spread over the tasks, derived from `seed` and never seen in training; both default to the
    run's own evaluation, which reproduces a finished run's `after`. greedy: act without noise; None: yes, unless
    overrides have a sampling setting or there are several samples. live: progress display. video: shows the first
    episodes; each variant has its own file. overrides: `policy.checkpoint=FOLDER` where the released folder has moved,
    settings of the environment, and of a language model the engine and the sampling (`evaluation.overrides`).

    The result has the fields of `episodes.tally`, `per_episode`, and where they apply: `variants` (each with kind, what
    differs and its result), `kinds` (results by kind, if one has several variants), `conversations`, `sampling`, `env`.
    Success is None if no episode reported it. RunFolderError: there is no policy at `path`.
    """
    config, weights, version = load_policy(path)
    conditions = conditions or Conditions()
    config, acts = with_overrides(config, overrides), acts_greedily(greedy, overrides, conditions.samples)
    refuse_missing_folders(config, "eval", path)
    swap, variants, shown, samples = conditions
    samples = 1 if acts else samples or config.evaluation.samples
    varied = with_variants(config, variants)
    if video:
        load("pipeline", "video").check_format(video.file)
        for name in (None, *varied):
            take_file(video.of_variant(name).file)
    seed = config.evaluation.seed if seed is None else seed
    count = episodes or config.evaluation.episodes or EPISODES
    if path.name == BEST_FILE and seed == config.evaluation.seed:
        log.warning(
            "%s was chosen by its success in these episodes (seed %d), so the result is biased upward; for an unbiased "
            "one give another --seed",
            BEST_FILE,
            seed,
        )

    said = config.evaluation.conversations if shown is None else shown

    def choose(spec: EnvSpec) -> list[Episode]:
        if swap:
            refuse_swapping(spec)
        return held_out(
            count,
            seed,
            len(spec.tasks),
            greedy=acts,
            swap=swap,
            initial_states=spec.initial_states,
            shown=said,
            samples=samples,
        )

    def measure(config: RunConfig, name: str | None) -> tuple[dict[str, Any], list[SampleEvaluated]]:
        return _measure(config, weights, path, choose, live, video.of_variant(name) if video else None)

    found, _ = measure(config, None)
    by_kind: dict[str, list[list[SampleEvaluated]]] = {}
    for name, (variant, changed) in varied.items():
        log.info("variant %s: %s", name, variant.what)
        result, results = measure(changed, name)
        by_kind.setdefault(variant.kind, []).append(results)
        found.setdefault("variants", {})[name] = {"kind": variant.kind, "what": variant.what, **result}
    several = {kind: parts for kind, parts in by_kind.items() if len(parts) > 1}
    if several:
        found["kinds"] = {kind: _tally_kind(parts) for kind, parts in several.items()}
    told: dict[str, Any] = {"instructions": "exchanged"} if swap else {}
    sampling = sampling_of(config, greedy=acts)
    told |= changed_env(overrides)
    return {**found, **told, "greedy": acts, **sampling, "seed": seed, "version": version}


def _tally_kind(variants: Sequence[Sequence[SampleEvaluated]]) -> dict[str, Any]:
    """Pooled result over variants that play the same episodes.

    Episodes of different variants, and samples of one initial state, are not independent; the interval is therefore
    computed for as many episodes as one variant has initial states.
    """
    pooled = tally_all([result for results in variants for result in results])
    if pooled["rate"] is None:
        return pooled
    distinct = max(len({(result.task, result.seed) for result in results}) for results in variants)
    interval = wilson(round(pooled["rate"] * distinct), distinct)
    return {**pooled, "low": interval.low, "high": interval.high}


def without_joining(config: RunConfig) -> RunConfig:
    """The configuration without joining simulators: an evaluation opens no ports and waits for no remote simulator."""
    rollout = config.rollout.model_copy(update={"simulators": max(1, config.rollout.simulators)})
    return config.model_copy(update={"join": JoinSettings(), "rollout": rollout})


def _measure(
    config: RunConfig,
    weights: Mapping[str, Any],
    path: Path,
    choose: Callable[[EnvSpec], list[Episode]],
    live: Display | None,
    video: Video | None,
) -> tuple[dict[str, Any], list[SampleEvaluated]]:
    config = without_joining(config)
    _, spec, policy = validate_run(config, trainer=False, begun=True)
    wanted = choose(spec)
    try:
        load_published(as_module(policy), weights)
    except ValueError as error:
        raise RunFolderError(f"{path}: {error}; these weights belong to other settings, name another folder") from error
    if live:
        live.phase("evaluation", time.monotonic())
    write = (
        load("pipeline", "video").film(config, policy, spec, wanted[: video.episodes], video.file) if video else None
    )
    with (
        _log_folder() as folder,
        closing(build_pipeline(RunContext(config, policy, folder, trainer=False))) as pipeline,
    ):
        if live:
            live.watch(pipeline)
        results = pipeline.evaluate("evaluation", wanted)
    found = tally(results, spec.tasks, len(wanted))
    found["per_episode"] = per_episode(wanted, results, spec.tasks)
    if said := conversations(wanted, results, spec):
        found["conversations"] = said
    if write is not None:
        found["video"] = write(measured=found["rate"] is not None)
    return found, results


@contextmanager
def _log_folder() -> Iterator[Path]:
    """A temporary folder for the stations' logs; kept only if the error that ends the block names it."""
    folder, named = Path(mkdtemp(prefix="polyrhythm-")), False
    try:
        yield folder
    except RunHalted as error:
        named = str(folder) in str(error)
        raise
    finally:
        if not named:
            rmtree(folder)
