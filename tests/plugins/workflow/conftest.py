"""Workflows by every launcher, and what they must not leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.long import long
from tests.process.networks import apart_by_setting
from tests.process.runs import children, orphaned_folders

from polyrhythm.plugins.workflow import Workflow
from polyrhythm.plugins.workflow.hosting import Opened, open_on_nodes
from polyrhythm.runtime.factories import StationList

Make = Callable[..., Workflow]


class OnHosts(Workflow):
    """Each worker on a host of its own."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__("local", **settings)
        self._folder = folder

    def _open(self, stations: StationList) -> Opened:
        nodes = apart_by_setting(self._folder / "memory", len(stations))
        names = [factory.name for factory, *_ in stations]
        return open_on_nodes(stations, self._limits, self._folder / "logs", dict(zip(names, nodes, strict=True)))


def make_ray(folder: Path, **settings: Any) -> Workflow:
    pytest.importorskip("ray", reason="the ray extra is not installed")
    return Workflow("ray", ray={"cpus_per_station": 0.25}, **settings)


MAKERS: dict[str, Callable[..., Workflow]] = {
    "inline": lambda folder, **settings: Workflow("inline", **settings),
    "local": lambda folder, **settings: Workflow("local", **settings),
    "inline-lease": lambda folder, **settings: Workflow("inline", sharing="lease", **settings),
    "local-lease": lambda folder, **settings: Workflow("local", sharing="lease", **settings),
    "local-tcp": lambda folder, **settings: Workflow("local", transport="tcp", **settings),
    "hosts": OnHosts,
    "ray": make_ray,
}
RAY = pytest.param("ray", marks=long(15, "with a Ray of its own"))
LEASE = pytest.param(
    "local-lease", marks=long(3, "all workers in turn on the host; inline they are in the usual tests")
)
TCP = pytest.param("local-tcp", marks=long(2, "messages by TCP"))
HOSTS = pytest.param("hosts", marks=long(4, "a host for each worker"))
every = pytest.mark.parametrize("make", ["inline", "inline-lease", "local", LEASE, TCP, HOSTS, RAY], indirect=True)
isolated = pytest.mark.parametrize("make", ["local", LEASE, HOSTS, RAY], indirect=True)
#: The same with hosts in the usual tests.
every_way = pytest.mark.parametrize(
    "make", ["inline", "inline-lease", "local", LEASE, TCP, "hosts", RAY], indirect=True
)


@pytest.fixture
def make(request: Any, tmp_path: Path) -> Iterator[Make]:
    """Makes a workflow of one launcher; afterwards nothing of it is left."""
    yield lambda **settings: MAKERS[request.param](tmp_path, **settings)
    assert not children()
    assert not orphaned_folders()
    assert not [file for file in tmp_path.rglob("polyrhythm-*") if file.is_dir()]
