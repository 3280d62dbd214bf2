"""How checks name what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from polyrhythm.conformance import own_place, raised, remedy
from polyrhythm.errors import ConfigError, PolyrhythmError


@contextmanager
def errors_of(what: str, call: str = "") -> Iterator[None]:
    """Turn a ValueError of this block into a ConfigError; prefix it with `what` unless its text begins so.

    call: of the user's code, if any; then every other exception becomes a ConfigError with the user's line.
    """
    try:
        yield
    except PolyrhythmError:
        raise
    except ValueError as error:
        text = str(error) + own_place(error) * bool(call)
        raise ConfigError(text if text.startswith(what.partition(" ")[0]) else f"{what}: {text}") from error
    except (Exception, SystemExit) as error:
        if not call:
            raise
        raise ConfigError(f"{what}: {call} {raised(error)}; {remedy(error)}") from error


def type_of(section: object) -> str:
    return getattr(section, "type", "")
