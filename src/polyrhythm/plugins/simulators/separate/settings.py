"""An environment in another Python: its section with `python`, and the batch whose rows run in a process there.

Invariant: the process ends with `close`, with the process of this object, and with the thread that started it.
"""

from __future__ import annotations

import json
import os
import signal
import site
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from polyrhythm import errors
from polyrhythm.config.base import NotFound
from polyrhythm.config.registry import resolve
from polyrhythm.env_warnings import warn_once
from polyrhythm.envs.base import (
    EnvTraits,
    EpisodeRefused,
    FullEnvSettings,
    RowNumbers,
    RowsFailed,
    StepResult,
    Variant,
    traits_of,
    wrapped_traits,
)
from polyrhythm.envs.mujoco import drawing
from polyrhythm.errors import ConfigError, EnvLost, MissingError, PolyrhythmError
from polyrhythm.imports import SOURCE
from polyrhythm.plugins.simulators.separate import protocol as p
from polyrhythm.plugins.simulators.setup import find_python
from polyrhythm.specs import EnvSpec

_MODULE = "polyrhythm.plugins.simulators.separate.server"
#: Seconds for the process to end. Its calls have no limit here: the trial before a run and supervision limit them.
_CLOSE_S = 10.0

R = TypeVar("R", bound=p.Reply)


class SeparateBatch:
    """The batch that `process` builds."""

    def __init__(self, process: EnvProcess, rows: int) -> None:
        self._process = process
        os.ftruncate(process.memory, p.observation_bytes(process.spec.observation, rows))
        built = process.request(p.Build(rows), p.Built)
        self.spec, self.rows = built.spec, built.rows
        self._views = p.map_observations(process.memory, built.spec.observation, rows)
        self.traits = wrapped_traits(self, built.traits)

    def _call(self, method: str, rows: RowNumbers, **more: Any) -> p.CallReturned:
        found = self._process.request(p.BatchCall(method, tuple(map(int, rows)), **more), p.CallReturned)  # type: ignore[arg-type]
        for text in found.warned:
            warn_once(text)
        return found

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        _refuse_failed(self._call("reset", rows, tasks=tuple(map(int, tasks)), seeds=tuple(map(int, seeds))))

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        found = self._call("step", rows, actions=p.packed(actions))
        arrays, metrics = ({name: p.unpacked(x) for name, x in part.items()} for part in (found.arrays, found.metrics))
        result = StepResult(**arrays, metrics=metrics)
        _refuse_failed(found, result)
        return result

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        self._call("observe", rows)
        for name, view in self._views.items():
            out[name][: len(rows)] = view[: len(rows)]

    def expert_actions(self, rows: RowNumbers) -> NDArray[Any]:
        found = self._call("expert_actions", rows)
        actions = p.unpacked(found.arrays["result"])
        _refuse_failed(found, actions)
        return actions

    def render(self, row: int) -> NDArray[Any]:
        return p.unpacked(self._call("render", [row]).arrays["result"])

    def discard(self, row: int) -> None:
        self._call("discard", [row])

    def texts(self, row: int) -> tuple[str, ...]:
        return self._call("texts", [row]).texts

    def close(self) -> None:
        self._process.close()


def _refuse_failed(found: p.CallReturned, result: Any = None) -> None:
    """RowsFailed: some rows failed while others did not."""
    if found.failed:
        kinds = {row: EpisodeRefused if row in found.refused else RuntimeError for row in found.failed}
        raise RowsFailed({row: kinds[row](text) for row, text in found.failed.items()}, result)


