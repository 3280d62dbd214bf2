"""Evaluates a trained policy with the stations of a run, without training.

Settings that it may override: the environment's, the locations of released folders, the engine that generates tokens,
and the sampling settings. None of them changes the policy's weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any, NamedTuple, cast

from polyrhythm.config.load import merge, parse_override, validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import StreamsBatching
from polyrhythm.config.sections.running import JoinSettings
from polyrhythm.envs.base import FullEnvSettings, Variant, traits_of
from polyrhythm.errors import ConfigError, RunFolderError, RunHalted, nearest
from polyrhythm.observe.intervals import wilson
from polyrhythm.observe.run_folder import find_run, run_of
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.episodes import conversations, held_out, per_episode, tally, tally_all
from polyrhythm.pipeline.hooks import Display, run_hooks
from polyrhythm.pipeline.persistence.checkpoints import BEST_FILE, load_policy
from polyrhythm.pipeline.persistence.resume_rules import (
    MOVABLE,
    movable,
    naming_where_it_began,
    refuse_missing_folders,
)
from polyrhythm.pipeline.validation.check import refuse_swapping, validate_run
from polyrhythm.plugin import load
from polyrhythm.policies.base import as_module
from polyrhythm.policies.form import load_published
from polyrhythm.policies.traits import SAMPLING, settings_traits
from polyrhythm.scheduler.records import Episode, SampleEvaluated
from polyrhythm.specs import EnvSpec

log = logging.getLogger(__name__)

#: Default number of episodes, if neither the caller nor the run's configuration sets it.
EPISODES = 128


class Video(NamedTuple):
    """A video to write. file: a new .gif or .mp4; episodes: number of first episodes to show; name: by which trackers
    get it."""

    file: Path
    episodes: int = 9
    name: str = "evaluation"

    @property
    def part(self) -> str:
        """Name of the plugin's part that writes it."""
        return "video"

    def of_variant(self, name: str | None, version: int) -> Video:  # noqa: ARG002
        """The video of a variant, whose name is appended to the file's stem; None: the environment without a
        variant."""
        if name is None:
            return self
        return self._replace(file=self.file.with_stem(f"{self.file.stem}-{name}"), name=name)


