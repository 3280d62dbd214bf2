"""The benchmarks' tests share the settings and fixtures of the core's tests."""

from tests.conftest import freeze_what_is_there, own_shared_memory, pytest_collection_modifyitems, simulator

__all__ = ["freeze_what_is_there", "own_shared_memory", "pytest_collection_modifyitems", "simulator"]
