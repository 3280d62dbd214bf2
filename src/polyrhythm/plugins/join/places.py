"""The places of a run for simulators that join it: their stations, the token file, and the line to type."""

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
from polyrhythm.plugins.cluster.hosts.identity import start_cleaner
from polyrhythm.plugins.join.joined import JoinedSimulatorFactory
from polyrhythm.plugins.join.terms import write_token
from polyrhythm.runtime.factories import Joining
from polyrhythm.runtime.transport.authentication import RunKeys, make_keys

log = logging.getLogger(__name__)

#: Addresses that stand for all of this machine's.
_EVERY = frozenset({"0.0.0.0"})  # noqa: S104


def add_places(plan: StationPlan) -> AddedStations:
    """The places that `join` opens, with a new token in the run's folder. StartError: this ZeroMQ has no encryption."""
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
    """Write the file that gives new keys to simulators that join; it goes at the end, or with this process."""
    token.parent.mkdir(parents=True, exist_ok=True)
    keys = make_keys()
    with start_cleaner(token):
        try:
            write_token(token, keys)
            yield keys
        finally:
            token.unlink(missing_ok=True)


def _announce(config: RunConfig, folder: Path, needed: int) -> None:
    """Log how to join."""
    join = config.join
    host = socket.gethostname() if join.address in _EVERY else join.address
    token = shlex.quote(str((folder / TOKEN_FILE).resolve()))
    count = "a simulator" if join.simulators == 1 else f"{join.simulators} simulators"
    needs = f"; the run waits for {needed}" * bool(needed)
    line = f"polyrhythm join tcp://{host}:{join.port} --token-file {token} --env {_env_words(config)}"
    log.info("%s may join%s: %s", count, needs, line)


def _env_words(config: RunConfig) -> str:
    """The environment as `polyrhythm join` takes it: its type, and the settings that are not its defaults."""
    own = config.env.model_dump(mode="json", exclude_defaults=True)
    kind, found = config.env_type, own.pop("id", "")
    own.pop("type", None)
    words = [f"{kind}:{found}" if kind == "gymnasium" else str(kind)]
    if found and kind != "gymnasium":
        own["id"] = found
    words += [f"{name}={json.dumps(value)}" for name, value in own.items()]
    return shlex.join(words)
