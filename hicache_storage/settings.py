"""A backend's configuration: a frozen pydantic model, checked once, with errors that name the field.

class AcmeSettings(Settings):
    url: SecretStr
    capacity_nbytes: ByteSize | None = None      # 1073741824 or "1GiB"

settings = AcmeSettings.parse("acme", config)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Self

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from hicache_storage.errors import ConfigError, did_you_mean
from hicache_storage.seconds import LONGEST_S
from hicache_storage.sizes import parse_nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails

__all__ = ["ByteSize", "Field", "PositiveSeconds", "SecretStr", "Settings"]

ByteSize = Annotated[int, BeforeValidator(parse_nbytes)]
"""A size in bytes: an int, or text as `hicache_storage.sizes` reads it."""

PositiveSeconds = Annotated[float, Field(gt=0, le=LONGEST_S)]


class Settings(BaseModel):
    """The base of every backend's settings: unknown fields are errors, values never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, hide_input_in_errors=True
    )

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
        shown = f", not {given!r}" if isinstance(given, (bool, int, float)) else ""
        prefix = f"{name}: " if name else ""
        return f"{prefix}{_untold(detail)}{shown}"


def _untold(detail: ErrorDetails) -> str:
    """What is wrong, as a clause, without what pydantic quotes from text that was given."""
    message = detail["msg"].removeprefix("Value error, ")
    for quoted in detail.get("ctx", {}).values():
        if isinstance(quoted, str) and quoted and quoted in str(detail["input"]):
            message = message.replace(quoted, "***")
    return message[:1].lower() + message[1:]
