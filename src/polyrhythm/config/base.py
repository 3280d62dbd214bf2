"""What every section of a configuration has in common: its base class, its number types, and how it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field

Whole = Annotated[int, Field(ge=0, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
Positive = Annotated[float, Field(gt=0, strict=True)]
Number = Annotated[float, Field(strict=True)]
NotNegative = Annotated[float, Field(ge=0, strict=True)]
Fraction = Annotated[float, Field(ge=0, le=1, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**62, strict=True)]


class Section(BaseModel):
    """Frozen, closed to unknown keys, finite numbers only; a field is documented by the line under it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def type_or(default: str) -> Callable[[Any], Any]:
    """For a union of sections: which one is meant by its `type`, where a section without one means `default`."""

    def type_of(value: Any) -> Any:
        if isinstance(value, BaseModel):
            return getattr(value, "type", None)
        return value.get("type", default) if isinstance(value, dict) else default

    return type_of


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a value of this annotation may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in models_in(part)]


class InvalidSetting(ValueError):
    """Raised inside a validator: a setting, or a pair of settings, that cannot be run.

    path: dotted, relative to the section that refuses ("" for the section itself); value: what was found there;
    why: a clause that completes "<path> = <value>: ..." and says what to change.
    """

    def __init__(self, path: str, value: object, why: str) -> None:
        self.path, self.value, self.why = path, value, why
        super().__init__(f"{path} = {value}: {why}")


class NotFound(InvalidSetting):
    """What the setting names, a module or something in it, is not there: it may be in another working folder."""
