"""Settings that an evaluation of a saved run may override: the environment's, the locations of released folders, the
engine that generates tokens, and the sampling settings. None of them changes the policy's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from polyrhythm.config.load import merge, parse_override, validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import StreamsBatching
from polyrhythm.envs.base import FullEnvSettings, Variant, traits_of
from polyrhythm.errors import ConfigError, nearest
from polyrhythm.pipeline.persistence.resume_rules import MOVABLE, movable
from polyrhythm.policies.traits import SAMPLING, settings_traits

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
    allowed |= {f"policy.{name}" for name in _sampling_settings(config)}
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


def changed_env(overrides: Sequence[str]) -> dict[str, Any]:
    """{env: overrides of the environment}, to label the result; empty if there are none."""
    env = [text.strip() for text in overrides if text.strip().startswith("env.")]
    return {"env": env} if env else {}


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


def sampling_of(config: RunConfig, *, greedy: bool) -> dict[str, Any]:
    """{sampling: sampling settings of a language model}; empty for other policies and for greedy evaluations."""
    found = {name: getattr(config.policy, name) for name in _sampling_settings(config)}
    return {"sampling": found} if found and not greedy else {}


def _sampling_settings(config: RunConfig) -> tuple[str, ...]:
    return settings_traits(config.policy).sampling


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
    known = variants_of(config)
    kind = config.env_type
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


def variants_of(config: RunConfig) -> Mapping[str, Variant]:
    """The variants of the run's environment; empty if it declares none."""
    return cast(FullEnvSettings, config.env).variants() if traits_of(config.env).variants else {}
