"""Settings that every test shares, and whether Meta-World, ManiSkill and CUDA can run here."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
from collections.abc import Iterator

# One thread per process before torch is imported: on shared cores more threads are many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings
from tests.long import skip_long

from polyrhythm.envs.mujoco import RenderingUnavailable, choose_gl_backend
from polyrhythm.errors import MissingError
from polyrhythm.plugins.simulators.maniskill.env import ManiSkillSettings
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.processes.template import keeping_fork_servers

# A shell starts what runs in its background without SIGINT. Tests send it, to themselves and to the runs they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_long(items)


@pytest.fixture(scope="session", autouse=True)
def own_shared_memory() -> Iterator[None]:
    """The runs of this session have shared memory of their own: a session beside it neither sees nor removes what dead
    ones leave. The folder is like a run's, so the next run removes it if this process is killed."""
    memory = SharedRunFolder({})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYRHYTHM_SHARED_MEMORY", str(memory.folder))
        yield
    memory.remove()


@pytest.fixture(scope="session", autouse=True)
def shared_fork_servers() -> Iterator[None]:
    """Most runs of the tests start their stations from what an earlier one has imported."""
    with keeping_fork_servers():
        yield


@pytest.fixture(scope="module", autouse=True)
def freeze_what_is_there() -> None:
    """Spare Python's collector what is there before a file's tests: some hundred thousand objects of modules and of
    collected tests. Estimates of memory, for one, collect before each pass."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def simulator() -> None:
    """Skips the test, with the reason, where Meta-World is not installed or nothing can render."""
    if importlib.util.find_spec("metaworld") is None:
        pytest.skip("the metaworld extra is not installed")
    try:
        choose_gl_backend()
    except RenderingUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def maniskill() -> None:
    """Skips the test, with the reason, where ManiSkill is not installed or finds no Vulkan driver."""
    for package in ManiSkillSettings.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the maniskill extra is not installed: no package {package}")
    try:
        ManiSkillSettings(tasks=("PickCube-v1",), observation="rgb", image_size=32, backend="cpu").check()
    except MissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def cuda():
    """A CUDA device; skips the test, with the reason, where there is none. For tests that are marked `gpu`."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    return torch.device("cuda", 0)
