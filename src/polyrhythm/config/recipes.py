"""Finds recipes by path, beside the recipe that extends them, or by name among the shipped ones; and examples."""

from __future__ import annotations

from pathlib import Path

from polyrhythm.config.nearest import nearest
from polyrhythm.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]


def recipes_folder() -> Path:
    """Folder of shipped recipes: inside an installed package, or at the root of a checkout."""
    inside = _PACKAGE / "recipes"
    return inside if inside.is_dir() else _PACKAGE.parents[1] / "recipes"


def examples_folder() -> Path:
    inside = _PACKAGE / "examples"
    return inside if inside.is_dir() else _PACKAGE.parents[1] / "examples"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def find_recipe(recipe: str | Path, beside: Path | None = None) -> Path:
    """File of a recipe given by path (relative to `beside`, or to the working folder) or by name."""
    given = Path(recipe)
    folder = beside or Path()
    is_yaml = given.suffix.lower() in (".yaml", ".yml")
    candidates = [folder / given, folder / f"{given}.yaml"] if beside or is_yaml else []
    if given.name == str(recipe):
        candidates.append(recipes_folder() / f"{given.stem if given.suffix == '.yaml' else given}.yaml")
    candidates.append(given)  # a bare name is a shipped recipe first, then a file
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    names = recipe_names()
    if given.is_dir():
        run = f"a run's recipe is its config.yaml; to resume that run: polyrhythm resume {recipe}"
        remedy = run if (given / "config.yaml").is_file() else "give a path to a YAML file"
        raise ConfigError(f"recipe {str(recipe)!r} is a folder; {remedy}")
    raise ConfigError(
        f"recipe {str(recipe)!r} does not exist; {nearest(given.stem, names)}named recipes are {', '.join(names)}; "
        "or give a path to a YAML file"
    )
