"""The places of a run for simulators that join it: their stations, the token file, and the line to type."""

from __future__ import annotations

import json
import logging
import shlex
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polyrhythm import __version__
from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.placed import joined_names
from polyrhythm.plugins.cluster.hosts.cleaner import start_cleaner
from polyrhythm.plugins.join.joined import JoinedSimulatorFactory
from polyrhythm.plugins.join.token import write_token
from polyrhythm.runtime.factories import Joining
from polyrhythm.runtime.transport.authentication import RunKeys, make_keys
from polyrhythm.scheduler.records import EnvBatchInfo
from polyrhythm.specs import EnvSpec
from polyrhythm.stations.simulator.slot import StepSettings

log = logging.getLogger(__name__)

#: The file with what is needed to join, in a run's folder.
TOKEN_FILE = "join.token"  # noqa: S105 - a name
#: Addresses that stand for all of this machine's.
_EVERY = frozenset({"0.0.0.0"})  # noqa: S104


@dataclass(frozen=True, slots=True)
class OpenPlaces:
    """The places of one run. keys: for their ports; token: the file that gives them to who joins; cleaner: removes it
    if this process is killed."""

    config: RunConfig
    keys: RunKeys
    token: Path
    cleaner: subprocess.Popen[bytes]

    @property
    def joining(self) -> Joining:
        """Which stations are joined, and how many of them the run needs to start."""
        own, names = self.config.rollout.simulators, joined_names(self.config)
        needed = max(self.config.join.min_simulators - own, int(not own))
        return Joining(frozenset(names), needed)

    def factory(self, name: str, spec: EnvSpec, info: EnvBatchInfo, step: StepSettings) -> JoinedSimulatorFactory:
        """The factory of the station of this name."""
        config = self.config
        ports = self.ports
        port = ports[joined_names(config).index(name)]
        return JoinedSimulatorFactory(
            name,
            spec,
            info,
            step,
            config.join.address,
            port,
            self.keys,
            __version__,
            config.join.reconnect_s,
            config.supervision.start_s,
            tuple(other for other in ports if other != port),
        )

    @property
    def ports(self) -> Sequence[int]:
        """The port of each place."""
        join = self.config.join
        return range(join.port, join.port + join.simulators)

    def announce(self) -> None:
        """Say how to join."""
        join = self.config.join
        host = socket.gethostname() if join.address in _EVERY else join.address
        line = f"polyrhythm join tcp://{host}:{join.port} --token-file {shlex.quote(str(self.token.resolve()))}"
        count = "a simulator" if join.simulators == 1 else f"{join.simulators} simulators"
        needs = f"; the run waits for {self.joining.needed}" * bool(self.joining.needed)
        log.info("%s may join%s: %s --env %s", count, needs, line, _env_words(self.config))

    def close(self) -> None:
        """The token is of no use any more."""
        with self.cleaner:
            self.token.unlink(missing_ok=True)


def _env_words(config: RunConfig) -> str:
    """The environment as `polyrhythm join` takes it: its type, and the settings that are not its defaults."""
    own = config.env.model_dump(mode="json", exclude_defaults=True)
    kind, found = getattr(config.env, "type", ""), own.pop("id", "")
    own.pop("type", None)
    words = [f"{kind}:{found}" if kind == "gymnasium" else str(kind)]
    if found and kind != "gymnasium":
        own["id"] = found
    words += [f"{name}={json.dumps(value)}" for name, value in own.items()]
    return shlex.join(words)


def open_places(config: RunConfig, folder: Path | None) -> OpenPlaces | None:
    """The places that the settings open, with a new token in the run's folder; None if none may join: then one that an
    earlier part of the run has left is removed. StartError: this ZeroMQ has no encryption."""
    if not config.join.simulators:
        if folder is not None:
            (folder / TOKEN_FILE).unlink(missing_ok=True)
        return None
    assert folder is not None, "a run that simulators join has a folder, for its token"
    folder.mkdir(parents=True, exist_ok=True)
    token, keys = folder / TOKEN_FILE, make_keys()
    places = OpenPlaces(config, keys, token, start_cleaner(token))
    try:
        write_token(token, keys)
    except BaseException:
        places.close()
        raise
    return places
