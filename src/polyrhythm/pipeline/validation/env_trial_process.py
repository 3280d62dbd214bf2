"""What is done with an environment before a run: ask its spec, observe one reset, or check all of its contract.

Done in the main process where stations work inline, else in a process of its own without torch, `python -m
polyrhythm.pipeline.validation.env_trial_process`: the job comes on standard input, what happens goes to a pipe.
"""

from __future__ import annotations

import base64
import faulthandler
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from polyrhythm.config.base import InvalidSetting
from polyrhythm.config.registry import NestedRefusal, resolve
from polyrhythm.conformance import ContractViolation
from polyrhythm.envs.base import EnvSettings
from polyrhythm.envs.conformance import check_contract, observe_reset
from polyrhythm.envs.watched import ask_spec
from polyrhythm.errors import PolyrhythmError
from polyrhythm.specs.plain import as_plain, from_plain

#: What happens, in this order: ("call", name) before each call into the environment, ("finding", fields),
#: ("spec", EnvSpec), ("arrays", name -> array); last ("over",), ("violation", problem, fix) or ("error", sentence).
Tell = Callable[..., None]


def perform(job: str, settings: EnvSettings, rows: int, tell: Tell) -> None:
    """`spec`: what it offers. `observe`: that, and two rows after a reset. `contract`: every check, then the same.

    rows: of an env batch in the run.
    """

    def about_to(call: str) -> None:
        tell("call", call)

    try:
        if job == "spec":
            tell("spec", ask_spec(settings, about_to))
        else:
            for finding in check_contract(settings, rows, about_to) if job == "contract" else ():
                tell("finding", finding)
            spec, arrays = observe_reset(settings, rows, about_to)
            tell("spec", spec)
            tell("arrays", arrays)
    except ContractViolation as violation:
        tell("violation", violation.problem, violation.fix)
    except PolyrhythmError as error:
        tell("error", str(error))
    else:
        tell("over")


def packed(kind: str, *parts: Any) -> bytes:
    """An event as one line of JSON."""
    if kind == "spec":
        parts = (as_plain(parts[0]),)
    if kind == "arrays":
        parts = (
            {name: [a.dtype.name, a.shape, base64.b64encode(a.tobytes()).decode()] for name, a in parts[0].items()},
        )
    return json.dumps([kind, *parts]).encode() + b"\n"


def unpacked(line: bytes) -> list[Any]:
    """The event of such a line."""
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
    """Do the job of standard input; a call that takes longer than its limit ends the process with its traceback."""
    job = json.loads(sys.stdin.buffer.read())
    limits: dict[str, float] = job["limits"]
    with os.fdopen(job["pipe"], "wb", buffering=0) as pipe:

        def tell(kind: str, *parts: Any) -> None:
            faulthandler.cancel_dump_traceback_later()
            if kind == "call":
                faulthandler.dump_traceback_later(limits[parts[0]], exit=True)
            pipe.write(packed(kind, *parts))

        try:
            settings: Any = resolve("env", job["env"])
        except (InvalidSetting, NestedRefusal) as refusal:
            tell("error", f"env.type = {job['env'].get('type')}: {refusal}")
        else:
            perform(job["job"], settings, job["rows"], tell)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a simulator's own threads and exit handlers must not keep the process


if __name__ == "__main__":
    main()
