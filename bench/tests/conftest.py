"""The benchmarks' tests share the settings and fixtures of the core's tests."""

from tests.conftest import simulator

__all__ = ["simulator"]
