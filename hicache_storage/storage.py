"""The interface that a backend implements, and the capabilities that it may declare.

Read this module to write a backend. You implement five methods, which block, are thread-safe, and
treat key spaces and hashes as opaque ids. The page store (`hicache_storage.page_store`) adds framing,
checksums, batching, parallelism, deadlines and metrics to every backend. `docs/contract.md` has the
numbered rules that an implementation must keep.
"""

from __future__ import annotations

import abc
import enum
import os
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hicache_storage.errors import StorageClosed, StorageUnavailable, UnsupportedOperation
from hicache_storage.scalars import format_exact_nbytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer, Page


class Retention(enum.IntEnum):
    """How long a stored page stays. A larger value promises more.

    Examples:
        >>> Retention.UNTIL_DELETED > Retention.BEST_EFFORT
        True
    """

    BEST_EFFORT = 0
    """A page may vanish at any time."""
    UNTIL_PRESSURE = 1
    """A page stays until the store runs short of space."""
    UNTIL_DELETED = 2
    """A page stays until it is deleted or cleared."""


class Durability(enum.IntEnum):
    """Which failures a stored page survives. A larger value promises more.

    Examples:
        >>> Durability.POWER > Durability.CRASH > Durability.PROCESS
        True
    """

    PROCESS = 0
    """A page is lost when the process ends."""
    CRASH = 1
    """A page survives SIGKILL of any process that uses the store."""
    POWER = 2
    """A page survives a power failure, because data and names are synced before a set returns True."""


