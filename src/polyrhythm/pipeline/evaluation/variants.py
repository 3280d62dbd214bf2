"""Finds the variants of a run's environment that an evaluation asks for, and the run's settings in each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from polyrhythm.config.load import merge, validate
from polyrhythm.config.nearest import nearest
from polyrhythm.config.schema import RunConfig
from polyrhythm.envs.base import FullEnvSettings, traits_of
from polyrhythm.envs.variants import Variant
from polyrhythm.errors import ConfigError

#: Stands for every variant.
ALL = "all"


def with_variants(config: RunConfig, names: Sequence[str]) -> dict[str, tuple[Variant, RunConfig]]:
    """The variants of these names, or `all`, each with the run's settings changed by it, in the order asked for.

    ConfigError: the environment has no variants, or not this one.
    """
    if not names:
        return {}
    known = variants_of(config)
    kind = getattr(config.env, "type", "")
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
