"""Variants of an environment on which a policy was not trained: what `polyrhythm eval RUN --variants NAME` plays.

An environment's settings declare theirs by a method `variants()`, from name to `Variant`. A variant is a change of
these settings and nothing else, so that whatever it does can be written into a recipe too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

#: What is new to the policy, as in RLinf's table of results out of distribution.
Kind = Literal["vision", "semantic", "position"]


@dataclass(frozen=True, slots=True)
class Variant:
    """kind: what is new to the policy; what: how it differs, in words; settings: the changes of the section `env`."""

    kind: Kind
    what: str
    settings: Mapping[str, Any]