class Gallery(NamedTuple):
    """Episodes to keep in the folder of a run. path: the run, or a checkpoint in it; videos: number of first episodes
    that get a video, None for all; settings: that differ from the run's; variant: of the environment, "" for none;
    version: of the weights."""

    path: Path
    videos: int | None = None
    settings: str = ""
    variant: str = ""
    version: int = 0

    @property
    def part(self) -> str:
        return "gallery"

    def of_variant(self, name: str | None, version: int) -> Gallery:
        return self._replace(variant=name or "", version=version)


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
    video: Video | Gallery | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Evaluate the policy of a run folder or checkpoint: success rate with its Wilson 95% interval, and mean return.

    episodes: initial states, spread over the tasks, derived from `seed` and never seen in training; both default to the
    run's own evaluation, which reproduces a finished run's `after`. greedy: act without noise; None: yes, unless
    overrides have a sampling setting or there are several samples. live: progress display. video: a file that shows
    the first episodes, one for each variant, or the run's gallery. overrides: `policy.checkpoint=FOLDER` where the
    released folder has moved, settings of the environment, and of a language model the engine and the sampling
    (`with_overrides`).

    The result has the fields of `episodes.tally`, `per_episode`, and where they apply: `variants` (each with kind, what
    differs and its result), `kinds` (results by kind, if one has several variants), `conversations`, `sampling`, `env`.
    Success is None if no episode reported it. RunFolderError: there is no policy at `path`.
    """
    path, conditions = find_run(path), conditions or Conditions()
    with naming_where_it_began(path):
        config, weights, version = load_policy(path)
        config = with_overrides(config, overrides)
    acts = acts_greedily(greedy, overrides, conditions.samples)
    refuse_missing_folders(config, "eval", path)
    swap, variants, shown, samples = conditions
    samples = 1 if acts else samples or config.evaluation.samples
    varied = with_variants(config, variants)
    if video:
        for name in (None, *varied):
            load("pipeline", video.part).check(video.of_variant(name, version))
    own = config.evaluation
    seed, count = own.seed if seed is None else seed, episodes or own.episodes or EPISODES
    if path.name == BEST_FILE and seed == own.seed:
        log.warning(
            "%s was chosen by its success in these episodes (seed %d), so the result is biased upward; for an unbiased "
            "one give another --seed",
            BEST_FILE,
            seed,
        )

    said = own.conversations if shown is None else shown

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

    def measure(changed: RunConfig, name: str | None) -> tuple[dict[str, Any], list[SampleEvaluated]]:
        shown = video.of_variant(name, version) if video else None
        found, results = _measure(changed, weights, path, choose, live, shown)
        if shown:
            _pass_videos(config, path, version, found[shown.part].pop("files"))
        return found, results

    found, _ = measure(config, None)
    by_kind: dict[str, list[list[SampleEvaluated]]] = {}
    for name, (variant, changed) in varied.items():
        log.info("variant %s: %s", name, variant.what)
        result, results = measure(changed, name)
        by_kind.setdefault(variant.kind, []).append(results)
        found.setdefault("variants", {})[name] = {"kind": variant.kind, "what": variant.what, **result}
    if kinds := {kind: tally_kind(parts) for kind, parts in by_kind.items() if len(parts) > 1}:
        found["kinds"] = kinds
    told: dict[str, Any] = {
        "instructions": "exchanged" if swap else "",
        "env": [text.strip() for text in overrides if text.strip().startswith("env.")],
        "greedy": acts,
        "sampling": {
            name: getattr(config.policy, name) for name in settings_traits(config.policy).sampling if not acts
        },
    }
    found |= {name: value for name, value in told.items() if value or name == "greedy"}
    return {**found, "seed": seed, "version": version}


def _pass_videos(config: RunConfig, path: Path, version: int, files: Mapping[str, Path]) -> None:
    """Pass videos to the hooks, if the policy at `path` is that of a run."""
    if files and (folder := run_of(path)) is not None:
        for hooks in run_hooks():
            hooks.on_videos(config, folder, version, files)


def tally_kind(variants: Sequence[Sequence[SampleEvaluated]]) -> dict[str, Any]:
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
    video: Video | Gallery | None,
) -> tuple[dict[str, Any], list[SampleEvaluated]]:
    config = without_joining(config)
    with naming_where_it_began(path):
        _, spec, policy = validate_run(config, trainer=False, begun=True)
    wanted = choose(spec)
    try:
        load_published(as_module(policy), weights)
    except ValueError as error:
        raise RunFolderError(f"{path}: {error}; these weights belong to other settings, name another folder") from error
    if live:
        live.phase("evaluation", time.monotonic())
    write = load("pipeline", video.part).film(config, policy, spec, wanted, video) if video else None
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
    if video and write is not None:
        found[video.part] = write(found)
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


_ENGINE = "policy.engine"
#: Settings by which a language model's tokens are drawn.
_SAMPLING = tuple(f"policy.{name}" for name in SAMPLING)


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """A saved run's settings with these overrides.

    ConfigError: an override of another setting, or an engine that cannot load the run's weights or serve its batches.
    """
    if not overrides:
        return config
    saved = config.model_dump(mode="json")
    changes: dict[str, Any] = {}
    for text in overrides:  # merged first: an engine's type replaces the run's section, but not other overrides
        changes = merge(changes, parse_override(text))
    tree = merge(saved, changes)
    allowed = movable(saved["policy"], tree["policy"]) if isinstance(tree["policy"], dict) else frozenset()
    allowed |= {f"policy.{name}" for name in settings_traits(config.policy).sampling}
    named = {text.partition("=")[0].strip(): text for text in overrides}
    engine = [name for name in named if f"{name}.".startswith(f"{_ENGINE}.") and "engine" in saved["policy"]]
    for name, text in named.items():
        if name not in allowed and name not in engine and (not name.startswith("env.") or name == "env.type"):
            may = " and ".join(sorted(MOVABLE))
            raise ConfigError(
                f"{text}: the run has its own {name}; only env.SETTING may differ, {may} where they name folders, and "
                f"of a language model {', '.join((_ENGINE, *_SAMPLING))}"
            )
    found = validate(tree)
    return _with_engine(config, found, named[engine[0]]) if engine else found


def acts_greedily(greedy: bool | None, overrides: Sequence[str], samples: int | None) -> bool:
    """Whether the policy acts without noise.

    greedy: the caller's choice; None: greedy, unless a sampling setting or several samples are given. ConfigError: a
    given setting has no effect in the chosen mode.
    """
    given = [text for text in overrides if text.partition("=")[0].strip() in _SAMPLING]
    if samples is not None and samples > 1:
        if greedy:
            raise ConfigError(f"samples = {samples}: greedily all are equal; leave it out, or leave out greedy")
        greedy = False
    if greedy and given:
        raise ConfigError(
            f"{given[0]}: greedily the likeliest token is taken, whatever this says; leave it out, or sample "
            "(--sampled, greedy=False)"
        )
    return not given if greedy is None else greedy


def _with_engine(run: RunConfig, found: RunConfig, text: str) -> RunConfig:
    """Adapt the settings to the engine: a server serves one generator, and the evaluations of training are disabled."""
    engine = settings_traits(found.policy).engine
    if engine.fixed_weights and not settings_traits(run.policy).engine.fixed_weights:
        raise ConfigError(
            f"{text}: {engine.fixed_weights}, so the server cannot get the run's weights, and another policy would be "
            "evaluated; name the path of its server where it loads weights"
        )
    if engine.streams_only and not isinstance(found.batching, StreamsBatching):
        raise ConfigError(
            f"{text}: this engine answers streams, and the run has batching.type = {found.batching.type}; leave it out"
        )
    evaluation = found.evaluation.model_copy(update={"every": 0})
    rollout = found.rollout
    if engine.single:
        rollout = rollout.model_copy(update={"generators": 1})
    return found.model_copy(update={"evaluation": evaluation, "rollout": rollout})


#: Name that selects every variant.
ALL = "all"


def with_variants(config: RunConfig, names: Sequence[str]) -> dict[str, tuple[Variant, RunConfig]]:
    """The named variants, or all for `all`, each with the run's settings changed by it, in the order of `names`.

    ConfigError: the environment has no variants, or lacks a named one.
    """
    if not names:
        return {}
    kind, declares = config.env_type, traits_of(config.env).variants
    known: Mapping[str, Variant] = cast(FullEnvSettings, config.env).variants() if declares else {}
    if not known:
        raise ConfigError(
            f"--variants {','.join(names)}: env.type = {kind} has no variants with these settings; leave --variants out"
        )
    if unknown := next((name for name in names if name not in known and name != ALL), None):
        raise ConfigError(
            f"--variants {unknown}: env.type = {kind} has no such variant with these settings; "
            f"{nearest(unknown, known)}it has {', '.join(known)}, and {ALL} for all of them"
        )
    chosen = known if ALL in names else {name: known[name] for name in names}
    saved = config.model_dump(mode="json")
    return {
        name: (variant, validate(merge(saved, {"env": dict(variant.settings)}))) for name, variant in chosen.items()
    }
