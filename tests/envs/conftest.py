"""Whether Meta-World can run here."""

from __future__ import annotations

import importlib.util

import pytest

from polyrhythm.envs.mujoco_rendering import RenderingUnavailable, choose_gl_backend


@pytest.fixture(scope="session")
def simulator() -> None:
    """Skips the test, with the reason, where Meta-World is not installed or nothing can render."""
    if importlib.util.find_spec("metaworld") is None:
        pytest.skip("the metaworld extra is not installed")
    try:
        choose_gl_backend()
    except RenderingUnavailable as error:
        pytest.skip(str(error))
