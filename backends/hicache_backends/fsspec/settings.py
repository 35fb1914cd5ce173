"""The config of `fsspec`, and parsing its URL."""

from __future__ import annotations

import importlib
import re
from typing import Any, Literal

from pydantic import Secret, field_validator

from hicache_storage.settings import Field, PositiveSeconds, SecretStr, Settings, expand_home

fsspec: Any = importlib.import_module("fsspec")  # it has no types

_CHAIN = "::"
_LOCAL = ("file", "local")
_USER_OR_QUERY = re.compile(r"(?<=//).*@|[?#].*", re.DOTALL)


class FsspecSettings(Settings):
    """The config of `fsspec`."""

    url: SecretStr = Field(min_length=1)
    """A directory, as fsspec names it: `s3://bucket/kv`.

    Storages with the same URL share their pages.
    """
    storage_options: Secret[dict[str, Any]] = Field(default=Secret({}))
    """Options that fsspec passes to the filesystem, such as keys and endpoints.

    They are never shown.
    """
    atomic: Literal["auto", "put", "rename", "none"] = "auto"
    """How pages are published. "auto": the best way that the filesystem is known to support."""
    parallelism: int | None = Field(default=None, ge=1, le=256)
    """Concurrent requests. None: a number that suits the filesystem."""
    timeout_s: PositiveSeconds = 30.0
    """The time limit of a whole call."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr) -> SecretStr:
        name, text = protocol_name(url.get_secret_value()), url.get_secret_value()
        if name in _LOCAL:
            expand_home(
                text.removeprefix(f"{name}://")
            )  # fsspec expands it, or else leaves it as it is
        return url

    @property
    def protocol_name(self) -> str:
        """The name of the filesystem in the URL."""
        return protocol_name(self.url.get_secret_value())

    @property
    def shown_url(self) -> str:
        """The URL as messages show it: without user, password and query."""
        return _USER_OR_QUERY.sub("", self.url.get_secret_value())


def protocol_name(url: str) -> str:
    """Return the name of the filesystem in a URL, or `file` if the URL names none.

    Raises:
        ValueError: The URL chains several filesystems.
    """
    if _CHAIN in url:
        raise ValueError("must name one filesystem, without '::': pages go straight to it")
    name: str = fsspec.core.split_protocol(url)[0] or "file"
    return name
