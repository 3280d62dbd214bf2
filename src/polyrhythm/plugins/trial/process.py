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
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyrhythm.checks import added
from polyrhythm.config.base import InvalidSetting
from polyrhythm.config.registry import NestedRefusal, resolve
from polyrhythm.conformance import ContractViolation, Finding
from polyrhythm.env_warnings import EnvWarnings, forget_warnings
from polyrhythm.envs.base import EnvSettings, StepResult
from polyrhythm.errors import MissingError, PolyrhythmError
from polyrhythm.plugins.trial.checked_env import Arrays, CheckedEnv, read_spec
from polyrhythm.plugins.trial.env_contract import check_contract, find_memory, observe_reset, trial_seed
from polyrhythm.readable import counted
from polyrhythm.specs import EnvSpec, Trajectory
from polyrhythm.specs.plain import as_plain, from_plain

#: Takes events in this order: ("call", name) before each call into the environment, ("finding", fields),
#: ("warning", setting or "", sentence), ("spec", EnvSpec), ("arrays", name -> array); last ("over",),
#: ("violation", problem, fix) or ("error", sentence, whether a module was not found, whether
#: this machine lacks something).
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
        send("error", str(error), isinstance(error.__cause__, ImportError), isinstance(error, MissingError))
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


# ------------------------------------------------------------ an episode of a text environment
#
# For checks of code that is called only after one. Other environments are not stepped, since random actions may break
# what they move.

#: Seed of the episode.
SEED = trial_seed(1)
#: Maximum number of expert messages; a longer episode is cut.
_MESSAGES = 8
#: Maximum tokens of a message without an expert: short, so that it overflows no context.
_WORDS = 4


class TrialEpisode(NamedTuple):
    """The sample, and a description of it."""

    sample: Trajectory
    said: str


def is_text(spec: EnvSpec) -> bool:
    """Whether actions are messages that answer a prompt of tokens."""
    return bool(spec.action.stops) and {"tokens", "length"} <= spec.observation.keys()


def play_episode(env: CheckedEnv, *, expert: bool) -> TrialEpisode:
    """Play a training episode of row 0 and the first task; the fields that a policy would add are 0.

    expert: use the expert's messages, if there is one; otherwise a single message of a few words of the prompt.
    ContractViolation, with the user's source line, or PolyrhythmError: the environment fails.
    """
    every = range(env.rows)
    env.reset(every, [0] * env.rows, [trial_seed(1 + row) for row in every])
    rows = [0] if env.spec.step_rows else list(every)
    seen, chosen, results, over = [env.observe(every)], [], list[StepResult](), False
    for _ in range(min(_MESSAGES, env.spec.max_steps)):
        found = _expert_messages(env, rows) if expert else None
        actions = _words_of_prompts(env, rows, seen[-1]) if found is None else found
        chosen.append(actions[:1])
        results.append(env.step(rows, actions))
        seen.append(env.observe(every))
        over = bool(results[-1].terminated[0] or results[-1].truncated[0])
        if over or found is None:
            break
    count, by = len(results), "the prompt's own words" if found is None else "the expert"
    said = f"an episode of {counted(count, 'message')}, answered by {by}{'' if over else ', cut there'}"
    return TrialEpisode(_sample(env, seen, np.concatenate(chosen), results), said)


def _expert_messages(env: CheckedEnv, rows: Sequence[int]) -> NDArray[np.int64] | None:
    """[n,C,1]; None if there is no expert, or it raises, which the recording of demonstrations reports."""
    try:
        found = env.expert_actions(rows)
    except (ContractViolation, PolyrhythmError):
        return None
    return None if found is None else found.astype(np.int64)


def _words_of_prompts(env: CheckedEnv, rows: Sequence[int], seen: Arrays) -> NDArray[np.int64]:
    """The first tokens of each prompt as its answer: [n,C,1]."""
    stops = env.spec.action.stops
    message = np.full((len(rows), env.spec.chunk, 1), stops[0], np.int64)
    for place, row in enumerate(rows):
        own = [token for token in seen["tokens"][row, : seen["length"][row]] if token not in stops]
        own = own[: min(_WORDS, env.spec.chunk - 1)]
        message[place, : len(own), 0] = own
    return message


def _sample(
    env: CheckedEnv, seen: Sequence[Arrays], actions: NDArray[np.generic], results: Sequence[StepResult]
) -> Trajectory:
    steps, last = len(results), results[-1]
    valid = np.ones((steps, env.spec.chunk), bool)
    rewards = np.zeros((steps, env.spec.chunk), np.float32)
    for step, result in enumerate(results):
        if result.executed is not None:
            valid[step] = result.executed[0]
        rewards[step, int(valid[step].sum()) - 1] = result.reward[0]
    terminated = bool(last.terminated[0])
    return Trajectory(
        obs={name: np.stack([arrays[name][0] for arrays in seen]) for name in seen[0]},
        actions=actions,
        logprob=np.zeros(actions.shape, np.float32),
        value=np.zeros(steps, np.float32),
        forward_inputs={},
        rewards=rewards,
        valid=valid,
        version=np.zeros(steps, np.int64),
        terminated=terminated,
        truncated=not terminated,
        success=any(result.success[0] > 0 for result in results),
        env_steps=steps,
        ticket=0,
        group=0,
        task=0,
    )


# ------------------------------------------------------------ events


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
            send("error", f"env.type = {job['env'].get('type')}: {refusal}", False, False)
        else:
            run_trial(job["job"], settings, job["rows"], send, EpisodeTrial(*job["episode"]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # do not wait for a simulator's threads and exit handlers


if __name__ == "__main__":
    main()
