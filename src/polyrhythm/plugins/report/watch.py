"""Serve the page of a run on this machine while the run trains; the page refreshes itself. Ctrl-C ends it.

It reads the run's folder and writes nothing. Only this machine can reach it (127.0.0.1); from another one forward the
port: ssh -L PORT:127.0.0.1:PORT HOST. Without --port a free port is chosen.
"""

from __future__ import annotations

import argparse
import logging
import signal
from pathlib import Path

from polyrhythm.cli.arguments import whole
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.signals import SignalInterrupt, exit_status

log = logging.getLogger(__name__)

_PORTS = 65_535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="folder of a run, or of runs, of which the newest is taken"
    )
    parser.add_argument("--port", type=whole, default=0, metavar="PORT", help="port to serve on (default: a free one)")


def run(arguments: argparse.Namespace) -> int:
    from polyrhythm.plugins.report.live import LiveRun
    from polyrhythm.plugins.report.server import PageServer

    if arguments.port > _PORTS:
        raise ConfigError(f"--port = {arguments.port}: there is no such port; name one up to {_PORTS}")
    with PageServer(LiveRun(arguments.run), arguments.port) as server:
        print(f"{server.url} shows {arguments.run}; Ctrl-C ends it", flush=True)
        try:
            server.serve()
        except SignalInterrupt as stopped:
            if stopped.status != exit_status(signal.SIGINT):
                raise
    return 0
