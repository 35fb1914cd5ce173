"""How requests and calls fail."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.errors import HiCacheError


class Loss(enum.Enum):
    """Why a reply was lost."""

    UNREACHABLE = "unreachable"
    """No connection was made."""
    RESET = "resets"
    """The connection broke."""
    TRUNCATED = "truncated"
    """The connection ended in the middle of the reply."""
    MALFORMED = "malformed"
    """The received bytes are not a reply."""
    STALLED = "stalls"
    """Nothing moved on the connection for too long."""
    LATE = "timeouts"
    """The deadline of the call has passed."""


class ReplyLost(Exception):
    """A request failed without a reply."""

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
        """The error to raise instead of making one from `reason`."""
        self.was_sent = was_sent
        """True if the server may have received the whole request."""
        self.is_stale = is_stale
        """True if the connection had been idle. The server may have closed it in the meantime."""


class CallFailed(Exception):
    """A call failed for a reason other than an absent page."""

    def __init__(self, error: HiCacheError, *, in_doubt: bool = False) -> None:
        super().__init__(str(error))
        self.error = error
        self.in_doubt = in_doubt
        """True if a write may have taken effect, or may still do so."""
