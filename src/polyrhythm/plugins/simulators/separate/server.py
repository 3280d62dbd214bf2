"""The process that runs the environment: `python -m` this module, SOCKET MEMORY PARENT.

The arguments are two inherited descriptors and the process id of the parent. It needs this package, numpy, msgspec,
pydantic and the environment's requirements. It ends with the connection, or with the thread that started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from numpy.typing import NDArray
from pydantic import BaseModel

from polyrhythm.config.base import InvalidSetting
from polyrhythm.config.catalog import check_installed
from polyrhythm.config.explain import explain
from polyrhythm.config.registry import NestedRefusal, resolve
from polyrhythm.conformance import own_place
from polyrhythm.env_warnings import EnvWarnings
from polyrhythm.envs.base import (
    EnvSettings,
    EpisodeRefused,
    FullEnvBatch,
    FullEnvSettings,
    RowsFailed,
    as_utf8,
    batch_traits,
    traits_of,
)
from polyrhythm.envs.mujoco import Drawing, set_drawing
from polyrhythm.errors import ConfigError, PolyrhythmError
from polyrhythm.plugins.simulators.separate import protocol as p

_PR_SET_PDEATHSIG = 1


class EnvServer:
    """Answers requests. memory: descriptor of the file for observations."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._settings: EnvSettings | None = None
        self._batch: FullEnvBatch | None = None
        self._views: dict[str, NDArray[Any]] = {}
        self._warnings = EnvWarnings()

    def answer(self, request: p.Request) -> p.Reply:
        """The reply to a request; raises any error of the environment."""
        match request:
            case p.Open():
                return self._open(request)
            case p.Rendering():
                own = cast(FullEnvSettings, self._settings)
                found = own.rendering() if traits_of(own).rendering else own
                assert found is None or isinstance(found, BaseModel), "settings are"
                return p.Renders(None if found is None else found.model_dump(mode="json"))
            case p.Build():
                assert self._settings is not None, "it was opened"
                batch = self._settings.build(request.rows)
                self._batch = cast(FullEnvBatch, batch)
                self._views = p.map_observations(self._memory, batch.spec.observation, batch.rows)
                return p.Built(batch.rows, batch.spec, batch_traits(batch))
            case p.BatchCall():
                return self._call(request)

    def _open(self, request: p.Open) -> p.EnvOpened:
        if request.version != p.VERSION:
            raise ConfigError("it has another version of polyrhythm than the run; install that of the run there")
        try:
            settings = resolve("env", request.env)
        except NestedRefusal as error:
            raise ConfigError(*explain(error.error, error.model, "env")) from error
        except InvalidSetting as error:
            raise ConfigError(f"env.{error}") from error
        with set_drawing(Drawing(request.simulators, request.computing)):
            check_installed("env", settings)
        if not isinstance(settings, EnvSettings):
            raise ConfigError(f"env.type = {request.env.get('type')}: its settings need spec() and build(rows)")
        assert isinstance(settings, BaseModel)
        self._settings = settings
        return p.EnvOpened(settings.spec(), settings.model_dump(mode="json"), os.environ.get("MUJOCO_GL", ""))

    def _call(self, call: p.BatchCall) -> p.CallReturned:
        failed: Mapping[int, Exception] = {}
        try:
            found = self._called(call)
        except RowsFailed as error:
            if error.result is None and call.method != "reset":
                raise
            found, failed = error.result, error.errors
            for one in failed.values():
                if isinstance(one, PolyrhythmError | ImportError):
                    raise one from error  # no retry solves it
        arrays: dict[str, Any] = {}
        metrics: dict[str, Any] = {}
        if call.method == "step":
            arrays = {name: array for name, array in found._asdict().items() if array is not None}
            metrics = arrays.pop("metrics")
        elif call.method in ("expert_actions", "render"):
            arrays = {"result": found}
        return p.CallReturned(
            {name: p.packed(array) for name, array in arrays.items()},
            {name: p.packed(array) for name, array in metrics.items()},
            tuple(map(as_utf8, found)) if call.method == "texts" else (),
            {int(row): raised(error).text for row, error in failed.items()},
            tuple(int(row) for row, error in failed.items() if isinstance(error, EpisodeRefused)),
            self._warnings.take(),
        )

    def _called(self, call: p.BatchCall) -> Any:
        batch, rows = self._batch, list(call.rows)  # a tuple would index the dimensions of numpy arrays
        assert batch is not None, "it was built"
        match call.method:
            case "reset":
                return batch.reset(rows, list(call.tasks), list(call.seeds))
            case "step":
                assert call.actions is not None
                return batch.step(rows, p.unpacked(call.actions))
            case "observe":
                return batch.observe(rows, {name: view[: len(rows)] for name, view in self._views.items()})
            case "expert_actions":
                return batch.expert_actions(rows)
            case "render":
                return batch.render(rows[0])
            case "discard":
                return batch.discard(rows[0])
        return batch.texts(rows[0])

    def close(self) -> None:
        """Close the batch, if it is open."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.close()


def raised(error: BaseException) -> p.CallRaised:
    """The message for an error, with its location in the environment's code."""
    if isinstance(error, EpisodeRefused):
        return p.CallRaised("", str(error))
    if isinstance(error, PolyrhythmError):
        return p.CallRaised(type(error).__name__, str(error))
    if isinstance(error, ImportError):
        return p.CallRaised("ImportError", f"{error}{own_place(error)}")
    return p.CallRaised("", f"{type(error).__name__}: {error}{own_place(error)}")


def main(words: list[str]) -> int:
    end, memory, parent = (int(word) for word in words)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.stderr.write("whoever started this has ended, or is not its parent (let a script end in exec)\n")
        return 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent ends it
    line, server = p.EnvLink(socket.socket(fileno=end), p.Request), EnvServer(memory)
    with suppress(EOFError, OSError):  # the connection was closed
        while True:
            request = line.receive()
            try:
                reply = server.answer(request)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the parent raises it
                reply = raised(error)
            line.send(reply)
    with suppress(Exception, SystemExit):  # nobody asks any more
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