LIMITS = ("max_batch", "max_page_nbytes", "max_batch_nbytes")
"""The capabilities that are limits. None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend declares that it can do.

    The conformance kit tests each claim, and a call that needs more than was claimed is refused
    (KV-901, KV-902).

    Examples:
        >>> Capabilities(retention=Retention.UNTIL_DELETED, enumerable=True).enumerable
        True
    """

    retention: Retention = Retention.BEST_EFFORT
    durability: Durability = Durability.PROCESS
    shared: bool = False
    """True if another process that opens the same config can read the pages."""
    enumerable: bool = False
    """True if `spaces()` and `scan()` work."""
    overwrites: bool = True
    """False if setting a page that is already there keeps the old bytes and returns True."""
    scatter_gather: bool = True
    """False if each page must be one segment. The SDK then copies pages through a bounce buffer."""
    alignment: int = 1
    """The alignment of segment addresses and sizes, in bytes, that the fast path needs."""
    parallelism: int = 1
    """The number of concurrent calls up to which the store gets faster."""
    max_batch: int | None = None
    """The largest batch, in pages. The SDK splits larger ones. None: no limit."""
    max_page_nbytes: int | None = None
    """The largest page, in bytes. `open_space` refuses a key space with larger pages. None: no limit."""
    max_batch_nbytes: int | None = None
    """The most bytes of pages in one get or set. The SDK splits larger batches. None: no limit. A
    batch of one page may have more."""
    bounded: bool = False
    """True if every call returns within `timeout_s` plus a second, whatever the store does, and touches
    no page afterwards. Engines lend their own memory only to storages that are bounded or revocable."""
    revocable: bool = False
    """True if a call touches a page with a `Page.revocable` only between its `enter` and `leave`, and so
    never after `revoke` has returned. A get of a revoked page is a miss; a set stores the whole page or
    nothing. Requires `scatter_gather`, because these pages get no bounce buffer."""
    keeps_given: bool = False
    """True if a set of a page that is `given` is faster, because the storage keeps its memory instead of
    copying it. The page store then copies each page before it calls `batch_set`."""

    def __post_init__(self) -> None:
        for name in ("alignment", "parallelism", *LIMITS):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"a storage cannot claim {name} {value}: the least is 1")
        if self.revocable and not self.scatter_gather:
            raise ValueError("a storage that claims revocable must claim scatter_gather")

    def fitting_pages(self, pages: int, page_nbytes: int) -> int:
        """Return how many of `pages` fit in one get or set: at least one.

        Examples:
            >>> Capabilities(max_batch=9, max_batch_nbytes=4096).fitting_pages(100, page_nbytes=1024)
            4
        """
        if self.max_batch is not None:
            pages = min(pages, self.max_batch)
        if self.max_batch_nbytes is not None:
            pages = min(pages, self.max_batch_nbytes // page_nbytes)
        return max(1, pages)


@dataclass(frozen=True, slots=True)
class PageInfo:
    """A page that `scan` found.

    Examples:
        >>> PageInfo("ab" * 32, nbytes=4096).nbytes
        4096
    """

    page_hash: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTimes:
    """When a page was written and last used, in seconds since 1970. None: the store did not record it.

    Examples:
        >>> PageTimes(written_at_s=1.7e9).used_at_s is None
        True
    """

    written_at_s: float | None = None
    used_at_s: float | None = None
    """The last recorded write or get. The page may have been used again up to `used_within_s` later."""
    used_within_s: float = 0.0
    """The store records no other use of the page for this time after the recorded use."""


@dataclass(frozen=True, slots=True)
class PageFault:
    """A damaged or foreign object in the place of a page. Every get of the page is a miss.

    Examples:
        >>> PageFault("ab" * 32, "wrong_size", "it is 9 bytes long instead of 4,096").reason
        'wrong_size'
    """

    page_hash: str
    reason: str
    """One word for tables: `wrong_size`, `corrupt`, `not_authentic`, `unknown_key`, or `unreadable` if
    the store could not look at the page, which may be right."""
    detail: str = ""


class UnreadableKind(enum.StrEnum):
    """Why a key space cannot be identified. Programs decide by it what to do.

    Examples:
        >>> UnreadableKind("not_read") is UnreadableKind.NOT_READ
        True
    """

    DAMAGED = "damaged"
    """Its manifest is lost or damaged, or describes another key space."""
    OTHER_VERSION = "other_version"
    """Its manifest has other fields than those of this version."""
    OTHER_KEY = "other_key"
    """Its name is sealed with another key."""
    NOT_READ = "not_read"
    """The store could not look, so the manifest may be right. Tools never remove such a key space."""


@dataclass(frozen=True, slots=True)
class UnreadableSpace:
    """A key space that the store holds but cannot identify, so `spaces` leaves it out.

    Examples:
        >>> UnreadableSpace("0" * 32, UnreadableKind.DAMAGED, "its manifest is lost").reason
        'its manifest is lost'
    """

    space_id: str
    kind: UnreadableKind
    reason: str
    """What is wrong, for a person to read, such as "its manifest is damaged"."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A fact about a store that `hicache doctor` shows. It never contains a secret.

    Examples:
        >>> Diagnosis("capacity", "9 of 10 GiB are used", advice="raise capacity_nbytes").is_full
        False
    """

    topic: str
    fact: str
    advice: str = ""
    """What an operator should do, or "" if nothing needs to be done."""
    is_full: bool = False
    """True if the store is full: one more page would be refused, or would evict others."""
    free_nbytes: int | None = None
    """How many more bytes of pages fit before one is refused or evicted. None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStats:
    """Figures that a backend reports about itself. None: it cannot find them out without I/O.

    Examples:
        >>> from hicache_storage import open_storage
        >>> with open_storage("memory", {"capacity_nbytes": "1MiB"}) as storage:
        ...     storage.stats().capacity_nbytes
        1048576
    """

    pages: int | None = None
    nbytes: int | None = None
    capacity_nbytes: int | None = None
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    """Counts of events since the storage was opened: evictions, refusals, errors by reason.

    Those of a part begin with its name and a dot: `nvme.evicted`, `nvme.a.evicted`."""
    part_states: Mapping[str, str] = field(default_factory=dict[str, str])
    """Whether the storage calls each of its parts: `closed` if it does, `open` after failures, and
    `half_open` for a trial, as of a circuit breaker, and `absent` if it was never open. A part's part
    is called `nvme/a`."""


class _Opener:
    """The process that opened a storage, or unpickled it."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __reduce__(self) -> tuple[type[_Opener], tuple[()]]:
        return _Opener, ()

    def __str__(self) -> str:
        return f"process {self.pid}"


class HiCacheStorage(abc.ABC):
    """A store of pages. A key space and a page hash together identify a page.

    Every method blocks and is thread-safe: several threads call it at once. A result has one item for
    each of `hashes`, in the same order. A miss is False, never an exception. A call borrows `pages`
    until it ends; the storage does not keep or touch them afterwards, even if the call raises.

    Raises (every method but `close`):
        StorageClosed: `close` was called.
        StorageUnavailable, StorageTimeout: The store as a whole did not answer.

    Examples:
        >>> from hicache_storage import KeySpace, Page, Shard, open_storage, page_hashes
        >>> space = KeySpace(model="my/model", dtype="bfloat16", layout="page_first", page_tokens=2,
        ...                  page_nbytes=4, shard=Shard(layers=(0, 1)))
        >>> hashes = page_hashes([1, 2, 3, 4], page_tokens=2)
        >>> with open_storage("memory") as storage:
        ...     storage.batch_set(space, hashes[:1], [Page(b"kv!!")])
        ...     storage.batch_exists(space, hashes)
        [True]
        [True, False]
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    """What the class claims. An instance may claim less: call `narrow` in `__init__`."""

    usable_after_fork: ClassVar[bool] = False
    """True if the class makes new connections, locks and threads in a forked child.

    If False, `ensure_open` raises in the child, because a child that uses its parent's connections
    corrupts the data of both (KV-306)."""

    _closed = False
    _opened_by: _Opener | None = None
    """The process that opened the storage. None if a subclass does not call this class's `__new__`."""

    def __new__(cls, *_args: Any, **_fields: Any) -> Self:
        storage = super().__new__(cls)
        storage._opened_by = _Opener()
        return storage

    @classmethod
    @abc.abstractmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Open the storage that `config` describes.

        Raises:
            ConfigError: A field is wrong, missing or unknown. The message names it.
            StorageUnavailable: The store cannot be reached.
        """

    @classmethod
    def would_create(cls, config: Mapping[str, Any]) -> str | None:  # noqa: ARG003
        """Return the place where `from_config` would create a new, empty store.

        Return None if `from_config` would not create a store, or if the backend cannot find out.

        Raises:
            ConfigError: A field is wrong, missing or unknown. The message names it.
        """
        return None

    @classmethod
    def would_claim(cls, config: Mapping[str, Any]) -> Capabilities:  # noqa: ARG003
        """Return what a storage of `config` claims, as far as that is known without opening it.

        A composition that is opened read-only asks this about a part that it cannot open. Override it if
        the alignment depends on the config, because the alignment decides how pages are framed.

        Raises:
            ConfigError: A field is wrong, missing or unknown. The message names it.
        """
        return cls.capabilities

    @classmethod
    def open_read_only(cls, config: Mapping[str, Any]) -> HiCacheStorage:
        """Open the storage that `config` describes, for a program that only reads (KV-308).

        `open_storage(name, config, read_only=True)` calls this, and refuses every call that would change
        the store. Override it if opening or reading has side effects in your backend. The storage that
        you return must not create or remove anything, apply limits, start a collector, take a lock that
        writers wait for, record a use, or heal a page. It must work on a read-only mount, and claim what
        `from_config` would claim.

        Raises:
            ConfigError: As in `from_config`, or the place holds a store of another kind.
            StorageUnavailable: The store cannot be reached.
        """
        return cls.from_config(config)

    @abc.abstractmethod
    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Return True for each page that is stored. A page may be gone again by the time you get it."""

    @abc.abstractmethod
    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        """Read each page into its item of `pages`. True: the item holds exactly the bytes that were set.

        If the result is False, the item's bytes are undefined. No byte outside of the item changes
        (KV-003, KV-004).
        """

    @abc.abstractmethod
    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        """Store each page. True: it can be read from now on. False: it will not appear (KV-002, KV-006).

        Return True for a page that is already there. It then has either its old or its new bytes
        (KV-005).
        """

    @abc.abstractmethod
    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Remove each page. True: it is gone, or was never there (KV-007).

        False: the page could not be removed and may still be there.
        """

    def open_space(self, space: KeySpace) -> None:
        """Prepare the store for pages of `space`. Call this before the first set. Idempotent.

        Every other call must also work for a key space that nobody opened: the call finds what is there,
        and creates nothing (KV-001).

        Raises:
            UnsupportedOperation: The pages of `space` are larger than `capabilities.max_page_nbytes`.
        """
        self.ensure_open()
        limit = self.capabilities.max_page_nbytes
        if limit is not None and space.stored_nbytes > limit:
            raise UnsupportedOperation(
                f"{type(self).__name__} takes pages of up to {format_exact_nbytes(limit)}, but those of"
                f" pool {space.pool!r} of {space.model!r} have"
                f" {format_exact_nbytes(space.stored_nbytes)}: use a smaller page size"
            )

    def spaces(self) -> Iterator[KeySpace]:
        """Yield every key space that holds pages, once. Requires `capabilities.enumerable`.

        A space that was opened but holds no page may be included (KV-104).
        """
        self.ensure_open()
        raise UnsupportedOperation(f"{type(self).__name__} does not list its key spaces")

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        """Yield every page of `space`, in any order. Requires `capabilities.enumerable`."""
        self.ensure_open()
        raise UnsupportedOperation(f"{type(self).__name__} does not list its pages")

    def faults(self, space: KeySpace, hashes: Sequence[str] | None = None) -> Iterator[PageFault]:
        """Yield the damaged objects of `space`, as far as the store itself can tell.

        With `hashes`, check these pages, and read whatever that takes; a missing or correct page yields
        nothing. Without `hashes`, yield what a listing shows and `scan` leaves out, such as pages of a
        wrong length. The call changes nothing. Tools such as `hicache verify` call it; engines do not.
        """
        self.ensure_open()
        return iter(())

    def unreadable_spaces(self) -> Iterator[UnreadableSpace]:
        """Yield the stored key spaces that `spaces` leaves out, because they cannot be identified."""
        self.ensure_open()
        return iter(())

    def remove_space(self, space_id: str) -> int:
        """Remove a key space: its pages and everything that names it. Return the number of pages.

        `space_id` is a `KeySpace.id` or an `UnreadableSpace.space_id`. An unknown id gives 0. If
        someone writes to the key space during the call, it stays, with the pages that were written.

        Raises:
            UnsupportedOperation: The store cannot list its pages.
            StorageUnavailable: Something is left. The message says what.
        """
        self.ensure_open()
        raise UnsupportedOperation(f"{type(self).__name__} removes no key spaces")

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        """Return when each page was written and used, if the store records it. This is not a use."""
        self.ensure_open()
        return [PageTimes()] * len(hashes)

    def clear(self, space: KeySpace) -> int:
        """Remove every page of `space` and nothing else. Return the number of removed pages (KV-103).

        If a page cannot be deleted, the call tries once more.

        Raises:
            StorageUnavailable: Pages are left. The message says how many.
        """
        hashes = (info.page_hash for info in self.scan(space))
        removed, left = self._delete_all(space, hashes)
        retried, left = self._delete_all(space, left)
        if left:
            pages = removed + retried + len(left)
            raise StorageUnavailable(
                f"{len(left)} of {pages} pages of pool {space.pool!r} could not be removed: clear"
                " it again when the store works again"
            )
        return removed + retried

    def _delete_all(self, space: KeySpace, hashes: Iterable[str]) -> tuple[int, list[str]]:
        """Delete pages. Return how many are gone, and the hashes of those that may be left."""
        removed, left = 0, list[str]()
        rest = iter(hashes)
        while batch := list(islice(rest, self.capabilities.max_batch or 1024)):
            for page_hash, gone in zip(batch, self.batch_delete(space, batch), strict=True):
                removed += gone
                if not gone:
                    left.append(page_hash)
        return removed, left

    def diagnose(self) -> list[Diagnosis]:
        """Return what an operator should know about the store. `hicache doctor` shows it."""
        self.ensure_open()
        return []

    def register_buffer(self, buffer: HostBuffer) -> None:
        """Announce host memory that will hold pages, so that the store can pin or map it in advance."""
        self.ensure_open()

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        """Undo `register_buffer`. By then no call uses a page in `buffer`."""
        self.ensure_open()

    def parts(self) -> Mapping[str, HiCacheStorage]:
        """Return the storages that this one consists of, by name and in its order.

        `hicache` and metrics show each of them, and their parts as `nvme/a`. A part lists, reads and
        removes its own copies of pages, under the same key spaces and hashes. It is closed with this
        storage. Most storages have no parts.
        """
        self.ensure_open()
        return {}

    def page_shares(self) -> Mapping[str, float]:
        """Return which share of the pages each part stores, by name: 1 if it stores every page."""
        return dict.fromkeys(self.parts(), 1.0)

    def page_parts(self, space: KeySpace, hashes: Sequence[str]) -> list[Collection[str]]:
        """Return the names of the parts that each page belongs in: all, if every part stores it."""
        return [tuple(self.parts())] * len(hashes)

    def stats(self) -> StorageStats:
        """Return figures for reports and metrics, in O(1) and without I/O."""
        self.ensure_open()
        return StorageStats()

    def close(self) -> None:
        """Release all resources: threads, sockets, descriptors, temporary files. Idempotent.

        If you override it, end with `super().close()`.
        """
        self._closed = True

    @property
    def is_forked_copy(self) -> bool:
        """True in a forked child of the process that opened the storage.

        There, `close` must not release what the parent still uses: locks, connections, sessions.
        """
        return self._opened_by is not None and self._opened_by.pid != os.getpid()

    def ensure_open(self) -> None:
        """Raise `StorageClosed` after `close`, and in a forked child unless `usable_after_fork`.

        Call it first in every method of a backend.
        """
        if self._closed:
            raise StorageClosed(f"this {type(self).__name__} was closed: open a new one")
        if self.is_forked_copy and not self.usable_after_fork:
            raise StorageClosed(
                f"this {type(self).__name__} was opened by {self._opened_by}, from which this one"
                " was forked: open a new one here"
            )

    def narrow(self, **claims: Any) -> None:
        """Claim less than the class does, for example `self.narrow(durability=Durability.CRASH)`.

        Raises:
            ValueError: The instance would claim more.
        """
        narrowed = replace(self.capabilities, **claims)
        widest = self._widest_capabilities
        for claim in (
            "retention",
            "durability",
            "shared",
            "enumerable",
            "scatter_gather",
            "bounded",
            "revocable",
            "keeps_given",
        ):
            if getattr(narrowed, claim) > getattr(widest, claim):
                raise ValueError(f"an instance may not widen {claim} beyond its class's")
        for limit in LIMITS:
            most, claimed = getattr(widest, limit), getattr(narrowed, limit)
            if most is not None and (claimed is None or claimed > most):
                raise ValueError(f"an instance may not widen {limit} beyond its class's {most}")
        vars(self)["capabilities"] = narrowed

    @property
    def _widest_capabilities(self) -> Capabilities:
        """The most that `narrow` allows an instance to claim."""
        return type(self).capabilities

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def describe(capabilities: Capabilities) -> dict[str, str]:
    """Return each capability as one word or number, for tables and reports."""
    return {item.name: _format(getattr(capabilities, item.name)) for item in fields(capabilities)}


def _format(value: object) -> str:
    if isinstance(value, enum.Enum):
        return value.name.lower().replace("_", "-")
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "unlimited" if value is None else str(value)
