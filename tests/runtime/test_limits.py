"""What a run needs of the machine's limits on threads, and what is read of these."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest
from tests.process.runs import children, config, wait_until

from polyrhythm.checks import CheckContext
from polyrhythm.errors import StartError
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.validation.check import check_processes
from polyrhythm.plugins.cluster.hosts.agent import AgentSpec, LocalNode
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.processes import start
from polyrhythm.runtime.processes.start import AGENT_THREADS, cgroup_threads
from polyrhythm.runtime.transport.authentication import make_keys
from polyrhythm.runtime.transport.sockets import LOOPBACK
from polyrhythm.specs import WeightsLayout


@pytest.mark.parametrize(
    ("own", "folder"),
    [
        ("0::/box\n", "box"),
        ("9:name=systemd:/\n8:pids:/box\n0::/elsewhere\n", "pids/box"),
    ],
)
def test_the_threads_that_are_left_are_those_of_the_own_control_group(own: str, folder: str, tmp_path: Path) -> None:
    assert cgroup_threads(own, tmp_path) == math.inf, "no limit that we can see"
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "pids.max").write_text("max\n")
    (tmp_path / folder / "pids.current").write_text("90\n")
    assert cgroup_threads(own, tmp_path) == math.inf
    (tmp_path / folder / "pids.max").write_text("100\n")
    assert cgroup_threads(own, tmp_path) == 10


def test_an_agent_has_as_many_threads_as_are_counted(tmp_path: Path) -> None:
    layout = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})
    keys, weights = make_keys(), WeightsLayout.of({})
    with closing(LocalNode("there", environment={"POLYRHYTHM_SHARED_MEMORY": str(tmp_path)})) as node:
        assert node.start_agent(AgentSpec("host-1", (), "", layout, weights, ("main",), LOOPBACK, keys))().endpoint
        (agent,) = [process for process in children() if "polyrhythm.plugins.cluster.hosts.agent" in process.cmdline()]

        def threads() -> int:
            return sum(process.num_threads() for process in (agent, *agent.children(recursive=True)))

        wait_until(lambda: threads() >= AGENT_THREADS)
        assert threads() == AGENT_THREADS


def test_what_ray_and_an_agent_have_counts_where_they_are_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two simulators of two env batches each, two generators and a trainer; root has no limit of its own."""
    monkeypatch.setattr(start, "_user_threads", lambda: 100)
    for launcher, address, needs in (("local", "local", 0), ("ray", "local", 304), ("ray", "head:6379", 0)):
        run = config(launcher=launcher, ray={"address": address})
        context = CheckContext(run, spec=env_settings(run).spec())
        if needs:
            with pytest.raises(StartError, match=f"needs {needs} threads .*, 260 for Ray., 100 can be started"):
                check_processes(context)
        else:
            check_processes(context)
