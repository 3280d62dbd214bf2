"""Variants of an environment on which a policy was not trained, for `polyrhythm eval RUN --variants NAME`.

An environment's settings declare theirs by a method `variants()`, from name to `Variant`. A variant is only a change of
these settings, so a recipe can contain it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

#: Aspect that is new to the policy, as in RLinf's table of results out of distribution.
Kind = Literal["vision", "semantic", "position"]


@dataclass(frozen=True, slots=True)
class Variant:
    """kind: aspect that is new to the policy; what: the difference, in words; settings: changes of the section
    `env`."""

    kind: Kind
    what: str
    settings: Mapping[str, Any]
