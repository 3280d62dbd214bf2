"""Join a run with an environment of this machine and this Python, as one of its simulators.

The run prints the line to type: it waits for simulators where its recipe has join.simulators. This machine needs the
same polyrhythm and the environment's packages; torch is not used. Copy the token file here by a way that others cannot
read, and keep its mode 600. Ctrl-C leaves; the run goes on without this simulator.
"""

from __future__ import annotations

import argparse
import math
import signal
import threading
from pathlib import Path

from polyrhythm.cli.arguments import positive
from polyrhythm.readable import visible


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [-h] --token-file FILE --env ENV tcp://HOST:PORT [key=value ...]"
    parser.add_argument("address", metavar="tcp://HOST:PORT", help="where the run waits; it has printed this")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="the environment's settings")
    parser.add_argument("--token-file", type=Path, required=True, metavar="FILE", help="the run's token, mode 600")
    parser.add_argument(
        "--env", required=True, metavar="ENV", help="its type, gymnasium:ID, module:Class, or a recipe with it"
    )
    parser.add_argument(
        "--patience", type=positive, default=60.0, metavar="S", help="seconds without an answer until it gives up (60)"
    )
    parser.add_argument(
        "--park", type=positive, default=math.inf, metavar="S", help="seconds of a reset after which it parks (never)"
    )


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm import __version__
    from polyrhythm.config.load import load_env
    from polyrhythm.envs.base import EnvSettings
    from polyrhythm.errors import ConfigError
    from polyrhythm.plugins.join.joining import JoinClient
    from polyrhythm.plugins.join.messages import read_token

    settings = load_env(arguments.env, arguments.overrides)
    if not isinstance(settings, EnvSettings):
        raise ConfigError(f"--env = {arguments.env}: its settings need spec() and build(rows)")
    client = JoinClient(
        arguments.address,
        read_token(arguments.token_file),
        settings,
        __version__,
        patience_s=arguments.patience,
        park_s=arguments.park,
    )
    left = threading.Event()

    def leave(*_: object) -> None:
        """Signal handler: leave the run. It sets a flag, as an exception could be raised where it is dropped; a
        second signal interrupts."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        left.set()
        client.leave()

    before = signal.signal(signal.SIGINT, leave)
    try:
        print(visible(client.run()))
    finally:
        signal.signal(signal.SIGINT, before)
    if left.is_set():
        raise KeyboardInterrupt
    return 0
