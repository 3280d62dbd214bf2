"""The process that has the environment: `python -m` this module, SOCKET MEMORY PARENT.

These are two inherited descriptors and the process id of whoever started it.

It needs this package, numpy, msgspec, pydantic and what the environment itself needs. It ends with `Close`, with the
connection, or with the thread that started it, whatever comes first.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import singledispatchmethod
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
    EnvBatch,
    EnvSettings,
    EpisodeRefused,
    FullEnvSettings,
    RowsFailed,
    batch_traits,
    traits_of,
)
from polyrhythm.envs.checked_env import as_utf8
from polyrhythm.envs.mujoco import set_simulator_count
from polyrhythm.errors import ConfigError, PolyrhythmError
from polyrhythm.plugins.simulators.separate import protocol as p

_PR_SET_PDEATHSIG = 1


class EnvServer:
    """Answers requests. memory: descriptor of the file for observations."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._settings: EnvSettings | None = None
        self._batch: Any = None
        self._views: dict[str, NDArray[Any]] = {}
        self._warnings = EnvWarnings()

    @singledispatchmethod
    def answer(self, request: object) -> p.Reply:
        """The reply to a request; it may raise whatever the environment raises."""
        raise TypeError(f"no such request: {request}")

    @answer.register
    def _(self, request: p.Open) -> p.Reply:
        if request.version != p.VERSION:
            raise ConfigError("it has another version of polyrhythm than the run; install that of the run there")
        settings = _resolved(request.env)
        with set_simulator_count(request.simulators):
            check_installed("env", settings)
        if not isinstance(settings, EnvSettings):
            raise ConfigError(f"env.type = {request.env.get('type')}: its settings need spec() and build(rows)")
        assert isinstance(settings, BaseModel)
        self._settings = settings
        return p.EnvOpened(settings.spec(), settings.model_dump(mode="json"), os.environ.get("MUJOCO_GL", ""))

    @answer.register
    def _(self, _request: p.Rendering) -> p.Reply:
        own = cast(FullEnvSettings, self._settings)
        found = own.rendering() if traits_of(own).rendering else own
        assert found is None or isinstance(found, BaseModel), "settings are"
        return p.Renders(None if found is None else found.model_dump(mode="json"))

    @answer.register
    def _(self, request: p.Build) -> p.Reply:
        assert self._settings is not None, "it was opened"
        batch: EnvBatch = self._settings.build(request.rows)
        self._batch = batch
        self._views = p.map_observations(self._memory, batch.spec.observation, batch.rows)
        return p.Built(batch.rows, batch.spec, batch_traits(batch))

    @answer.register
    def _(self, request: p.Reset) -> p.Reply:
        try:
            self._batch.reset(request.rows, request.tasks, request.seeds)
        except RowsFailed as failed:
            return p.CallDone(_texts(failed), _refused(failed))
        return p.CallDone()

    @answer.register
    def _(self, request: p.Step) -> p.Reply:
        failed: dict[int, str] = {}
        try:
            found = self._batch.step(request.rows, p.unpacked(request.actions))
        except RowsFailed as error:
            if error.result is None:
                raise
            found, failed = error.result, _texts(error)
        return p.Stepped(
            p.packed(found.reward),
            p.packed(found.terminated),
            p.packed(found.truncated),
            p.packed(found.success),
            {name: p.packed(array) for name, array in found.metrics.items()},
            failed,
            None if found.executed is None else p.packed(found.executed),
            self._warnings.take(),
        )

    @answer.register
    def _(self, request: p.Observe) -> p.Reply:
        self._batch.observe(request.rows, {name: view[: len(request.rows)] for name, view in self._views.items()})
        return p.CallDone()

    @answer.register
    def _(self, request: p.ExpertActions) -> p.Reply:
        try:
            return p.ArrayAnswer(p.packed(self._batch.expert_actions(request.rows)))
        except RowsFailed as failed:
            if failed.result is None:
                raise
            return p.ArrayAnswer(p.packed(failed.result), _texts(failed), _refused(failed))

    @answer.register
    def _(self, request: p.Render) -> p.Reply:
        return p.ArrayAnswer(p.packed(self._batch.render(request.row)))

    @answer.register
    def _(self, request: p.Discard) -> p.Reply:
        self._batch.discard(request.row)
        return p.CallDone()

    @answer.register
    def _(self, request: p.Texts) -> p.Reply:
        return p.Said(tuple(map(as_utf8, self._batch.texts(request.row))))

    @answer.register
    def _(self, _request: p.CloseBatch) -> p.Reply:
        self.close()
        return p.CallDone()

    def close(self) -> None:
        """Close the batch, if it is open."""
        batch, self._batch = self._batch, None
        if batch is not None:
            batch.close()


def _resolved(section: dict[str, Any]) -> BaseModel:
    """ConfigError: there is no such environment, or it refuses its settings."""
    try:
        return resolve("env", section)
    except NestedRefusal as error:
        raise ConfigError(*explain(error.error, error.model, "env")) from error
    except InvalidSetting as error:
        raise ConfigError(f"env.{error}") from error


def _texts(failed: RowsFailed) -> dict[int, str]:
    for error in failed.errors.values():
        if isinstance(error, PolyrhythmError | ImportError):
            raise error  # no retry solves it
    return {int(row): raised(error).text for row, error in failed.errors.items()}


def _refused(failed: RowsFailed) -> tuple[int, ...]:
    return tuple(int(row) for row, error in failed.errors.items() if isinstance(error, EpisodeRefused))


def raised(error: BaseException) -> p.CallRaised:
    """What is told of an error, with the place in the environment's code."""
    if isinstance(error, EpisodeRefused):
        return p.CallRaised("", str(error))
    if isinstance(error, PolyrhythmError):
        return p.CallRaised(type(error).__name__, str(error))
    if isinstance(error, ImportError):
        return p.CallRaised("ImportError", f"{error}{own_place(error)}")
    return p.CallRaised("", f"{type(error).__name__}: {error}{own_place(error)}")


def serve(line: p.Connection, server: EnvServer) -> None:
    """Answer requests until the last one."""
    while True:
        request = line.receive()
        try:
            reply = server.answer(request)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whoever asked is told
            reply = raised(error)
        line.send(reply)
        if isinstance(request, p.CloseBatch):
            return


def main(words: list[str]) -> int:
    end, memory, parent = (int(word) for word in words)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.stderr.write("whoever started this has ended, or is not its parent (let a script end in exec)\n")
        return 1
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever started it ends it
    line, server = p.Connection(socket.socket(fileno=end), "request"), EnvServer(memory)
    with suppress(EOFError, OSError):
        serve(line, server)
    server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
