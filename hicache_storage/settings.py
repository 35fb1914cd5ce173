"""A backend's configuration: a frozen pydantic model, checked once, with errors that name the field.

class AcmeSettings(Settings):
    url: SecretStr
    capacity_nbytes: ByteSize | None = None      # 1073741824 or "1GiB"

settings = AcmeSettings.parse("acme", config)
"""

from __future__ import annotations

from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Self, Union, cast, get_args, get_origin

import pydantic
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
)

from hicache_storage.durations import LONGEST_S
from hicache_storage.errors import ConfigError, did_you_mean
from hicache_storage.plain_values import parse_decimal, parse_flag, parse_whole
from hicache_storage.sizes import parse_nbytes
from hicache_storage.whole_numbers import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pydantic_core import ErrorDetails

__all__ = ["ByteSize", "Field", "PositiveSeconds", "SecretStr", "Settings"]

ByteSize = Annotated[int, BeforeValidator(parse_nbytes)]
"""A size in bytes: an int, or text as `hicache_storage.sizes` reads it."""

PositiveSeconds = Annotated[float, BeforeValidator(parse_decimal), Field(gt=0, le=LONGEST_S)]

_READERS: dict[object, Callable[[object], object]] = {
    int: parse_whole,
    float: parse_decimal,
    bool: parse_flag,
}


class Settings(BaseModel):
    """The base of every backend's settings: unknown fields are errors, values never change.

    Fields of type int, float and bool, alone or beside None, take what `plain_values` reads, and nothing
    else: pydantic itself takes `true` for 1, and ignores spaces and underscores.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _plainly(cls, given: object, info: ValidationInfo) -> object:
        field = cls.model_fields[cast("str", info.field_name)]
        if any(isinstance(item, BeforeValidator) for item in field.metadata):
            return given
        reader = _reader(field.annotation)
        return given if reader is None or given is None else reader(given)

    @classmethod
    def parse(cls, backend: str, config: Mapping[str, Any]) -> Self:
        """The settings that `config` holds.

        Raises:
            ConfigError: Names every wrong field. Text that was given is never repeated: it may be a
                secret, or hold one.
        """
        try:
            return cls.model_validate(dict(config))
        except pydantic.ValidationError as error:
            complaints = "; ".join(cls._complaint(detail) for detail in error.errors())
            raise ConfigError(f"{backend}: {complaints}") from None

    @classmethod
    def _complaint(cls, detail: ErrorDetails) -> str:
        name = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            return f"unknown field {name!r}{did_you_mean(name, sorted(cls.model_fields))}"
        if detail["type"] == "missing":
            return f"{name}: this field is required"
        given = detail["input"]
        told = f", not {shown(given)}" if isinstance(given, (bool, int, float)) else ""
        prefix = f"{name}: " if name else ""
        return f"{prefix}{_untold(detail)}{told}"


def _reader(annotation: Any) -> Callable[[object], object] | None:
    """What reads values of a plain type; None where the type has a way of its own."""
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return _reader(kinds[0]) if len(kinds) == 1 else None
    if get_origin(annotation) is Annotated:
        kind, *extras = get_args(annotation)
        own = any(isinstance(extra, (BeforeValidator, AfterValidator)) for extra in extras)
        return None if own else _reader(kind)
    return _READERS.get(annotation)


def _untold(detail: ErrorDetails) -> str:
    """What is wrong, as a clause, without what pydantic quotes from text that was given."""
    message = detail["msg"].removeprefix("Value error, ")
    for quoted in detail.get("ctx", {}).values():
        if isinstance(quoted, str) and quoted and quoted in str(detail["input"]):
            message = message.replace(quoted, "***")
    return message[:1].lower() + message[1:]
