"""The failures of requests and calls."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.errors import HiCacheError


class Loss(enum.Enum):
    """The kind of a lost reply."""

    UNREACHABLE = "unreachable"
    """No connection was made."""
    RESET = "resets"
    """The connection broke."""
    TRUNCATED = "truncated"
    """The connection ended in the middle of the reply."""
    MALFORMED = "malformed"
    """The received bytes are no reply."""
    STALLED = "stalls"
    """Nothing moved on the connection for too long."""
    LATE = "timeouts"
    """The deadline of the call has passed."""


class ReplyLost(Exception):
    """The failure of a request without a reply."""

    def __init__(
        self,
        loss: Loss,
        reason: str,
        *,
        was_sent: bool = False,
        is_stale: bool = False,
        error: HiCacheError | None = None,
    ) -> None:
        super().__init__(reason)
        self.loss = loss
        self.error = error
        """The error to raise instead of one made from `reason`."""
        self.was_sent = was_sent
        """The server may have received the whole request."""
        self.is_stale = is_stale
        """The connection was an idle one, which the server may have closed meanwhile."""


class CallFailed(Exception):
    """The failure of a call for another reason than an absent page."""

    def __init__(self, error: HiCacheError, *, in_doubt: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.in_doubt = in_doubt
        """A write may have taken effect, or may still do so."""
