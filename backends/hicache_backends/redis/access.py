"""What opens a server, whichever it is: user, password, database, certificates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Access:
    """Everything of a connection but its address and its deadline."""

    options: Mapping[str, Any] = field(repr=False)
    """For redis-py, which speaks AUTH, SELECT and CLIENT SETNAME."""
    context: ssl.SSLContext | None
    """None: no TLS."""
