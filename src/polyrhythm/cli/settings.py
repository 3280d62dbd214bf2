"""List the settings of a recipe with their defaults and meaning: all sections, or one, such as training.optimizer.

The settings of environments and policies depend on their type: `polyrhythm envs TYPE` and `polyrhythm policies TYPE`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyrhythm.config.catalog import Setting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("section", nargs="?", metavar="SECTION", help="a section or setting, such as freshness.max_lag")
    parser.add_argument("--json", action="store_true", help="print them as JSON")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.cli.adapters import setting_lines

    found = _find(arguments.section) if arguments.section else _top_level()
    if arguments.json:
        print(json.dumps([setting._asdict() for setting in found], indent=2))
    else:
        print("\n".join(setting_lines(found)))
        if not arguments.section:
            print("\nthe settings of a section: polyrhythm settings SECTION")
    return 0


def _top_level() -> Sequence[Setting]:
    from polyrhythm.config.catalog import settings_of
    from polyrhythm.config.schema import RunConfig

    return [setting for setting in settings_of(RunConfig) if "." not in setting.name and "[" not in setting.name]


def _find(path: str) -> Sequence[Setting]:
    """Settings of the section at this dotted path, or the one setting."""
    from pydantic import BaseModel

    from polyrhythm.config.base import models_in
    from polyrhythm.config.catalog import settings_of, type_of
    from polyrhythm.config.explain import paths_to
    from polyrhythm.config.schema import RunConfig
    from polyrhythm.errors import ConfigError, nearest

    path = path.removesuffix(".type")  # types are listed with their section
    models: list[type[BaseModel]] = [RunConfig]
    for key in path.split("."):
        fields = [model.model_fields[key] for model in models if key in model.model_fields]
        if not fields:
            known = [name for model in models for name in model.model_fields]
            elsewhere = paths_to(key, RunConfig)
            raise ConfigError(
                f"settings {path}: no such setting; {nearest(key, known, elsewhere=elsewhere)}polyrhythm settings "
                "lists the sections"
            )
        parents, models = models, [found for field in fields for found in models_in(field.annotation)]
    if models and path.partition(".")[0] in ("env", "policy"):
        models = []
    types = [f"[{type_of(model)}]" if len(models) > 1 else "" for model in models]
    inner = [s for model, of in zip(models, types, strict=True) for s in settings_of(model, f"{path}{of}.")]
    own = [setting for model in parents for setting in settings_of(model) if setting.name == path.rpartition(".")[2]]
    return inner or [setting._replace(name=path) for setting in own]
