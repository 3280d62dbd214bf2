"""Serve the page of a run on this machine while the run trains; the page refreshes itself. Ctrl-C ends it.

It reads the run's folder and writes nothing. Only this machine can reach it (127.0.0.1); from another one forward the
port: ssh -L PORT:127.0.0.1:PORT HOST. Without --port a free port is chosen. A folder that is missing or empty, as just
after the start of `polyrhythm train`, is waited for up to a minute.
"""

from __future__ import annotations

import argparse
import logging
import signal
import time
from pathlib import Path

from polyrhythm.cli.arguments import whole
from polyrhythm.errors import ConfigError
from polyrhythm.observe.run_folder import LOCK_FILE
from polyrhythm.pipeline.signals import SignalInterrupt, exit_status

log = logging.getLogger(__name__)

_PORTS = 65_535
#: Seconds in which a run is to appear, and between two looks.
_APPEAR_S, _LOOK_S = 60.0, 0.25


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
    try:
        _wait_for_run(arguments.run)
        live = LiveRun(arguments.run)
        with PageServer(live, arguments.port) as server:
            print(f"{server.url} shows {live.folder}; Ctrl-C ends it", flush=True)
            server.serve()
    except SignalInterrupt as stopped:
        if stopped.status != exit_status(signal.SIGINT):
            raise
    return 0


def _wait_for_run(folder: Path) -> None:
    """Wait until a run that is about to start has written its settings, or the time for it is over.

    A file in the folder tells that it is something else, which is refused at once.
    """
    until, told = time.monotonic() + _APPEAR_S, False
    while _is_vacant(folder) and time.monotonic() < until:
        if not told:
            log.warning("%s: no run there yet, waiting up to %.0f s", folder, _APPEAR_S)
            told = True
        time.sleep(_LOOK_S)


def _is_vacant(folder: Path) -> bool:
    """Whether it is missing, or holds nothing but empty folders down to that of a run."""
    if folder.is_file():
        return False
    inner = (path for depth in ("*", "*/*", "*/*/*") for path in folder.glob(depth))
    return all(path.is_dir() or path.name == LOCK_FILE for path in inner)
