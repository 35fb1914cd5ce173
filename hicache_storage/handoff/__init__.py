"""Hand a request's pages from a prefill engine to a decode engine, through shared storage.

The roles are those of SGLang's disaggregation (sglang/srt/disaggregation). See `docs/handoff.md` for the
sequence, and for the effect of each failure.
"""

from __future__ import annotations

from hicache_storage.handoff.completion import Completion
from hicache_storage.handoff.completion_store import CompletionStore
from hicache_storage.handoff.receiver import HandoffReceiver
from hicache_storage.handoff.request import HandoffRequest
from hicache_storage.handoff.sender import HandoffSender
from hicache_storage.handoff.settings import HandoffSettings

__all__ = [
    "Completion",
    "CompletionStore",
    "HandoffReceiver",
    "HandoffRequest",
    "HandoffSender",
    "HandoffSettings",
]
