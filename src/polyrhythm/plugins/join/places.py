"""The run's join ports: their stations, the token file, and the command to type."""

from __future__ import annotations

import json
import logging
import shlex
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from polyrhythm import __version__
from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.build import TOKEN_FILE
from polyrhythm.pipeline.context import AddedStations, StationPlan
from polyrhythm.pipeline.placed import joined_names
from polyrhythm.plugins.cluster.hosts.memory import start_cleaner
from polyrhythm.plugins.join.joined import JoinedSimulatorFactory
from polyrhythm.plugins.join.messages import write_token
from polyrhythm.runtime.factories import Joining
from polyrhythm.runtime.transport.authentication import RunKeys, make_keys

log = logging.getLogger(__name__)

#: Addresses that stand for all of this machine's.
_EVERY = frozenset({"0.0.0.0"})  # noqa: S104


def add_places(plan: StationPlan) -> AddedStations:
    """Stations that accept simulators, and a new token in the run's folder. StartError: ZeroMQ lacks encryption."""
    config, folder = plan.context.config, plan.context.folder
    assert folder is not None, "a run that simulators join has a folder, for its token"
    join, own, names = config.join, config.rollout.simulators, joined_names(config)
    joining = Joining(frozenset(names), max(join.min_simulators - own, int(not own)))
    batches = {infos[0].name.rpartition(".")[0]: infos[0] for infos in plan.infos}
    ports = range(join.port, join.port + join.simulators)
    undo = ExitStack()
    keys = undo.enter_context(open_token(folder / TOKEN_FILE))
    factories = [
        JoinedSimulatorFactory(
            name,
            plan.spec,
            batches[name],
            plan.step,
            join.address,
            port,
            keys,
            __version__,
            join.reconnect_s,
            config.supervision.start_s,
            tuple(other for other in ports if other != port),
        )
        for name, port in zip(names, ports, strict=True)
    ]
    return AddedStations(factories, joining, lambda: _announce(config, folder, joining.needed), undo)


@contextmanager
def open_token(token: Path) -> Iterator[RunKeys]:
    """Write new keys for simulators to the token file; it is removed on exit."""
    token.parent.mkdir(parents=True, exist_ok=True)
    keys = make_keys()
    with start_cleaner(token):
        try:
            write_token(token, keys)
            yield keys
        finally:
            token.unlink(missing_ok=True)


def _announce(config: RunConfig, folder: Path, needed: int) -> None:
    join = config.join
    host = socket.gethostname() if join.address in _EVERY else join.address
    token = shlex.quote(str((folder / TOKEN_FILE).resolve()))
    count = "a simulator" if join.simulators == 1 else f"{join.simulators} simulators"
    needs = f"; the run waits for {needed}" if needed else ""
    line = f"polyrhythm join tcp://{host}:{join.port} --token-file {token} --env {_env_words(config)}"
    log.info("%s may join%s: %s", count, needs, line)


def _env_words(config: RunConfig) -> str:
    """The environment as arguments of `polyrhythm join`: its type and the settings that differ from the defaults."""
    own = config.env.model_dump(mode="json", exclude_defaults=True)
    kind, found = config.env_type, own.pop("id", "")
    own.pop("type", None)
    words = [f"{kind}:{found}" if kind == "gymnasium" else str(kind)]
    if found and kind != "gymnasium":
        own["id"] = found
    words += [f"{name}={json.dumps(value)}" for name, value in own.items()]
    return shlex.join(words)
