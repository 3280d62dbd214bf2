"""Tries an environment before a run: gets its spec, observes one reset, or checks its whole contract.

With launcher inline it runs in the main process, else in a process without torch, `python -m
polyrhythm.plugins.trial.process`, which reads the job from standard input and sends events to a pipe.
"""

from __future__ import annotations

import base64
import faulthandler
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from polyrhythm.checks import added
from polyrhythm.config.base import InvalidSetting
from polyrhythm.config.registry import NestedRefusal, resolve
from polyrhythm.conformance import ContractViolation, Finding
from polyrhythm.env_warnings import EnvWarnings, forget_warnings
from polyrhythm.envs.base import EnvSettings
from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.trial.checked_env import Arrays, CheckedEnv, read_spec
from polyrhythm.plugins.trial.env_contract import check_contract, find_memory, observe_reset
from polyrhythm.plugins.trial.episode import TrialEpisode, is_text, play_episode
from polyrhythm.specs.plain import as_plain, from_plain

#: Takes events in this order: ("call", name) before each call into the environment, ("finding", fields),
#: ("warning", setting or "", sentence), ("spec", EnvSpec), ("arrays", name -> array); last ("over",),
#: ("violation", problem, fix) or ("error", sentence).
Send = Callable[..., None]


#: Remedy for a valid reward function that fails on the trial episode.
WAY_OUT = "or set scoring.try_first=false"


class EpisodeTrial(NamedTuple):
    """The trial after the reset. play: play an episode of a text environment; expert: ask its expert; function,
    options: those of `scoring`, "" for none; score: call the function on the episode."""

    play: bool = True
    expert: bool = False
    function: str = ""
    options: Mapping[str, Any] = {}
    score: bool = False


@dataclass(slots=True)
class TriedEpisode:
    """The trial's episode, for plugin checks of stage "episode". about_to: called before each call into user code."""

    trial: EpisodeTrial
    settings: EnvSettings
    env: CheckedEnv
    about_to: Callable[[str], None]
    _played: TrialEpisode | None = None

    def play(self) -> TrialEpisode | None:
        """The sample, played at the first call; None if no episode is played. ContractViolation: the environment
        fails."""
        if self._played is None and self.trial.play and is_text(self.env.spec):
            self._played = play_episode(self.env, expert=self.trial.expert)
        return self._played


def run_trial(job: str, settings: EnvSettings, rows: int, send: Send, episode: EpisodeTrial) -> None:
    """Do a job.

    `spec`: get the spec. `observe`: also two rows after a reset, an episode of a text environment passed to the reward
    function, and a warning if equal seeds give different episodes. `contract`: all checks, then the same without that
    warning. rows: of an env batch in the run.
    """

    def about_to(call: str) -> None:
        send("call", call)

    def then(env: CheckedEnv, first: Arrays) -> None:
        played = TriedEpisode(episode, settings, env, about_to)
        for check in added("trial", "episode"):
            check.run(played)
        played.play()
        whose, problem = find_memory(settings, env, first, about_to) if job == "observe" else ("", "")
        if problem:
            send("warning", whose, problem)

    try:
        if job == "spec":
            send("spec", read_spec(settings, about_to))
        else:
            if job == "contract":
                _send_findings(settings, rows, about_to, send)
            spec, arrays = observe_reset(settings, rows, about_to, then)
            send("spec", spec)
            send("arrays", arrays)
    except ContractViolation as violation:
        send("violation", violation.problem, violation.fix)
    except PolyrhythmError as error:
        send("error", str(error))
    else:
        send("over")


def _send_findings(settings: EnvSettings, rows: int, about_to: Callable[[str], None], send: Send) -> None:
    """Send the findings of all checks, and warnings of environment modules as notes."""
    forget_warnings()
    with closing(EnvWarnings()) as warnings:
        for finding in check_contract(settings, rows, about_to):
            send("finding", finding)
    for text in warnings.take():
        problem, _, fix = text.rpartition("; ")
        send("finding", Finding("info of the steps", "note", problem, fix))


def encode_event(kind: str, *parts: Any) -> bytes:
    """An event as one line of JSON."""
    if kind == "spec":
        parts = (as_plain(parts[0]),)
    if kind == "arrays":
        parts = (
            {name: [a.dtype.name, a.shape, base64.b64encode(a.tobytes()).decode()] for name, a in parts[0].items()},
        )
    return json.dumps([kind, *parts]).encode() + b"\n"


def decode_event(line: bytes) -> list[Any]:
    """Inverse of `encode_event`."""
    kind, *parts = json.loads(line)
    if kind == "spec":
        parts = [from_plain(parts[0])]
    if kind == "arrays":
        parts = [
            {
                name: np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
                for name, (dtype, shape, text) in parts[0].items()
            }
        ]
    return [kind, *parts]


def main() -> None:
    """Run the job read from standard input; a call beyond its time limit ends the process with a traceback."""
    job = json.loads(sys.stdin.buffer.read())
    limits: dict[str, float] = job["limits"]
    with os.fdopen(job["pipe"], "wb", buffering=0) as pipe:

        def send(kind: str, *parts: Any) -> None:
            faulthandler.cancel_dump_traceback_later()
            if kind == "call":
                faulthandler.dump_traceback_later(limits[parts[0]], exit=True)
            pipe.write(encode_event(kind, *parts))

        try:
            settings: Any = resolve("env", job["env"])
        except (InvalidSetting, NestedRefusal) as refusal:
            send("error", f"env.type = {job['env'].get('type')}: {refusal}")
        else:
            run_trial(job["job"], settings, job["rows"], send, EpisodeTrial(*job["episode"]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # do not wait for a simulator's threads and exit handlers


if __name__ == "__main__":
    main()
