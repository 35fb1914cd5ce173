"""Prefill here, decode there: a request's pages change hands through any shared storage.

The roles are those of SGLang's disaggregation (sglang/srt/disaggregation). `docs/handoff.md` has the
sequence, and what each failure does.
"""

from __future__ import annotations

from hicache_storage.controller.handoff.board import CompletionBoard
from hicache_storage.controller.handoff.completion import Completion
from hicache_storage.controller.handoff.incoming import Incoming
from hicache_storage.controller.handoff.receiver import HandoffReceiver
from hicache_storage.controller.handoff.sender import HandoffSender
from hicache_storage.controller.handoff.settings import HandoffSettings

__all__ = [
    "Completion",
    "CompletionBoard",
    "HandoffReceiver",
    "HandoffSender",
    "HandoffSettings",
    "Incoming",
]
