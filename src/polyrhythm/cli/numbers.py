"""Argument types for numbers, with error messages for argparse."""

from __future__ import annotations

import argparse
import math


def whole(text: str) -> int:
    """0 or more."""
    return _at_least(0, text)


def count(text: str) -> int:
    """1 or more."""
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of {least} or more")
    return int(text)


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number
