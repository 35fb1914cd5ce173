"""The interface that a backend implements, and what it may promise.

Five blocking, thread-safe methods over opaque ids and scatter/gather pages. Framing, checksums,
batching, parallelism, deadlines and metrics are the page store's (`hicache_storage.page_store`), once,
for every backend. The numbered rules that an implementation keeps are in `docs/contract.md`.
"""

from __future__ import annotations

import abc
import enum
import os
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hicache_storage.errors import StorageClosed, StorageUnavailable, UnsupportedOperation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer, Page


class Retention(enum.IntEnum):
    """How long a stored page stays; a larger value promises more."""

    BEST_EFFORT = 0
    """It may vanish at any time."""
    UNTIL_PRESSURE = 1
    """It stays until the store is short of room."""
    UNTIL_DELETED = 2
    """It stays until it is deleted or cleared."""


class Durability(enum.IntEnum):
    """What a stored page survives; a larger value promises more."""

    PROCESS = 0
    """Nothing: it dies with the process."""
    CRASH = 1
    """SIGKILL of any process that uses the store."""
    POWER = 2
    """Loss of power: data and names are synced before a set returns True."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend declares. What is declared is tested, what is not is refused (KV-901, KV-902)."""

    retention: Retention = Retention.BEST_EFFORT
    durability: Durability = Durability.PROCESS
    shared: bool = False
    """Another process that opens the same config sees the pages."""
    enumerable: bool = False
    """`spaces()` and `scan()` work."""
    overwrites: bool = True
    """False: a set of a present page keeps the first bytes, and returns True."""
    scatter_gather: bool = True
    """False: the SDK hands over pages of one segment, through a bounce buffer."""
    alignment: int = 1
    """Segment address and size alignment that the fast path needs."""
    parallelism: int = 1
    """How many concurrent calls the store gains from."""
    max_batch: int | None = None
    """The SDK splits larger batches; None: any size."""
    max_page_nbytes: int | None = None
    """The SDK refuses larger key spaces at `open_space`; None: no limit."""
    bounded: bool = False
    """Every call returns within `timeout_s` plus a second, whatever the store does, and touches no page
    afterwards. Memory of an engine is lent to bounded storages only."""

    def __post_init__(self) -> None:
        for name in ("alignment", "parallelism", "max_batch", "max_page_nbytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"a storage cannot claim {name} {value}: the least is 1")


@dataclass(frozen=True, slots=True)
class PageInfo:
    """One page that `scan` found."""

    page_hash: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStats:
    """A backend's own figures, as far as it knows them without I/O."""

    pages: int | None = None
    nbytes: int | None = None
    capacity_nbytes: int | None = None
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    """Events since the storage was opened, by name: evictions, refusals, errors by reason."""


class _Opener:
    """The process that opened a storage. Where it came by pickle, that is the one that unpickled it."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __reduce__(self) -> tuple[type[_Opener], tuple[()]]:
        return _Opener, ()

    def __str__(self) -> str:
        return f"process {self.pid}"


class HiCacheStorage(abc.ABC):
    """A place that keeps pages, addressed by (key space, page hash).

    Every method is thread-safe and blocking, and is called from several threads at once. Results have
    the length and the order of `hashes`. A miss is False, never an exception. `pages` are borrowed for
    the duration of the call: neither kept nor touched after it, also when it raises.

    Raises (every method but `close`):
        StorageClosed: `close` was called.
        StorageUnavailable, StorageTimeout: The store as a whole did not answer.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    """The class's own claims. An instance may narrow them in `__init__`, with `narrow`."""

    usable_after_fork: ClassVar[bool] = False
    """True where the class makes its connections, locks and threads anew in a forked child.

    Elsewhere `ensure_open` refuses there. A child that uses those of its parent corrupts what both see
    (KV-306)."""

    _closed = False
    _opened_by: _Opener | None = None
    """None where a subclass makes its objects without this class's `__new__`."""

    def __new__(cls, *_args: Any, **_fields: Any) -> Self:
        """Note which process opens the storage."""
        storage = super().__new__(cls)
        storage._opened_by = _Opener()
        return storage

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Open the storage that `config` describes.

        Raises:
            ConfigError: A field is wrong, missing or unknown; the message names it.
            StorageUnavailable: The store cannot be reached.
        """

    @abc.abstractmethod
    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Whether each page is there. A True may be out of date by the time of the get."""

    @abc.abstractmethod
    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        """Read each page into the page given for it. True: exactly the bytes that were set.

        After False that page's bytes are undefined; no byte outside it changed (KV-003, KV-004).
        """

    @abc.abstractmethod
    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        """Store each page. True: readable from now on. False: it never shows (KV-002, KV-006).

        A present page gives True, with either the old or the new bytes, whole (KV-005).
        """

    @abc.abstractmethod
    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Remove each page. True: it is gone, or was never there (KV-007).

        False: the page may still be there: the store could not remove it.
        """

    def open_space(self, space: KeySpace) -> None:
        """Get ready for pages of `space`. Called before its first use; idempotent.

        Raises:
            UnsupportedOperation: Its pages are larger than `capabilities.max_page_nbytes`.
        """
        self.ensure_open()
        limit = self.capabilities.max_page_nbytes
        if limit is not None and space.stored_nbytes > limit:
            raise UnsupportedOperation(
                f"{type(self).__name__} takes pages of up to {limit} bytes; pool {space.pool!r} of"
                f" {space.model!r} has {space.stored_nbytes}: use a smaller page size"
            )

    def spaces(self) -> Iterator[KeySpace]:
        """Every key space that holds pages, once. Needs `capabilities.enumerable`.

        A space that was opened but holds no page may be listed (KV-104).
        """
        self.ensure_open()
        raise UnsupportedOperation(f"{type(self).__name__} does not list its key spaces")

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        """Every page of `space`, in any order. Needs `capabilities.enumerable`."""
        self.ensure_open()
        raise UnsupportedOperation(f"{type(self).__name__} does not list its pages")

    def clear(self, space: KeySpace) -> int:
        """Remove every page of `space` and nothing else; how many pages that were (KV-103).

        A count means all of them. What a delete could not remove is tried a second time.

        Raises:
            StorageUnavailable: Pages are left; the message says how many.
        """
        found = (info.page_hash for info in self.scan(space))
        removed, left = self._delete_all(space, found)
        retried, left = self._delete_all(space, left)
        if left:
            pages = removed + retried + len(left)
            raise StorageUnavailable(
                f"{len(left)} of {pages} pages of pool {space.pool!r} could not be removed: clear it"
                " again when the store is well"
            )
        return removed + retried

    def _delete_all(self, space: KeySpace, hashes: Iterable[str]) -> tuple[int, list[str]]:
        """How many pages are gone, and which may still be there."""
        removed, left = 0, list[str]()
        rest = iter(hashes)
        while batch := list(islice(rest, self.capabilities.max_batch or 1024)):
            for page_hash, gone in zip(batch, self.batch_delete(space, batch), strict=True):
                removed += gone
                if not gone:
                    left.append(page_hash)
        return removed, left

    def register_buffer(self, buffer: HostBuffer) -> None:
        """Host memory that pages will live in, for stores that want to pin or map it beforehand."""
        self.ensure_open()

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        """The end of `register_buffer`; no page in `buffer` is in use any more."""
        self.ensure_open()

    def stats(self) -> StorageStats:
        """Figures for people and for metrics. O(1), no I/O."""
        self.ensure_open()
        return StorageStats()

    def close(self) -> None:
        """Give everything back: threads, sockets, descriptors, temporary files. Idempotent.

        An override ends with `super().close()`.
        """
        self._closed = True

    @property
    def is_forked_copy(self) -> bool:
        """True in a forked child of the process that opened the storage.

        `close` gives nothing back there that the parent still uses: locks, connections, sessions.
        """
        return self._opened_by is not None and self._opened_by.pid != os.getpid()

    def ensure_open(self) -> None:
        """Raise `StorageClosed` after `close`, and in a forked child unless `usable_after_fork`.

        The first line of every method of a backend.
        """
        if self._closed:
            raise StorageClosed(f"this {type(self).__name__} was closed: open a new one")
        if self.is_forked_copy and not self.usable_after_fork:
            raise StorageClosed(
                f"this {type(self).__name__} was opened by {self._opened_by}, which forked this one:"
                " open a new one here"
            )

    def narrow(self, **claims: Any) -> None:
        """Let this instance claim less than its class: `self.narrow(durability=Durability.CRASH)`.

        Raises:
            ValueError: It would claim more.
        """
        narrowed = replace(self.capabilities, **claims)
        widest = type(self).capabilities
        for claim in (
            "retention",
            "durability",
            "shared",
            "enumerable",
            "scatter_gather",
            "bounded",
        ):
            if getattr(narrowed, claim) > getattr(widest, claim):
                raise ValueError(f"an instance may not widen {claim} beyond its class's")
        for limit in ("max_batch", "max_page_nbytes"):
            most, wanted = getattr(widest, limit), getattr(narrowed, limit)
            if most is not None and (wanted is None or wanted > most):
                raise ValueError(f"an instance may not widen {limit} beyond its class's {most}")
        vars(self)["capabilities"] = narrowed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def describe(capabilities: Capabilities) -> dict[str, str]:
    """Each capability as one word or number, for tables and reports."""
    return {item.name: _word(getattr(capabilities, item.name)) for item in fields(capabilities)}


def _word(value: object) -> str:
    if isinstance(value, enum.Enum):
        return value.name.lower().replace("_", "-")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unlimited" if value is None else str(value)
