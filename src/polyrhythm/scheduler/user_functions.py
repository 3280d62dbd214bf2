"""Functions that the user's settings name as `module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast


def load_function(path: str, what: str) -> Callable[..., object]:
    """The function that `module:function` names. Raises ValueError with what, value and remedy."""
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"{what} {path!r} cannot be loaded ({said}); name an importable module:function") from error
    if not callable(function):
        raise ValueError(f"{what} {path!r} is {type(function).__name__}, not a function")
    return cast(Callable[..., object], function)
