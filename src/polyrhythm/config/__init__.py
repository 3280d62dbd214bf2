"""What a run is told: the schema (pydantic) and recipes (YAML). Imports neither torch nor a simulator by itself."""

from polyrhythm.config.load import load_config, save_config, validate
from polyrhythm.config.recipes import recipe_names
from polyrhythm.config.schema import RunConfig

__all__ = ["RunConfig", "load_config", "recipe_names", "save_config", "validate"]
