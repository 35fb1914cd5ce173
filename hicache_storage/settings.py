"""The configuration of a backend: a frozen pydantic model, with errors that name the wrong field.

Subclass `Settings` to read your backend's config:

    class AcmeSettings(Settings):
        url: SecretStr
        capacity_nbytes: ByteSize | None = None      # 1073741824 or "1GiB"
        timeout_s: PositiveSeconds = 30.0            # 90 or "90s"

    settings = AcmeSettings.parse("acme", config)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, Union, cast, get_args, get_origin

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

from hicache_storage.durations import MAX_DURATION_S, format_skew, parse_seconds
from hicache_storage.errors import ConfigError, did_you_mean, shown
from hicache_storage.scalars import (
    counted,
    expand_home,
    format_nbytes,
    format_number,
    parse_bool,
    parse_float,
    parse_integer,
    parse_nbytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

__all__ = [
    "ByteSize",
    "DirectoryName",
    "Field",
    "FileName",
    "PositiveSeconds",
    "Seconds",
    "SecretStr",
    "Settings",
    "counted",
    "expand_home",
    "format_nbytes",
    "format_skew",
    "parse_nbytes",
]

ByteSize = Annotated[int, BeforeValidator(parse_nbytes)]
"""A size in bytes: an int, or text that `parse_nbytes` accepts."""

Seconds = Annotated[float, BeforeValidator(parse_seconds)]
"""A finite number of seconds, or text that `parse_seconds` accepts, such as "90s", "12h" or "1d"."""

PositiveSeconds = Annotated[Seconds, Field(gt=0, le=MAX_DURATION_S)]
"""A time limit: `Seconds` above 0 that every lock and socket can wait for."""


def _no_url(path: str) -> str:
    if "://" in path:
        raise ValueError("must be a directory, not a URL")
    return path


FileName = Annotated[str, AfterValidator(expand_home)]
"""The path of a file, with `~` expanded."""

DirectoryName = Annotated[FileName, Field(min_length=1), AfterValidator(_no_url)]
"""The path of a directory, with `~` expanded. A URL, which may contain a secret, is refused."""

_ITEM_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
"""The pattern of a name that may stand for its object in messages. Other text may be a secret."""

_PARSERS: dict[object, Callable[[object], object]] = {
    int: parse_integer,
    float: parse_float,
    bool: parse_bool,
}


class Settings(BaseModel):
    """The base class of every backend's settings. Unknown fields are errors, and settings are frozen.

    `hicache_storage.scalars` parses int, float and bool fields, optional or not, because pydantic itself
    accepts `true` as 1 and ignores spaces and underscores.

    Examples:
        >>> class AcmeSettings(Settings):
        ...     capacity_nbytes: ByteSize | None = None
        >>> AcmeSettings.parse("acme", {"capacity_nbytes": "1GiB"}).capacity_nbytes
        1073741824
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _parse_scalar(cls, value: object, info: ValidationInfo) -> object:
        parser = _field_parser(cls, cast("str", info.field_name))
        return value if parser is None or value is None else parser(value)

    @classmethod
    def parse(cls, backend: str, config: Mapping[str, Any]) -> Self:
        """Return the settings that `config` describes.

        Raises:
            ConfigError: The message names every wrong field. It never repeats text of `config`, because
                that may contain a secret.
        """
        try:
            return cls.model_validate(dict(config))
        except pydantic.ValidationError as error:
            problems = "; ".join(cls._describe(detail, config) for detail in error.errors())
            raise ConfigError(f"{backend}: {problems}") from None

    @classmethod
    def _describe(cls, detail: ErrorDetails, config: Mapping[str, Any]) -> str:
        where = _place(detail["loc"], config)
        name, owner = shown(".".join(where)), _owner(cls, detail["loc"])
        if detail["type"] == "extra_forbidden":
            hint = did_you_mean(where[-1], sorted(owner.model_fields))
            return f"unknown field {name!r}{hint}"
        if detail["type"] == "missing":
            return f"{name}: this field is required"
        if detail["type"] == "string_pattern_mismatch":  # pydantic would show the pattern
            return f"{name}: must be {_form(owner.model_fields.get(where[-1]))}"
        if detail["type"] == "model_type":
            return f"{name}: must be an object with {', '.join(owner.model_fields)}"
        value = detail["input"]
        suffix = f", not {format_number(value)}" if isinstance(value, (bool, int, float)) else ""
        prefix = f"{name}: " if name else ""
        return f"{prefix}{_redacted_message(detail)}{suffix}"


def _place(loc: tuple[int | str, ...], config: object) -> list[str]:
    """Return the names of the fields that lead to an error. An item of a list has the name in it."""
    names: list[str] = []
    for part in loc:
        try:
            config = cast("Any", config)[part]
        except (LookupError, TypeError):
            config = None
        own: object = cast("Any", config).get("name") if isinstance(config, Mapping) else None
        is_named = isinstance(part, int) and isinstance(own, str) and _ITEM_NAME.fullmatch(own)
        names.append(str(own if is_named else part))
    return names


def _owner(settings: type[Settings], loc: tuple[int | str, ...]) -> type[Settings]:
    """Return the settings, of these or nested in them, that have the field of an error."""
    for part in loc:
        field = settings.model_fields.get(str(part))
        nested = None if field is None else _settings_in(field.annotation)
        settings = nested or settings
    return settings


def _settings_in(annotation: Any) -> type[Settings] | None:
    """Return the settings in a type such as `list[ServerSettings]`, or None."""
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return annotation
    found = (_settings_in(argument) for argument in get_args(annotation))
    return next((one for one in found if one is not None), None)


@cache
def _field_parser(settings: type[Settings], name: str) -> Callable[[object], object] | None:
    """Return the parser of a field, or None if the field has its own validator."""
    field = settings.model_fields[name]
    if any(isinstance(item, BeforeValidator) for item in field.metadata):
        return None
    return _scalar_parser(field.annotation)


def _scalar_parser(annotation: Any) -> Callable[[object], object] | None:
    """Return the parser of a scalar type, or None if the type has its own validator."""
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return _scalar_parser(kinds[0]) if len(kinds) == 1 else None
    if get_origin(annotation) is Annotated:
        kind, *extras = get_args(annotation)
        own = any(isinstance(extra, (BeforeValidator, AfterValidator)) for extra in extras)
        return None if own else _scalar_parser(kind)
    return _PARSERS.get(annotation)


def _form(field: FieldInfo | None) -> str:
    """Return the description of a field with a pattern. It says what the text must look like."""
    return (field and field.description) or "text of another form"


def _redacted_message(detail: ErrorDetails) -> str:
    """Return pydantic's message as a clause, without quotes from the config."""
    message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    for quoted in detail.get("ctx", {}).values():
        if isinstance(quoted, str) and quoted and quoted in str(detail["input"]):
            message = message.replace(quoted, "***")
    return message[:1].lower() + message[1:]
