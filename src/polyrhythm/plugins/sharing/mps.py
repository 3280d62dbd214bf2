"""Generators, trainer and scorers of a device under NVIDIA's MPS (`placement.sharing: mps`).

Without it a device runs one process at a time and changes between them by time slices; MPS runs their kernels side by
side. The run starts a control daemon of its own, with folders of its own, so that it neither uses nor disturbs another
one; the stations find it by CUDA_MPS_PIPE_DIRECTORY. Simulators stay outside: MPS does not draw.

Invariant: the daemon ends with the run, however that ends (`guard`).
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from polyrhythm.config.sections.placement import PlacementSettings
from polyrhythm.errors import MissingError, StartError
from polyrhythm.imports import same_imports
from polyrhythm.pipeline.placed import SharedSeats
from polyrhythm.plugins.sharing.guard import CHILDREN, QUIT_S, longest_end_s
from polyrhythm.runtime.devices import CPU
from polyrhythm.runtime.factories import Resources

log = logging.getLogger(__name__)

PROGRAM = "nvidia-cuda-mps-control"
#: Seconds for the guard to say that the daemon is started.
_START_S = 60.0


def find_program() -> str:
    """Where the control daemon is. MissingError: it is not on the PATH, or could not be watched here."""
    found = shutil.which(PROGRAM)
    if found is None:
        raise MissingError(
            f"placement.sharing = mps: {PROGRAM} is not on the PATH; it comes with NVIDIA's driver for Linux (in a "
            "container: the capability compute), or set sharing to share"
        )
    if not Path(CHILDREN).exists():
        raise MissingError(
            f"placement.sharing = mps: this kernel does not list the children of processes ({CHILDREN}), so the run "
            f"could not end {PROGRAM}; set sharing to share"
        )
    return found


def share_seats(
    placement: PlacementSettings,  # noqa: ARG001 - of every way of sharing
    seats: Mapping[str, Resources],
    *,
    simulators_leave: bool,  # noqa: ARG001
    offload: str,  # noqa: ARG001
) -> SharedSeats:
    """The seats as they are; the daemon is started with the run if two stations that compute share a device."""
    computing = {name: seat.device for name, seat in seats.items() if not name.startswith("simulator")}
    counts = Counter(device for device in computing.values() if device != CPU)
    clients = [name for name, device in computing.items() if counts[device] > 1]
    if not clients:
        return SharedSeats(
            seats, warnings=["placement.sharing = mps: no two stations compute on one device; set it to share"]
        )

    @contextmanager
    def serve(seats: Mapping[str, Resources], logs: Path | None) -> Iterator[Mapping[str, Resources]]:
        with control_daemon(logs) as variables:
            log.info("NVIDIA MPS: %s share their device under a control daemon of this run", ", ".join(clients))
            own = {name: replace(seats[name], environment=seats[name].environment | variables) for name in clients}
            yield {**seats, **own}

    return SharedSeats(seats, service=serve)


@contextmanager
def control_daemon(logs: Path | None, quit_s: float = QUIT_S) -> Iterator[dict[str, str]]:
    """A control daemon within the block; the variables by which processes find it. logs: folder of the run's logs;
    quit_s: for the daemon to be told to quit, before it is killed.

    MissingError: there is no program. StartError: it does not start.
    """
    program, folder = find_program(), Path(tempfile.mkdtemp(prefix="polyrhythm-mps-"))
    messages = logs / "mps" if logs is not None else folder / "log"
    messages.mkdir(parents=True, exist_ok=True)
    (folder / "pipe").mkdir()
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(messages)}
    # It numbers devices as the machine does, since the stations select among them by CUDA_VISIBLE_DEVICES.
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    with (messages / "guard.log").open("ab") as printed:
        guard = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "polyrhythm.plugins.sharing.guard", program, str(folder), str(quit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            env={**environment, **same_imports(), **variables},
            start_new_session=True,  # what a terminal sends is for the run
        )
    assert guard.stdin is not None
    assert guard.stdout is not None
    try:
        ready, _, _ = select.select([guard.stdout], [], [], _START_S)
        said = guard.stdout.readline().decode(errors="replace").strip() if ready else "it does not answer"
        said = said or "its guard has ended"
        if said != "started":
            guard.stdout.close()
            raise StartError(f"placement.sharing = mps: {PROGRAM} cannot be started ({said}); its log: {messages}")
        threading.Thread(target=_log_changes, args=(guard.stdout, messages), name="mps", daemon=True).start()
        yield variables
    finally:
        with suppress(OSError):
            guard.stdin.close()
        try:
            status = guard.wait(longest_end_s(quit_s))
        except subprocess.TimeoutExpired:
            log.error("NVIDIA MPS: its guard %d does not end; it is killed, look for %s", guard.pid, PROGRAM)
            guard.kill()
            guard.wait()
        else:
            if status:
                log.error("NVIDIA MPS: its guard ended with status %d; look for %s", status, PROGRAM)
            else:
                log.info("NVIDIA MPS: the control daemon has ended")
        shutil.rmtree(folder, ignore_errors=True)  # which a guard that is killed has not removed


def _log_changes(said: IO[bytes], messages: Path) -> None:
    """Consumes: lines of the guard. Waits for: one. Unblocked by: one, or the guard's end. Produces: errors in the
    log."""
    with said:
        for line in said:
            log.error("NVIDIA MPS: %s; its log: %s", line.decode(errors="replace").strip(), messages)
