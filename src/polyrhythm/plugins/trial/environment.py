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
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from polyrhythm.config.schema import RunConfig
from polyrhythm.conformance import Finding, place
from polyrhythm.env_warnings import warn_once
from polyrhythm.envs.base import EnvSettings
from polyrhythm.errors import ConfigError, MissingError
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
#: Seconds that a thread may still run after its last event.
_JOIN_S = 1.0
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


#: The trial's events, and the error for a trial that has ended during a call, or has not returned from it in time.
_Trial = tuple[queue.SimpleQueue[list[Any]], Callable[[str], ConfigError]]


def _events(job: str, config: RunConfig, settings: EnvSettings, *, play: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the trial's results as (kind, content). ConfigError: the job fails."""
    what = f"env.type = {config.env_type}"
    episode = _episode(config, play=play)
    inline = config.launcher == "inline"
    trial = _in_thread(what, job, config, settings, episode) if inline else _in_process(what, job, config, episode)
    for event in _timed(trial, _limits(config), 0.0 if inline else _GRACE_S):
        match event:
            case ["violation", problem, fix]:
                raise ConfigError(f"{what}: {problem}; {fix}")
            case ["error", sentence, lacks_module, is_missing]:  # `resume` names the folder in which the run began
                kind = MissingError if is_missing else ConfigError
                raise kind(sentence) from (ImportError(sentence) if lacks_module else None)
            case ["warning", whose, sentence]:
                warn_once(f"{whose or what}: {sentence}")
            case ["over"]:
                return
            case [kind, seen]:
                yield kind, seen


def _timed(trial: AbstractContextManager[_Trial], limits: Mapping[str, float], grace_s: float) -> Iterator[list[Any]]:
    """Yield the trial's events. Waits for: the next one. Unblocked by: it, the trial's end, or the call's limit."""
    call = "spec"
    with trial as (events, failure):
        while True:
            try:
                event = events.get(timeout=limits[call] + grace_s)
            except queue.Empty:
                event = ["ended"]
            match event:
                case ["call", name]:
                    call = name
                case ["ended"]:
                    raise failure(call)
                case ["raised", error]:
                    raise error
                case _:
                    yield event


def _episode(config: RunConfig, *, play: bool) -> EpisodeTrial:
    expert, scoring = config.demonstrations is not None and config.demonstrations.dataset is None, config.scoring
    if scoring is None:
        return EpisodeTrial(play, expert)
    options = scoring.model_dump(mode="json")["options"]
    return EpisodeTrial(play, expert, scoring.function, options, scoring.try_first)


def _limits(config: RunConfig) -> dict[str, float]:
    return {call: getattr(config.supervision, name) for call, name in LIMITS.items()}


def _callee(config: RunConfig, what: str, call: str) -> tuple[str, str, str]:
    """The setting that names the owner of a call, the call's name in the message, and another remedy. what: names the
    environment."""
    other = f", {WAY_OUT}" if call == "score" else ""
    if call in _REWARDS and config.scoring is not None:
        return f"scoring.function = {config.scoring.function}", _REWARDS[call], other
    return what, call, other


def _timeout_error(config: RunConfig, what: str, call: str, where: str) -> ConfigError:
    whose, name, other = _callee(config, what, call)
    return ConfigError(
        f"{whose}: {name} has not returned within {_limits(config)[call]:g} s{where}; fix it there, or raise "
        f"supervision.{LIMITS[call]}{other}"
    )


@contextmanager
def _in_thread(
    what: str, job: str, config: RunConfig, settings: EnvSettings, episode: EpisodeTrial
) -> Iterator[_Trial]:
    """Run the trial in a thread of this process."""
    events: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def work() -> None:
        try:
            run_trial(job, settings, config.rollout.rows, lambda *event: events.put(list(event)), episode)
        except BaseException as error:  # noqa: BLE001 - raised by the waiting thread
            events.put(["raised", error])

    def failure(call: str) -> ConfigError:
        frame = sys._current_frames().get(thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame else []
        return _timeout_error(config, what, call, place([(entry.filename, entry.lineno or 0) for entry in stack]))

    thread = threading.Thread(target=work, name="env trial", daemon=True)
    python, array = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            thread.start()
            yield events, failure
            thread.join(_JOIN_S)
    finally:
        random.setstate(python)
        np.random.set_state(array)


@contextmanager
def _in_process(what: str, job: str, config: RunConfig, episode: EpisodeTrial) -> Iterator[_Trial]:
    """Run the trial in a process, in a new session, so that it does not receive the terminal's signals."""
    events: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
    ours, theirs = os.pipe()
    env, rows = config.env.model_dump(mode="json"), config.rollout.rows
    task = {"job": job, "env": env, "rows": rows, "limits": _limits(config), "pipe": theirs, "episode": episode}

    def read() -> None:
        try:
            with os.fdopen(ours, "rb") as pipe:
                for line in pipe:
                    events.put(decode_event(line))
        finally:
            events.put(["ended"])

    with tempfile.TemporaryFile() as log:
        popen = subprocess.Popen(
            [sys.executable, "-m", "polyrhythm.plugins.trial.process"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=os.environ | same_imports(),
            pass_fds=(theirs,),
            start_new_session=True,
        )
        os.close(theirs)
        thread = threading.Thread(target=read, name="env trial", daemon=True)
        thread.start()
        try:
            assert popen.stdin is not None
            with suppress(BrokenPipeError), popen.stdin:  # it has ended already; the end of its lines reports that
                popen.stdin.write(json.dumps(task).encode())
            yield events, lambda call: _exit_error(config, what, call, popen, log)
        finally:
            popen.kill()
            popen.wait()
            thread.join(_JOIN_S)  # longer if a child of it keeps the pipe


def _exit_error(config: RunConfig, what: str, call: str, popen: subprocess.Popen[bytes], log: IO[bytes]) -> ConfigError:
    try:
        status = popen.wait(_GRACE_S)  # on a busy machine it may write its traceback only now
    except subprocess.TimeoutExpired:
        return _timeout_error(config, what, call, "")
    log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
    text = log.read().decode("utf-8", errors="replace")
    threads = text.rpartition("Timeout (")[2].split("\n\n")
    ours = next((thread for thread in threads if "trial/process.py" in thread), "")
    dumped = re.findall(r'^  File "(.+)", line (\d+) in ', ours, re.MULTILINE)
    if "Timeout (" in text:
        return _timeout_error(config, what, call, place([(file, int(line)) for file, line in reversed(dumped)]))
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
    whose, name, other = _callee(config, what, call)
    return ConfigError(
        f"{whose}: {name} ended the trial process (status {status}): {last.strip()}; make it run outside of "
        f"polyrhythm first{other}"
    )
