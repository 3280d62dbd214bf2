"""The codec of a saved conductor: it knows every dataclass, named tuple and enum of the scheduler.

Invariant: their names are unique, as a saved record carries the name of its class alone.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from functools import cache

import polyrhythm.scheduler
from polyrhythm.scheduler.codec import Codec, is_named_tuple

#: Modules of plugins whose states are saved with the conductor's.
_OF_PLUGINS = [
    f"polyrhythm.plugins.{name}"
    for name in (
        "lease.lease", "lease.delivery", "scoring.waiting", "scoring.rules", "autobatch.candidates",
        "autobatch.forecast", "autobatch.rates", "autobatch.search", "autobatch.snapshot", "autobatch.timing",
        "autobatch.tuning",
    )
]  # fmt: skip


@cache
def state_codec() -> Codec:
    """Encodes and decodes all states and records of the scheduler."""
    types = list(_types())
    twice = [name for name, count in Counter(kind.__name__ for kind in types).items() if count > 1]
    assert not twice, f"two classes of the scheduler have one name: {twice}"
    return Codec(types)


def _types() -> Iterator[type]:
    package = polyrhythm.scheduler
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    for name in [*names, *_OF_PLUGINS]:
        for kind in vars(importlib.import_module(name)).values():
            known = isinstance(kind, type) and (is_dataclass(kind) or is_named_tuple(kind) or issubclass(kind, Enum))
            if known and kind.__module__ == name:
                yield kind