class EnvProcess:
    """The process of one environment. python: its interpreter; name: of the interpreter, for messages; env: the
    environment's section. Afterwards spec and env are those that the process reports, and this process adopts its GL
    backend unless it has one. ConfigError: the process does not start, or has no such environment."""

    def __init__(self, python: Path, name: str, env: Mapping[str, Any]) -> None:
        self.memory = p.memory_file()
        ours, theirs = socket.socketpair()
        arguments = [str(number) for number in (theirs.fileno(), self.memory, os.getpid())]
        try:
            self._process = subprocess.Popen(  # noqa: S603
                [str(python), "-m", _MODULE, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # stderr: simulators print; a command's own output is for its result
                env=environment(),
                pass_fds=(theirs.fileno(), self.memory),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            os.close(self.memory)
            raise ConfigError(f"env.python = {name}: {python} cannot be started ({error.strerror})") from error
        finally:
            theirs.close()
        self._line = p.EnvLink(ours, p.Reply)
        try:
            simulators, device = drawing()
            opened = self.request(p.Open(dict(env), simulators=simulators, computing=device), p.EnvOpened)
        except BaseException as error:
            self.close()
            if isinstance(error, EnvLost):
                fix = "is polyrhythm installed there? polyrhythm envs setup makes such a Python"
                raise MissingError(f"env.python = {name}: {error}; {fix}") from error
            if isinstance(error, PolyrhythmError | ImportError | RuntimeError):
                kind = type(error) if isinstance(error, ConfigError) else ConfigError
                raise kind(f"env.python = {name}: {error}") from error
            raise
        self.spec, self.env = opened.spec, opened.env
        if opened.gl:
            os.environ.setdefault("MUJOCO_GL", opened.gl)

    def request(self, message: p.Request, kind: type[R]) -> R:
        """Send a request and wait for its answer.

        EnvLost: the process has ended. Errors of the environment are re-raised: this package's as the same class,
        others as RuntimeError that quotes them.
        """
        try:
            self._line.send(message)
            reply = self._line.receive()
        except (OSError, EOFError) as error:
            raise EnvLost(f"the environment's process {self._how_it_ended()}") from error
        if isinstance(reply, p.CallRaised):
            raise _error_class(reply.error)(reply.text)
        if not isinstance(reply, kind):
            raise EnvLost(f"the environment's process answered {type(message).__name__} by {type(reply).__name__}")
        return reply

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def close(self) -> None:
        """End the process; idempotent."""
        if self.memory < 0:
            return
        self._line.close()
        os.close(self.memory)
        self.memory = -1
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            pass  # killed below
        finally:
            self._process.kill()
            self._process.wait()


def _error_class(name: str) -> type[Exception]:
    """The error class of a name that the other process sent: one of this package's, ImportError, or RuntimeError."""
    if name == "ImportError":
        return ImportError
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, PolyrhythmError) else RuntimeError


def environment() -> dict[str, str]:
    """Environment variables for the other Python: this process's, without paths to its installed packages; source
    folders stay importable."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    own = [path for name, path in sysconfig.get_paths().items() if name != "data"]  # which is the prefix, maybe /usr
    own += [*site.getsitepackages(), site.getusersitepackages()]
    paths = keep_sources((SOURCE, *sys.path), own)
    return variables | {"PYTHONPATH": os.pathsep.join(paths)}


def keep_sources(paths: Iterable[str], installed: Sequence[str]) -> list[str]:
    """The paths that lie in none of the `installed` folders, without duplicates."""
    kept = [path for path in paths if path and not path.endswith(".zip")]
    return list(dict.fromkeys(x for x in kept if not any(Path(x).is_relative_to(folder) for folder in installed)))


#: Specs by Python and section, kept because reading one starts a process that imports the simulator.
_OPENED: dict[str, EnvSpec] = {}


class SeparateSettings(BaseModel):
    """An environment of any type that runs in another Python, with packages of its own.

    `python` is the name of one that `polyrhythm envs setup NAME` has made, or the path of an interpreter. The other
    fields are the environment's own.
    """

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    traits: ClassVar = EnvTraits(own_process=True, variants=True, rendering=True)

    type: str
    """The environment."""
    python: str
    """Name of a Python made by `polyrhythm envs setup`, or path of an interpreter."""

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> SeparateSettings:
        """Settings from a section with `python`. A type that cannot be imported here is validated only in the other
        Python.

        ValueError: invalid settings.
        """
        own = {name: value for name, value in section.items() if name != "python"}
        with suppress(NotFound):  # the other Python may have it
            own = resolve("env", own).model_dump(mode="json")
        return cls(**own, python=str(section["python"]))

    def own(self) -> dict[str, Any]:
        """The environment's section, without `python`."""
        return self.model_dump(mode="json", exclude={"python"})

    def variants(self) -> Mapping[str, Variant]:
        """The environment's variants; none if its settings cannot be imported here."""
        with suppress(NotFound):
            own = resolve("env", self.own())
            return cast(FullEnvSettings, own).variants() if traits_of(own).variants else {}
        return {}

    def rendering(self) -> SeparateSettings | None:
        """Settings for rendering in the same Python: the environment's own by default; None if it does not allow it."""
        process = self._start()
        try:
            found = process.request(p.Rendering(), p.Renders).env
        finally:
            process.close()
        return None if found is None else SeparateSettings(**found, python=self.python)

    def check(self) -> None:
        """ConfigError: the other Python does not start or lacks the environment."""
        self.spec()

    def spec(self) -> EnvSpec:
        """The spec reported by the other Python; requested once."""
        key = json.dumps([self.python, self.own()], sort_keys=True)
        if key not in _OPENED:
            process = self._start()
            _OPENED[key] = process.spec
            process.close()
        return _OPENED[key]

    def build(self, rows: int) -> SeparateBatch:
        """A batch of `rows` rows in a separate process."""
        process = self._start()
        try:
            return SeparateBatch(process, rows)
        except BaseException:
            process.close()
            raise

    def _start(self) -> EnvProcess:
        return EnvProcess(find_python(self.python, "env.python"), self.python, self.own())
