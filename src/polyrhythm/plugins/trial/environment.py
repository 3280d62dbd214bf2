"""Tries the environment before the run, in the same kind of process as its stations, with a deadline per call.

Launcher local: in a separate process, so that the main process survives a crash, also in spec(). Launcher inline: in a
thread, since the class may be defined only in this process. A hanging environment is reported in both cases.
"""

from __future__ import annotations

import json
import os
import queue
import random
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from polyrhythm.config.schema import RunConfig
from polyrhythm.conformance import Finding, place
from polyrhythm.env_warnings import warn_once
from polyrhythm.envs.base import EnvSettings
from polyrhythm.errors import ConfigError
from polyrhythm.imports import same_imports
from polyrhythm.plugins.trial.checked_env import Arrays
from polyrhythm.plugins.trial.process import WAY_OUT, EpisodeTrial, decode_event, run_trial
from polyrhythm.specs import EnvSpec

#: Call → the setting of its time limit.
LIMITS = {
    "spec": "start_s",
    "build": "start_s",
    "reset": "reset_s",
    "step": "step_s",
    "observe": "step_s",
    "expert": "step_s",
    "close": "step_s",
    "load": "start_s",
    "score": "score_s",
}
#: Calls into the reward function, in words; all others are calls of the environment.
_REWARDS = {"load": "making it", "score": "it"}
#: Seconds after a call's limit within which the process ends itself and writes its traceback.
_GRACE_S = 5.0
_LAST_BYTES = 16_384


class EnvTrial(NamedTuple):
    """An environment's spec, and the observations of two rows after a reset."""

    spec: EnvSpec
    rows: Arrays


def try_spec(config: RunConfig, settings: EnvSettings) -> EnvSpec:
    """The environment's spec. Raises ConfigError if spec() raises, hangs or crashes."""
    spec: EnvSpec = dict(_events("spec", config, settings))["spec"]
    return spec


def declared_rows(spec: EnvSpec) -> EnvTrial:
    """Two random rows of this spec, for a machine that cannot build the environment."""
    rng, rows = np.random.default_rng(0), {}
    for name, array in spec.observation.items():
        values = rng.random((2, *array.shape)) * (1 if np.dtype(array.dtype).kind in "bf" else 2)
        rows[name] = values.astype(array.dtype)
    return EnvTrial(spec, rows)


def try_env(config: RunConfig, settings: EnvSettings, *, play: bool = True) -> EnvTrial:
    """Build the environment and reset it; play an episode of a text environment.

    The episode is passed to the reward function. A second reset with the same seeds warns if it differs. play: whether
    an episode is played. ConfigError: the environment or the reward function violates its contract.
    """
    seen = dict(_events("observe", config, settings, play=play))
    return EnvTrial(seen["spec"], seen["arrays"])


def try_contract(config: RunConfig, settings: EnvSettings) -> Iterator[Finding | Arrays]:
    """Yield the findings of all checks of the environment, then its first rows.

    ConfigError: it hangs or crashes, or these rows cannot be observed.
    """
    for kind, seen in _events("contract", config, settings):
        if kind != "spec":
            yield Finding(*seen) if kind == "finding" else seen


