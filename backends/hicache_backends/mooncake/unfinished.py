"""Pages that somebody has begun to set and not ended: the client says absent, and stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_backends.mooncake.client import UNFINISHED, sound

if TYPE_CHECKING:
    from collections.abc import Sequence


def unfinished(native: Any, keys: Sequence[str]) -> set[str]:
    """Those of `keys`. A put of one says that it stored, and may have stored nothing."""
    return {key for key, code in _states(native, keys) if code == UNFINISHED}


def not_there(native: Any, keys: Sequence[str]) -> set[str]:
    """Those of `keys` that are unfinished or absent."""
    return {key for key, code in _states(native, keys) if code != 0}


def _states(native: Any, keys: Sequence[str]) -> list[tuple[str, int]]:
    """Only the beginning of a session, whose rest is not needed, tells unfinished from absent."""
    if not keys:
        return []
    codes = sound(native.batch_get_session_start(keys))
    states = list(zip(keys, codes, strict=True))
    begun = [key for key, code in states if code == 0]
    if begun:
        native.batch_get_session_end(begun)
    return states
