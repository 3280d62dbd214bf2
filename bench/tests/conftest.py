"""The benchmarks' tests share the settings and fixtures of the core's tests."""

from tests.conftest import *  # noqa: F403
from tests.conftest import simulator as simulator
