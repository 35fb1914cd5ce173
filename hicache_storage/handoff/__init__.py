"""Prefill here, decode there: a request's pages change hands through any shared storage.

The roles are those of SGLang's disaggregation (sglang/srt/disaggregation). `docs/handoff.md` has the
sequence, and what each failure does.
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
