"""Base class, number types and validation errors of configuration sections."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Whole = Annotated[int, Field(ge=0, strict=True)]
Count = Annotated[int, Field(ge=1, strict=True)]
LAST_PORT = 65535
Port = Annotated[int, Field(ge=1, le=LAST_PORT, strict=True)]
Positive = Annotated[float, Field(gt=0, strict=True)]
Number = Annotated[float, Field(strict=True)]
NotNegative = Annotated[float, Field(ge=0, strict=True)]
Fraction = Annotated[float, Field(ge=0, le=1, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**62, strict=True)]


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, finite numbers only; the string below a field documents it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def refusal(self, path: str, why: str) -> InvalidSetting:
        """The error that refuses the setting at this path of the section; why: as in `InvalidSetting`."""
        return InvalidSetting(path, attrgetter(path)(self), why)


def type_name(section: object) -> str:
    """The `type` of a section or of settings; "" if a user's class has none."""
    return str(getattr(section, "type", ""))


def type_or(default: str) -> Callable[[Any], Any]:
    """Discriminator of a union of sections by `type`; a section without one has the type `default`."""

    def type_of(value: Any) -> Any:
        if isinstance(value, BaseModel):
            return type_name(value)
        return value.get("type", default) if isinstance(value, dict) else default

    return type_of


def function_address(example: str) -> AfterValidator:
    """Validator of the text module:function. example: for the error."""

    def check(text: str) -> str:
        module, _, name = text.partition(":")
        if not (name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise InvalidSetting("", text, f"write module:function, such as {example}")
        return text

    return AfterValidator(check)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Pydantic models in an annotation, such as the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in models_in(part)]


def written(value: object) -> str:
    """A setting's value as a recipe has it: `null`, `true`, `{type: ppo, clip_low: 0.2}`."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {written(inner)}' for key, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return str(value)


def quoted(value: object) -> str:
    """As `written`, a text in quotes."""
    return repr(value) if isinstance(value, str) else written(value)


class InvalidSetting(ValueError):
    """A setting, or a combination of settings, that cannot be run; raised by validators.

    path: dotted, relative to the section that raises ("" for the section itself); value: the setting's value; why:
    completes "<path> = <value>: ..." with the problem and the fix.
    """

    def __init__(self, path: str, value: object, why: str) -> None:
        self.path, self.value, self.why = path, value, why
        super().__init__(f"{path} = {written(value)}: {why}")


class NotFound(InvalidSetting):
    """A setting names a module, or an attribute of one, that does not exist here; it may exist in another working
    folder."""
