"""A Ray cluster, or one of this machine's own for the run: connecting, placing stations, nodes, and leaving.

Every wait has an end: a cluster that is not there and a placement that does not fit are errors, with what is wanted and
what is found.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import msgspec
import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import ActorUnschedulableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polyrhythm.config.sections.running import RaySettings
from polyrhythm.errors import StartError, first_line
from polyrhythm.plugins.cluster.hosts.agent import FOUND_S, AgentSpec, Found, Node
from polyrhythm.plugins.cluster.hosts.survey import ClusterLost, Sight
from polyrhythm.plugins.cluster.ray.actors import ANSWER_S, ActorProcess, AgentActor, StationActor, Watcher, last_line
from polyrhythm.plugins.cluster.ray.bundles import SEES_ALL, Bundles
from polyrhythm.plugins.cluster.ray.reach import (
    AUTO,
    LOCAL,
    bundles_of,
    check_reachable,
    check_room,
    cpus_by_name,
    describe_wanted,
    node_name,
    own_versions,
    ray_differs,
)
from polyrhythm.plugins.cluster.sealed import check_sealing
from polyrhythm.runtime.devices import CPU
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.messages import rank_name
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.start import ProcessHandle

log = logging.getLogger(__name__)

#: Seconds after which a wait for CPUs is told.
_SOON_S = 2.0
#: Bytes of the object store of a cluster of our own, which nothing uses: the least that Ray takes.
_STORE_BYTES = 80 * 2**20


class Cluster:
    """A connection to the cluster that `settings` name, with room for each process of these seats.

    folder: of the run; devices: of a cluster of this machine's own; beside: the process that is on this machine's node
    if that has CPUs free. StartError: there is no such cluster, or too little room in it; then nothing is left."""

    def __init__(
        self, settings: RaySettings, seats: Mapping[str, Resources], folder: Path, devices: int = 0, beside: str = ""
    ) -> None:
        check_sealing()
        self._settings, self.folder, self._beside = settings, folder.resolve(), beside
        self._own = not ray.is_initialized()
        self._temporary: SharedRunFolder | None = None
        self._watcher: Watcher | None = None
        self._bundles: Bundles | None = None
        if self._own:
            self._connect(len(seats) * settings.cpus_per_station, devices)
        try:
            if self._own and settings.address == AUTO:
                check_reachable(ray.get_runtime_context().gcs_address)  # whether it takes the token, or its absence
            self._reserve(seats)
            folder.mkdir(parents=True, exist_ok=True)
            self._watcher = Watcher()
            self.address: str = ray.util.get_node_ip_address()
            self._reserved: dict[str, str] = {}
            self._by_id: dict[str, RayNode] = {}
            nodes, sight = self.look()
            self.nodes = {name: nodes[sight.reserved[name]] for name in seats}
        except BaseException:
            self.close()
            raise

    def _connect(self, cpus: float, devices: int) -> None:
        address = self._settings.address
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        more: dict[str, Any] = {}
        if address == LOCAL:
            # Like a run's in shared memory: if this process is killed, the next such run removes it.
            self._temporary = SharedRunFolder({}, Path(tempfile.gettempdir()))
            # Stations share the cores, as they do with launcher = local, and have the run's own priority.
            os.environ.setdefault("RAY_worker_niceness", "0")
            more = {"num_cpus": int(-(-cpus // 1)), "num_gpus": devices, "object_store_memory": _STORE_BYTES}
            more |= {"include_dashboard": False}
            more["_temp_dir"] = str(self._temporary.folder)
        else:
            check_reachable(address)
        if self._settings.working_dir:
            more["runtime_env"] = {"working_dir": self._settings.working_dir}
        before = {}  # the run's own handlers, which Ray replaces
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            ray.init(
                address=address, log_to_driver=False, configure_logging=False, logging_level=logging.WARNING, **more
            )
        except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
            if differs := ray_differs(str(error)):
                raise StartError(f"ray.address = {address}: {differs}") from error
            line = first_line(error)
            raise StartError(
                f"ray.address = {address}: {line}; start a cluster with `ray start --head`, name the address that it "
                "prints (if it wants a token, set RAY_AUTH_MODE=token and copy ~/.ray/auth_token from its head node), "
                f"or set ray.address to {LOCAL} for a cluster on this machine"
            ) from error
        except KeyboardInterrupt:
            ray.shutdown()
            raise
        finally:
            if not ray.is_initialized():
                self._remove_temporary()
            for number, handler in before.items():
                if handler is not None:
                    signal.signal(number, handler)

    def _reserve(self, seats: Mapping[str, Resources]) -> None:
        settings, alive = self._settings, _alive_nodes()
        wanted = bundles_of(seats, settings.cpus_per_station)
        check_room(wanted, settings.cpus_per_station, cpus_by_name(alive))
        ids = {node_name(node): node["NodeID"] for node in alive}
        here = ray.get_runtime_context().get_node_id()
        has_room = available_resources_per_node().get(here, {}).get("CPU", 0.0) >= settings.cpus_per_station
        self._bundles = Bundles(settings, seats, ids, {self._beside: here} if has_room else {})
        self._bundles.reserve()
        soon = min(_SOON_S, settings.start_s)
        if not (ready := self._bundles.wait(soon)):
            said = "waiting for room on the cluster: %s (ray.start_s = %g)"
            log.info(said, describe_wanted(wanted), settings.start_s)
            ready = self._bundles.wait(settings.start_s - soon)
        if not ready:
            free = ray.available_resources()
            raise StartError(
                f"ray.start_s = {settings.start_s:g}: no place for the stations within that time; "
                f"{describe_wanted(wanted)}, free now: {free.get('CPU', 0.0):g} CPUs, {free.get('GPU', 0.0):g} GPUs; "
                "end what uses the cluster, or lower ray.cpus_per_station"
            )
        self._bundles.find_devices()
        for device, held in self._bundles.without_cuda().items():
            name = next(name for name, id_ in ids.items() if id_ == held.node)
            raise StartError(
                f"{device}: torch {held.torch} on {name} has no CUDA; install one that has, or add --simulated-devices "
                "N if its GPUs are fake ones"
            )

    def look(self) -> tuple[dict[str, Node], Sight]:
        """The nodes that are alive, by name; CPUs that are free there, and where stations have theirs. OSError: the
        cluster does not answer. ClusterLost: this machine has no part in it any more; Ray would wait for ever."""
        own = ray._private.worker._global_node  # of a cluster that this process has started
        dead = [kind for kind, _ in own.dead_processes()] if own is not None else []
        if needed := [kind for kind in ("raylet", "gcs_server") if kind in dead]:
            raise ClusterLost(f"the Ray cluster of this run is lost: its {needed[0]} has ended")
        assert self._bundles is not None, "the cluster was left"
        try:
            alive = _alive_nodes()
            reserved = self._bundles.look({node["NodeID"] for node in alive})
            free = available_resources_per_node()
        except RayError as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        if ray.get_runtime_context().get_node_id() not in [node["NodeID"] for node in alive]:
            raise ClusterLost("the Ray cluster is lost for this run: the node of this machine has left it")
        for node in alive:
            if node["NodeID"] not in self._by_id:
                self._by_id[node["NodeID"]] = RayNode(self, node)
        here = {node["NodeID"]: self._by_id[node["NodeID"]] for node in alive}
        self._reserved = {name: here[node].name for name, node in reserved.items()}
        cpus = {node.name: float(free.get(id_, {}).get("CPU", 0.0)) for id_, node in here.items()}
        devices = {here[id_].name for id_ in self._bundles.nodes_with_devices() if id_ in here}
        return {node.name: node for node in here.values()}, Sight(cpus, self._reserved, frozenset(devices))

    def start_station(self, spec: ChildSpec, file: Path, node: RayNode) -> ActorProcess:
        """Start the station's process on a node, without waiting for it: in its bundle, if that is there. Elsewhere it
        reserves no CPUs: a bundle of a lost node may be placed again later, and a station must not wait for that."""
        assert self._watcher is not None and self._bundles is not None, "the cluster was left"  # noqa: PT018
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 4, "max_restarts": 0}
        strategy: Any = NodeAffinitySchedulingStrategy(node.id, soft=False)
        process_name = rank_name(spec.station, spec.rank)
        if self._reserved.get(process_name) == node.name:
            options["num_cpus"] = self._settings.cpus_per_station
            strategy = self._bundles.strategy(process_name)
        if spec.resources.torch_device != CPU:
            options["runtime_env"] = SEES_ALL
        spec = replace(spec, resources=self._bundles.seat_on(spec.resources, node.id))
        actor = ray.remote(StationActor).options(scheduling_strategy=strategy, **options)
        process = ActorProcess(actor.remote(msgspec.msgpack.encode(spec), str(Path.cwd())), file)
        self._watcher.add(process)
        return process

    def close(self) -> None:
        """Leave the cluster, and end it if it is this run's own; a second call does nothing."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        if self._bundles is not None:
            self._bundles.close()
            self._bundles = None
        if self._own and ray.is_initialized():
            ray.shutdown()
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            self._temporary.remove()
            self._temporary = None


