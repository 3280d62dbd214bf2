"""What a run is told: the schema (pydantic) and recipes (YAML). Imports neither torch nor a simulator by itself.

Import from its modules: listing recipes must not wait for pydantic.
"""
