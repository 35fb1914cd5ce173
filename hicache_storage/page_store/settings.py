"""The settings of a page store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hicache_storage.durations import check_seconds
from hicache_storage.scalars import check_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStoreSettings:
    """The checks, deadlines and threads that a page store uses for its storage."""

    checksum: Literal["xxh3", "none"] = "xxh3"
    """With "none" the identity and length of a page are still checked."""
    timeout_s: float = 10.0
    """The deadline of a call, everything included. A storage call that takes longer has failed, also
    where its caller stopped waiting earlier."""
    lookup_timeout_s: float | None = None
    """The deadline of a look-up. A store that leaves one without an answer for that long hangs, and the
    breaker opens at once; its probes then cost a look-up a moment only. None: as `timeout_s`, and a
    look-up without an answer is one of `breaker_failures`."""
    write_timeout_s: float | None = None
    """The same for saves, deletions and openings of key spaces. None: `timeout_s`."""
    parallelism: int | None = None
    """Concurrent calls to the storage in each direction. None: as many as the storage declares."""
    breaker_failures: int = 3
    """Failed calls in a row, in one direction, that open that direction's breaker."""
    breaker_cooldown_s: float = 5.0
    """The time after which an open breaker lets one call through."""

    def __post_init__(self) -> None:
        if self.checksum not in ("xxh3", "none"):
            raise ValueError(f"checksum must be 'xxh3' or 'none', not {self.checksum!r}")
        for name in ("parallelism", "breaker_failures"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least=1)
        for name in ("timeout_s", "lookup_timeout_s", "write_timeout_s", "breaker_cooldown_s"):
            if getattr(self, name) is not None:
                check_seconds(name, getattr(self, name))

    @property
    def writes_s(self) -> float:
        """The deadline of a call that changes the store."""
        return self.timeout_s if self.write_timeout_s is None else self.write_timeout_s
