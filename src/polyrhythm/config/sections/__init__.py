"""The sections of a recipe, one settings model per key."""