def _events(job: str, config: RunConfig, settings: EnvSettings, *, play: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the trial's results as (kind, content). ConfigError: the job fails."""
    what = f"env.type = {config.env_type}"
    trial = _in_thread if config.launcher == "inline" else _in_process
    for event in trial(what, job, config, settings, _episode(config, play=play)):
        match event:
            case ["violation", problem, fix]:
                raise ConfigError(f"{what}: {problem}; {fix}")
            case ["error", sentence]:
                raise ConfigError(sentence)
            case ["warning", whose, sentence]:
                warn_once(f"{whose or what}: {sentence}")
            case ["over"]:
                return
            case [kind, seen]:
                yield kind, seen


def _episode(config: RunConfig, *, play: bool) -> EpisodeTrial:
    expert = config.demonstrations is not None and config.demonstrations.dataset is None
    if config.scoring is None:
        return EpisodeTrial(play, expert)
    options = config.scoring.model_dump(mode="json")["options"]
    return EpisodeTrial(play, expert, config.scoring.function, options, config.scoring.try_first)


def _callee(config: RunConfig, what: str, call: str) -> tuple[str, str]:
    """The setting that names the owner of a call, and the call's name in the message. what: names the environment."""
    if call in _REWARDS and config.scoring is not None:
        return f"scoring.function = {config.scoring.function}", _REWARDS[call]
    return what, call


def _limits(config: RunConfig) -> dict[str, float]:
    return {call: getattr(config.supervision, name) for call, name in LIMITS.items()}


def _timeout_error(config: RunConfig, what: str, call: str, where: str) -> ConfigError:
    limit = _limits(config)[call]
    whose, name = _callee(config, what, call)
    return ConfigError(
        f"{whose}: {name} has not returned within {limit:g} s{where}; fix it there, or raise supervision.{LIMITS[call]}"
        f"{_way_out(call)}"
    )


def _way_out(call: str) -> str:
    return f", {WAY_OUT}" if call == "score" else ""


# ------------------------------------------------------------ in a thread


def _in_thread(
    what: str, job: str, config: RunConfig, settings: EnvSettings, episode: EpisodeTrial
) -> Iterator[list[Any]]:
    """Yield the thread's events. Waits for: the next event. Unblocked by: an event, or the current call's time
    limit."""
    events: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
    limits, call = _limits(config), "spec"

    def work() -> None:
        try:
            run_trial(job, settings, config.rollout.rows, lambda *event: events.put(list(event)), episode)
        except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
            events.put(["raised", error])

    thread = threading.Thread(target=work, name="env trial", daemon=True)
    with _same_random_numbers():
        thread.start()
        while True:
            try:
                event = events.get(timeout=limits[call])
            except queue.Empty:
                raise _timeout_error(config, what, call, _thread_location(thread)) from None
            if event[0] == "call":
                call = event[1]
                continue
            if event[0] == "raised":
                raise event[1]
            if event[0] in {"over", "violation", "error"}:
                thread.join(limits["close"])
            yield event


def _thread_location(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return place([(entry.filename, entry.lineno or 0) for entry in traceback.extract_stack(frame)]) if frame else ""


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Restore the global random generators of Python, numpy and torch afterwards."""
    python, array = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


# ------------------------------------------------------------ in a process


def _in_process(what: str, job: str, config: RunConfig, _: EnvSettings, episode: EpisodeTrial) -> Iterator[list[Any]]:
    """Yield the process's events. Waits for: its next line. Unblocked by: a line, the process's end, or the limit."""
    limits, call = _limits(config), "spec"
    with tempfile.TemporaryFile() as log:
        popen, lines = _start(job, config, episode, limits, log)
        try:
            while True:
                line = lines.next(limits[call] + _GRACE_S)
                if not line:
                    raise _exit_error(config, what, call, popen, log)
                event = decode_event(line)
                if event[0] == "call":
                    call = event[1]
                else:
                    yield event
        finally:
            popen.kill()
            popen.wait()
            lines.close()


class _LineReader:
    def __init__(self, pipe: int) -> None:
        self._pipe, self._rest = pipe, b""

    def next(self, seconds: float) -> bytes:
        """The next line; b"" if the pipe was closed or none came in time."""
        until = time.monotonic() + seconds
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, until - time.monotonic()))
            chunk = os.read(self._pipe, 1 << 20) if ready else b""
            if not chunk:
                return b""
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def close(self) -> None:
        os.close(self._pipe)


def _start(
    job: str, config: RunConfig, episode: EpisodeTrial, limits: dict[str, float], log: IO[bytes]
) -> tuple[subprocess.Popen[bytes], _LineReader]:
    """Start the process in a new session, so that it does not receive the terminal's signals."""
    ours, theirs = os.pipe()
    environment = os.environ | same_imports()
    popen = subprocess.Popen(
        [sys.executable, "-m", "polyrhythm.plugins.trial.process"],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        env=environment,
        pass_fds=(theirs,),
        start_new_session=True,
    )
    os.close(theirs)
    env = config.env.model_dump(mode="json")
    task = {
        "job": job,
        "env": env,
        "rows": config.rollout.rows,
        "limits": limits,
        "pipe": theirs,
        "episode": episode,
    }
    assert popen.stdin is not None
    try:
        popen.stdin.write(json.dumps(task).encode())
        popen.stdin.close()
    except BrokenPipeError:
        pass  # it has ended already; reading its lines reports that
    return popen, _LineReader(ours)


def _exit_error(config: RunConfig, what: str, call: str, popen: subprocess.Popen[bytes], log: IO[bytes]) -> ConfigError:
    log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
    text = log.read().decode("utf-8", errors="replace")
    threads = text.rpartition("Timeout (")[2].split("\n\n")
    ours = next((thread for thread in threads if "trial/process.py" in thread), "")
    dumped = re.findall(r'^  File "(.+)", line (\d+) in ', ours, re.MULTILINE)
    try:
        status = popen.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        return _timeout_error(config, what, call, "")
    if "Timeout (" in text:
        return _timeout_error(config, what, call, place([(file, int(line)) for file, line in reversed(dumped)]))
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
    whose, name = _callee(config, what, call)
    return ConfigError(
        f"{whose}: {name} ended the trial process (status {status}): {last.strip()}; make it run outside of "
        f"polyrhythm first{_way_out(call)}"
    )
