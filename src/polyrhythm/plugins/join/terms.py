"""Whether a simulator may join: its program, its messages and its environment are those of the run. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from polyrhythm.plugins.join.messages import JoinHello, JoinRefused, decode_settings, protocol_digest
from polyrhythm.specs import EnvSpec

#: What a simulator may count (`stations.simulator`), and the largest count: beyond that float64 has no whole numbers.
COUNTERS = frozenset(
    {"busy_s", "env_s", "env_steps", "chunk_steps", "resets_ready", "resets_waited", "resets_in_place"}
)
LARGEST_COUNT = 2.0**53
#: Characters of a value in a refusal.
_SHOWN = 120


@dataclass(frozen=True, slots=True)
class Terms:
    """What a run asks of who joins. polyrhythm: its version; spec: of its environments."""

    polyrhythm: str
    spec: EnvSpec


def known_counts(statistics: Mapping[str, float]) -> dict[str, float]:
    """Those of a simulator's statistics that have a known name and a value from 0 to `LARGEST_COUNT`."""
    return {name: count for name, count in statistics.items() if name in COUNTERS and 0 <= count <= LARGEST_COUNT}


def refusal(hello: JoinHello, terms: Terms) -> JoinRefused | None:
    """Why this simulator is not let in, in one sentence; None if it is."""
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
        spec = decode_settings(hello.spec, EnvSpec)
    except (ValueError, RecursionError) as error:
        return JoinRefused("spec", f"its environment's spec cannot be read ({error}); name another with --env"[:400])
    if different := difference(spec, terms.spec):
        return JoinRefused("spec", f"its environment is another: {different}; name the run's with --env")
    return None


def difference(spec: EnvSpec, wanted: EnvSpec) -> str:
    """The first field in which two specs differ, in words; "" if they are equal."""
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
