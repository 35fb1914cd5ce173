"""The settings of a page store: checksum, deadlines, threads, breakers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hicache_storage.durations import check_seconds
from hicache_storage.scalars import check_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStoreSettings:
    """The settings for how a page store checks pages and calls its storage."""

    checksum: Literal["xxh3", "none"] = "xxh3"
    """With "none", a page's identity and length are still checked, but not its bytes."""
    timeout_s: float = 10.0
    """The deadline of a call, everything included. A storage call that takes longer counts as failed,
    even if its caller stopped waiting earlier."""
    lookup_timeout_s: float | None = None
    """The deadline of a lookup. A store that does not answer a lookup in this time counts as hung: the
    breaker opens at once, and later probes delay a lookup only briefly. None: use `timeout_s`, and count
    a lookup without an answer as one of `breaker_failures`."""
    write_timeout_s: float | None = None
    """The deadline of saves, deletes and `open_space`. None: use `timeout_s`."""
    parallelism: int | None = None
    """Concurrent storage calls in each direction. None: as many as the storage declares."""
    breaker_failures: int = 3
    """How many calls in a row must fail in one direction before its breaker opens."""
    breaker_cooldown_s: float = 5.0
    """How long an open breaker waits before it lets one call through."""

    lend_memory: Literal["safe", "always"] = "safe"
    """Which storages get the caller's memory. With "safe", only those that are `revocable`; the others
    get copies in private memory. With "always", each storage does, and a call waits until the storage
    has ended, however late that is."""
    private_nbytes: int = 256 << 20
    """The limit of the private memory in each direction. Late calls keep theirs until they end."""

    def __post_init__(self) -> None:
        if self.checksum not in ("xxh3", "none"):
            raise ValueError(f"checksum must be 'xxh3' or 'none', not {self.checksum!r}")
        if self.lend_memory not in ("safe", "always"):
            raise ValueError(f"lend_memory must be 'safe' or 'always', not {self.lend_memory!r}")
        for name in ("parallelism", "breaker_failures", "private_nbytes"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least=1)
        for name in ("timeout_s", "lookup_timeout_s", "write_timeout_s", "breaker_cooldown_s"):
            if getattr(self, name) is not None:
                check_seconds(name, getattr(self, name))

    @property
    def writes_s(self) -> float:
        """The deadline of a call that changes the store."""
        return self.timeout_s if self.write_timeout_s is None else self.write_timeout_s
