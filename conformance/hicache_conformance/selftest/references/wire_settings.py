"""The config of `WireStore`."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import field_validator

from hicache_storage.settings import Field, PositiveSeconds, SecretStr, Settings


class WireSettings(Settings):
    """The address of the server, and the limits of a call."""

    url: str
    """`wire://host:port`"""
    password: SecretStr | None = None
    """A secret that is never used, and must never be shown."""
    timeout_s: PositiveSeconds = 30.0
    """The time limit of each call as a whole."""
    parallelism: int = Field(default=4, ge=1)
    """How many connections there may be."""

    @field_validator("url")
    @classmethod
    def _is_plain(cls, url: str) -> str:
        parts = urlsplit(url)  # ValueError if it is not a URL, or the port is wrong
        if not parts.hostname or parts.port is None or url != f"wire://{parts.netloc}":
            raise ValueError("must be wire://host:port")
        if "@" in parts.netloc:
            raise ValueError("must hold no user and no password: there is a field for that")
        parts.hostname.encode("idna")  # UnicodeError, which is a ValueError, for a wrong host name
        return url

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0
