"""The interface that a backend implements, and the capabilities that it may declare.

The interface has five blocking, thread-safe methods over opaque ids and scatter/gather pages. The
page store (`hicache_storage.page_store`) adds framing, checksums, batching, parallelism, deadlines
and metrics, once for every backend. `docs/contract.md` has the numbered rules that an
implementation keeps.
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
    """The time for which a stored page stays. A larger value promises more."""

    BEST_EFFORT = 0
    """A page may vanish at any time."""
    UNTIL_PRESSURE = 1
    """A page stays until the store is short of room."""
    UNTIL_DELETED = 2
    """A page stays until it is deleted or cleared."""


class Durability(enum.IntEnum):
    """The failures that a stored page survives. A larger value promises more."""

    PROCESS = 0
    """A page is lost with the process."""
    CRASH = 1
    """A page survives SIGKILL of any process that uses the store."""
    POWER = 2
    """A page survives a loss of power: data and names are synced before a set returns True."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The declarations of a backend. The kit tests what is declared; a call for more is refused.

    See KV-901 and KV-902.
    """

    retention: Retention = Retention.BEST_EFFORT
    durability: Durability = Durability.PROCESS
    shared: bool = False
    """True if another process that opens the same config sees the pages."""
    enumerable: bool = False
    """True if `spaces()` and `scan()` work."""
    overwrites: bool = True
    """False if a set of a present page keeps the first bytes, and returns True."""
    scatter_gather: bool = True
    """False if the SDK must pass pages of one segment, through a bounce buffer."""
    alignment: int = 1
    """The alignment of segment addresses and sizes that the fast path needs."""
    parallelism: int = 1
    """The number of concurrent calls from which the store gains."""
    max_batch: int | None = None
    """The largest batch. The SDK splits larger ones. None: no limit."""
    max_page_nbytes: int | None = None
    """The largest page. The SDK refuses key spaces of larger pages at `open_space`. None: no limit."""
    bounded: bool = False
    """True if every call returns within `timeout_s` plus a second, whatever the store does, and touches
    no page afterwards. An engine lends its own memory to storages that are bounded or revocable."""
    revocable: bool = False
    """True if a call accesses a page that has a `Page.revocable` only within accesses of it: after
    `revoke` has returned, it touches no byte of the page. The page of a get is then no hit, and that of
    a set is stored whole or not at all. Needs `scatter_gather`: pages get no bounce buffer."""

    def __post_init__(self) -> None:
        for name in ("alignment", "parallelism", "max_batch", "max_page_nbytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"a storage cannot claim {name} {value}: the least is 1")
        if self.revocable and not self.scatter_gather:
            raise ValueError("a storage that claims revocable must claim scatter_gather")


@dataclass(frozen=True, slots=True)
class PageInfo:
    """A page that `scan` found."""

    page_hash: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTimes:
    """The times of a page, in seconds since 1970. None: the store does not know."""

    written_at_s: float | None = None
    used_at_s: float | None = None
    """The time of the last write or get. The true one may be later, by up to `used_within_s`."""
    used_within_s: float = 0.0
    """The interval at which the store notes a use: a page that was used within it keeps its time."""


@dataclass(frozen=True, slots=True)
class PageFault:
    """An object that stands in the place of a page and is none: every get of it is a miss."""

    page_hash: str
    reason: str
    """One word for tables: `wrong_size`, `corrupt`, `not_authentic`, `unknown_key`."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class UnreadableSpace:
    """A key space that the store holds and cannot name, so that `spaces` leaves it out."""

    space_id: str
    reason: str
    """What is wrong, for people: "its manifest is damaged", "none of the keys opens its name"."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A fact about a store, for people. It never holds a secret."""

    topic: str
    fact: str
    advice: str = ""
    """The thing to do, or empty if the fact needs none."""
    is_full: bool = False
    """True if the store has no room: one page more would be refused, or evict others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStats:
    """A backend's own figures. None: the figure is not known without I/O."""

    pages: int | None = None
    nbytes: int | None = None
    capacity_nbytes: int | None = None
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    """The events since the storage was opened, by name: evictions, refusals, errors by reason."""


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
    """A store of pages, addressed by (key space, page hash).

    Every method is thread-safe and blocking, and several threads call it at once. Results have the
    length and the order of `hashes`. A miss is False, never an exception. A call borrows `pages`
    until it ends: the storage neither keeps nor touches them afterwards, also when the call raises.

    Raises (every method but `close`):
        StorageClosed: `close` was called.
        StorageUnavailable, StorageTimeout: The store as a whole did not answer.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    """The claims of the class. An instance may narrow them in `__init__`, with `narrow`."""

    usable_after_fork: ClassVar[bool] = False
    """True if the class makes new connections, locks and threads in a forked child.

    If it is False, `ensure_open` refuses in the child: a child that uses the connections of its
    parent corrupts the data of both (KV-306)."""

    _closed = False
    _opened_by: _Opener | None = None
    """None if a subclass makes its objects without this class's `__new__`."""

    def __new__(cls, *_args: Any, **_fields: Any) -> Self:
        """Record the process that opens the storage."""
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
        """Return the place where `from_config` would make a new, empty store.

        None: it would make none, or the backend does not know.

        Raises:
            ConfigError: A field is wrong, missing or unknown. The message names it.
        """
        return None

    @classmethod
    def open_read_only(cls, config: Mapping[str, Any]) -> HiCacheStorage:
        """Open the storage of `config` for a program that only looks (KV-308).

        `registry.open_storage(name, config, read_only=True)` calls this, and refuses every call that
        would change the store. A backend overrides it where opening or reading has effects of its
        own: such a storage makes and removes nothing, applies no limits, starts no collector, takes
        no lock that writers wait for, notes no use, and heals no page. It works on a read-only mount.

        Raises:
            ConfigError: As `from_config`; also, the place holds a store of another kind.
            StorageUnavailable: The store cannot be reached.
        """
        return cls.from_config(config)

    @abc.abstractmethod
    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Return for each page True if it is there. A True may be out of date by the time of the get."""

    @abc.abstractmethod
    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        """Read each page into its item of `pages`. True: the item holds exactly the bytes that were set.

        After False the item's bytes are undefined. No byte outside it has changed (KV-003, KV-004).
        """

    @abc.abstractmethod
    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        """Store each page. True: it is readable from now on. False: it never shows (KV-002, KV-006).

        The result for a present page is True. Its bytes are either the old or the new ones
        (KV-005).
        """

    @abc.abstractmethod
    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Remove each page. True: it is gone, or was never there (KV-007).

        False: the store could not remove the page, which may still be there.
        """

    def open_space(self, space: KeySpace) -> None:
        """Prepare for pages of `space`, before its first set. Idempotent.

        Every other call may come without it, of a key space that a stranger has named: it finds what is
        there, and makes nothing (KV-001).

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
        """Yield every key space that holds pages, once. Needs `capabilities.enumerable`.

        The list may include a space that was opened and holds no page (KV-104).
        """
        self.ensure_open()
        raise UnsupportedOperation(f"{type(self).__name__} does not list its key spaces")

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        """Yield every page of `space`, in any order. Needs `capabilities.enumerable`."""
        self.ensure_open()
        raise UnsupportedOperation(f"{type(self).__name__} does not list its pages")

    def faults(self, space: KeySpace, hashes: Sequence[str] | None = None) -> Iterator[PageFault]:
        """Yield the objects of `space` that are damaged, as far as the store itself can tell.

        With `hashes` it looks at these, and reads what it must; an absent page and a right one yield
        nothing. Without, it yields what a listing shows and `scan` leaves out: pages of a wrong
        length. The call changes nothing. Only `hicache verify` and its like call it.
        """
        self.ensure_open()
        return iter(())

    def unreadable_spaces(self) -> Iterator[UnreadableSpace]:
        """Yield the key spaces that are there and that `spaces` cannot name."""
        self.ensure_open()
        return iter(())

    def remove_space(self, space_id: str) -> int:
        """Remove a key space: its pages, and all that tells of it. Return the number of its pages.

        `space_id` is a `KeySpace.id`, or that of an `UnreadableSpace`. An unknown one gives 0. A key
        space that is written to meanwhile stays, with what was written.

        Raises:
            UnsupportedOperation: The store cannot list its pages.
            StorageUnavailable: Something is left. The message says what.
        """
        self.ensure_open()
        raise UnsupportedOperation(f"{type(self).__name__} removes no key spaces")

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        """Return when each page was written and used, as far as the store knows. No call uses a page."""
        self.ensure_open()
        return [PageTimes()] * len(hashes)

    def clear(self, space: KeySpace) -> int:
        """Remove every page of `space` and nothing else. Return the number of pages (KV-103).

        The method tries a second time to remove the pages that a delete could not remove.

        Raises:
            StorageUnavailable: Pages are left. The message has their number.
        """
        hashes = (info.page_hash for info in self.scan(space))
        removed, left = self._delete_all(space, hashes)
        retried, left = self._delete_all(space, left)
        if left:
            pages = removed + retried + len(left)
            raise StorageUnavailable(
                f"{len(left)} of {pages} pages of pool {space.pool!r} could not be removed: clear it"
                " again when the store is well"
            )
        return removed + retried

    def _delete_all(self, space: KeySpace, hashes: Iterable[str]) -> tuple[int, list[str]]:
        """Delete pages. Return the number that are gone, and the hashes of those that may be left."""
        removed, left = 0, list[str]()
        rest = iter(hashes)
        while batch := list(islice(rest, self.capabilities.max_batch or 1024)):
            for page_hash, gone in zip(batch, self.batch_delete(space, batch), strict=True):
                removed += gone
                if not gone:
                    left.append(page_hash)
        return removed, left

    def diagnose(self) -> list[Diagnosis]:
        """Return what the store says about itself that an operator should know: `hicache doctor`."""
        self.ensure_open()
        return []

    def register_buffer(self, buffer: HostBuffer) -> None:
        """Announce host memory that will hold pages, for a store that pins or maps memory beforehand."""
        self.ensure_open()

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        """Undo `register_buffer`. No page in `buffer` is in use any more."""
        self.ensure_open()

    def stats(self) -> StorageStats:
        """Return figures for people and for metrics, in O(1) and without I/O."""
        self.ensure_open()
        return StorageStats()

    def close(self) -> None:
        """Release all resources: threads, sockets, descriptors, temporary files. Idempotent.

        An override ends with `super().close()`.
        """
        self._closed = True

    @property
    def is_forked_copy(self) -> bool:
        """True in a forked child of the process that opened the storage.

        `close` releases nothing there that the parent still uses: locks, connections, sessions.
        """
        return self._opened_by is not None and self._opened_by.pid != os.getpid()

    def ensure_open(self) -> None:
        """Raise `StorageClosed` after `close`, and in a forked child unless `usable_after_fork`.

        Every method of a backend calls it first.
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
        ):
            if getattr(narrowed, claim) > getattr(widest, claim):
                raise ValueError(f"an instance may not widen {claim} beyond its class's")
        for limit in ("max_batch", "max_page_nbytes"):
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