class RayNode:
    """A node of a cluster, as `plugins.cluster.hosts.agent.Node`. id: Ray's."""

    def __init__(self, cluster: Cluster, node: Mapping[str, Any]) -> None:
        self.name, self.address = node_name(node), node["NodeManagerAddress"]
        self._cluster, self.id = cluster, node["NodeID"]
        self._agent: Any = None
        self._found = False  # whether the agent has said what it found
        self._processes: list[ActorProcess] = []  # since the agent was started
        self.leaves = True
        self.agent_failure = ""  # its actor would know

    @property
    def abandoned(self) -> bool:
        return any(process.abandoned for process in self._processes)

    def start_agent(self, spec: AgentSpec) -> Callable[[], Found]:
        self._processes, self._found = [], False
        strategy = NodeAffinitySchedulingStrategy(self.id, soft=False)
        self._agent = ray.remote(AgentActor).options(num_cpus=0, scheduling_strategy=strategy).remote()
        found_ref = self._agent.start.remote(msgspec.msgpack.encode(spec), [*own_versions()])
        until = time.monotonic() + FOUND_S

        def wait() -> Found:
            try:
                content = ray.get(found_ref, timeout=max(0.0, until - time.monotonic()))
                found = msgspec.msgpack.decode(content, type=Found)
            except RayError as error:
                self.close()
                raise StartError(f"the host's agent does not start: {_why_no_agent(error)}") from error
            if found.error:
                self.close()
                raise StartError(found.error)
            self._found = True
            return found

        return wait

    def spawn(self, spec: ChildSpec, log: IO[bytes]) -> ProcessHandle:
        process = self._cluster.start_station(spec, Path(log.name), self)
        self._processes = [other for other in self._processes if other.abandoned or other.poll() is None] + [process]
        return process

    def give_up(self) -> None:
        for process in self._processes:
            process.host_lost = True

    def close(self) -> None:
        agent, self._agent = self._agent, None
        if agent is None:
            return
        if self._found:  # one that did not start, or does so yet, ends with its actor
            try:
                ray.get(agent.close.remote(), timeout=ANSWER_S)
            except RayError as error:
                said = "%s: its agent does not answer (%s); it ends with its node"
                log.warning(said, self.name, type(error).__name__)
        ray.kill(agent)


def _why_no_agent(error: RayError) -> str:
    """The reason, in a sentence where it is one that users can mend."""
    text = str(error)
    if "No module named 'polyrhythm'" in text:
        return "polyrhythm is not installed on that node; install the version that is here into the Python of its Ray"
    if isinstance(error, ActorUnschedulableError):
        return "Ray has lost that node"
    return f"{type(error).__name__}: {last_line(error)}"


def _alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]
