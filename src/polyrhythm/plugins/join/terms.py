"""Terms for joining a run: the same program, messages and environment, and the run's token, readable by its owner only.

    polyrhythm-join-1 PUBLIC_KEY_OF_THE_RUN PUBLIC_KEY SECRET_KEY

The keys are CURVE keys in Z85, made for the run; they give access to its join ports and nothing else.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from polyrhythm.errors import StartError
from polyrhythm.plugins.join.messages import JoinHello, JoinRefused, protocol_digest
from polyrhythm.runtime.transport.authentication import KeyPair, RunKeys
from polyrhythm.specs import EnvSpec

#: Counters of a simulator (`stations.simulator`), and the largest count: beyond it float64 skips integers.
COUNTERS = frozenset(
    {"busy_s", "env_s", "env_steps", "chunk_steps", "resets_ready", "resets_waited", "resets_in_place"}
)
LARGEST_COUNT = 2.0**53
#: Characters of a value in a refusal.
_SHOWN = 120


@dataclass(frozen=True, slots=True)
class Terms:
    """Requirements for a simulator. polyrhythm: the version; spec: of the run's environments."""

    polyrhythm: str
    spec: EnvSpec


def known_counts(statistics: Mapping[str, float]) -> dict[str, float]:
    """The statistics with a known name and a value from 0 to `LARGEST_COUNT`."""
    return {name: count for name, count in statistics.items() if name in COUNTERS and 0 <= count <= LARGEST_COUNT}


def refusal(hello: JoinHello, terms: Terms) -> JoinRefused | None:
    """Why the simulator is refused; None if it is accepted."""
    if hello.polyrhythm != terms.polyrhythm:
        return JoinRefused(
            "version",
            f"polyrhythm {hello.polyrhythm[:_SHOWN]} wants to join, the run has {terms.polyrhythm}; install "
            f"polyrhythm=={terms.polyrhythm} there",
        )
    if hello.messages != protocol_digest():
        return JoinRefused(
            "messages",
            f"its messages ({hello.messages[:_SHOWN]}) are not those of the run ({protocol_digest()}), although both "
            f"are polyrhythm {terms.polyrhythm}; install the same source on both machines",
        )
    try:
        spec = msgspec.msgpack.decode(hello.spec, type=EnvSpec)
    except (ValueError, RecursionError) as error:
        return JoinRefused("spec", f"its environment's spec cannot be read ({error}); name another with --env"[:400])
    if different := difference(spec, terms.spec):
        return JoinRefused("spec", f"its environment is another: {different}; name the run's with --env")
    return None


def difference(spec: EnvSpec, wanted: EnvSpec) -> str:
    """Description of the first field in which two specs differ; "" if they are equal."""
    for field in fields(EnvSpec):
        found, expected = getattr(spec, field.name), getattr(wanted, field.name)
        if found != expected and isinstance(found, Mapping):
            return f"{field.name} {_different_entry(found, expected)}"
        if found != expected:
            return f"{field.name} is {_short(found)}, the run has {_short(expected)}"
    return ""


def _different_entry(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    name = next(name for name in (*wanted, *found) if found.get(name) != wanted.get(name))
    if name not in found or name not in wanted:
        return f"{_short(name)} is {'new' if name in found else 'missing'}"
    return f"{_short(name)} is {_short(found[name])}, the run has {_short(wanted[name])}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"


_KIND = "polyrhythm-join-1"
#: Characters of a key in Z85; bytes of a file that can be a token.
_KEY, _LARGEST = 40, 4096


def write_token(path: Path, keys: RunKeys) -> None:
    """Write the token with mode 0600, replacing an existing file."""
    words = (_KIND, *(key.decode() for key in (keys.inbox.public, keys.outbox.public, keys.outbox.secret)))
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.unlink(missing_ok=True)
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w", encoding="ascii") as out:
        out.write(" ".join(words) + "\n")
    unfinished.replace(path)


def read_token(path: Path) -> RunKeys:
    """The keys for joining, without the run's secret key. StartError: the file is not a token,
    or others can read it."""
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError as error:
        raise StartError(f"--token-file = {path}: {error.strerror}; copy the file that the run names") from error
    if stat.S_IMODE(mode) & 0o077:
        raise StartError(
            f"--token-file = {path}: others can read it (mode {stat.S_IMODE(mode):o}); run: chmod 600 {path}"
        )
    kind, *keys = content.split() or [b""]
    if kind != _KIND.encode() or len(keys) != 3 or any(len(key) != _KEY for key in keys):
        raise StartError(f"--token-file = {path}: not a token of a run; copy the file that the run names, as it is")
    run, public, secret = keys
    return RunKeys(KeyPair(run, b""), KeyPair(public, secret))
