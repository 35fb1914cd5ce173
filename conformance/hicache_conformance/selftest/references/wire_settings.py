"""The config of `WireStore`."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import field_validator

from hicache_storage.settings import Field, PositiveSeconds, SecretStr, Settings


class WireSettings(Settings):
    """Where the server is, and how it is called."""

    url: str
    """`wire://host:port`"""
    password: SecretStr | None = None
    """The server asks for none: something that must never be shown."""
    timeout_s: PositiveSeconds = 30.0
    """For each call as a whole, with all that it waits for."""
    parallelism: int = Field(default=4, ge=1)
    """How many connections there may be."""

    @field_validator("url")
    @classmethod
    def _is_plain(cls, url: str) -> str:
        parts = urlsplit(url)  # ValueError where it can make nothing of it, or of the port
        if not parts.hostname or parts.port is None or url != f"wire://{parts.netloc}":
            raise ValueError("must be wire://host:port")
        if "@" in parts.netloc:
            raise ValueError("must hold no user and no password: there is a field for that")
        parts.hostname.encode("idna")  # UnicodeError, which is a ValueError, for what is no name
        return url

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0
