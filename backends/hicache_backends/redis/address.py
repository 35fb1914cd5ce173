"""Where a server is."""

from __future__ import annotations

from dataclasses import dataclass

PORT = 6379
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port, or the path of a unix socket."""

    host: str = "localhost"
    port: int = PORT
    path: str | None = None

    @classmethod
    def parse(cls, text: str, *, host: str = "") -> Address:
        """Return the address that `host:port` names; `:port` names one on `host`.

        Raises:
            ValueError: `text` is something else.
        """
        named, _, port = text.rpartition(":")
        named = named.strip("[]") or host
        digits = port.isascii() and port.isdecimal() and len(port) <= len(str(_MAX_PORT))
        if not named or not digits or not 0 < int(port) <= _MAX_PORT:
            raise ValueError("must be host:port")
        return cls(named, int(port))

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"
