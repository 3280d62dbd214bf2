"""A run's configuration: the schema (pydantic) and recipes (YAML). Imports neither torch nor a simulator.

Import from its modules, so that listing recipes does not import pydantic.
"""
