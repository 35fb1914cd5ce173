"""`s3` as a HiCacheStorage: one object per page.

boto3 finds the bucket and the credentials (`access`), lists and deletes (`bucket`). Pages travel on
connections of this backend (`exchange`), directly from and into their segments. `page_calls` maps
an answer to the result of a page.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Self, TypeVar

from hicache_backends.s3.access import Access
from hicache_backends.s3.bucket import Bucket
from hicache_backends.s3.client import open_client
from hicache_backends.s3.layout import Layout
from hicache_backends.s3.losses import CallFailed
from hicache_backends.s3.page_calls import PageCalls
from hicache_backends.s3.settings import S3Settings
from hicache_storage.backend_support.answers import answers_of
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.manifest import (
    SPACE_ID,
    decode_manifest,
    encode_manifest,
    unreadable_space,
)
from hicache_storage.backend_support.registrations import Registrations
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.settings import counted
from hicache_storage.storage import (
    Capabilities,
    Diagnosis,
    Durability,
    HiCacheStorage,
    PageFault,
    PageInfo,
    PageTimes,
    Retention,
    StorageStats,
    UnreadableSpace,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hicache_backends.s3.bucket import ListedObject
    from hicache_backends.s3.exchange import Call
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

T = TypeVar("T")

_LARGEST_PUT_NBYTES = 5 << 30
# The protocol has no batches, so a large batch is fastest if the page store splits it among its
# threads.
_MAX_BATCH = 64
_MANIFEST_BATCH = 256
_LOOKED_AT_ONCE_NBYTES = 32 << 20
"""How many bytes of pages are read at a time, within one deadline, to look for damage."""


class S3Storage(HiCacheStorage):
    """A storage of pages as objects.

    Every process that reaches the bucket shares the pages, and they outlive every process.
    """

    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        shared=True,
        enumerable=True,
        parallelism=8,
        max_batch=_MAX_BATCH,
        max_page_nbytes=_LARGEST_PUT_NBYTES,
        bounded=True,
        revocable=True,
    )
    usable_after_fork = True

    def __init__(self, settings: S3Settings, *, is_read_only: bool = False) -> None:
        self._settings = settings
        self._counters = Counters()
        self._layout = Layout(settings.prefix)
        access = Access(settings)  # no request, but botocore reads megabytes of its own data
        deadline = self._deadline()
        self._client = open_client(settings, access, self._counters)
        self._pages = PageCalls(self._client, settings, heals=not is_read_only)
        self._bucket = Bucket(access.client, self._client, settings)
        self._registrations = Registrations()
        self.narrow(parallelism=settings.parallelism)
        try:
            self._bucket.check(deadline, creates=settings.create_bucket and not is_read_only)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(S3Settings.parse("s3", config))

    @classmethod
    def open_read_only(cls, config: Mapping[str, Any]) -> Self:
        """Open the store for a program that only looks: create no bucket, and delete no wrong object."""
        return cls(S3Settings.parse("s3", config), is_read_only=True)

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        self._run_one(self._register(space), self._deadline())

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        nbytes = space.stored_nbytes
        calls = [self._pages.exists(name, nbytes) for name in self._page_names(space, hashes)]
        return self._results(self._run(calls, self._deadline()))

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        names = self._page_names(space, hashes)
        calls = [self._pages.get(name, page) for name, page in zip(names, pages, strict=True)]
        return self._results(self._run(calls, self._deadline()))

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        names = self._page_names(space, hashes)
        unique = dict(zip(names, pages, strict=True))
        calls = [self._pages.set(name, page) for name, page in unique.items()]
        if self._registrations.is_due(space):
            # The manifest is written along with the pages, but does not affect their results.
            calls.append(self._register(space))
        outcomes = self._run(calls, self._deadline())[: len(unique)]
        results = dict(zip(unique, self._results(outcomes, are_writes=True), strict=True))
        return [results[name] for name in names]

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        names = self._page_names(space, hashes)
        kept = self._bucket.delete(list(dict.fromkeys(names)), self._deadline())
        self._counters.add("not_deleted", len(kept))
        return [name not in kept for name in names]

    def spaces(self) -> Iterator[KeySpace]:
        self.ensure_open()
        return self._key_spaces()

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        return (
            PageInfo(object_.name.rpartition("/")[2], object_.nbytes)
            for object_ in self._list_all(self._layout.root(space.id))
            if object_.nbytes == space.stored_nbytes
            and self._layout.is_page(space.id, object_.name)
        )

    def faults(self, space: KeySpace, hashes: Sequence[str] | None = None) -> Iterator[PageFault]:
        self.ensure_open()
        return self._faults_among(space, hashes) if hashes is not None else self._sizes_of(space)

    def unreadable_spaces(self) -> Iterator[UnreadableSpace]:
        self.ensure_open()
        return self._unreadable_spaces()

    def remove_space(self, space_id: str) -> int:
        """Remove a key space. Each step has its own deadline.

        Raises:
            StorageUnavailable, StorageTimeout: Some pages may still be there.
        """
        self.ensure_open()
        if not SPACE_ID.fullmatch(space_id):
            return 0
        name = self._layout.manifest(space_id)
        text = self._run_one(self._pages.read(name), self._deadline())
        space = decode_manifest(text, space_id=space_id)
        removed = self._clear(space_id, None if space is None else space.stored_nbytes)
        if self._has_pages(space_id):  # they were set in the meantime
            return removed
        if self._bucket.delete([name], self._deadline()):
            raise StorageUnavailable(f"s3: {counted(removed, 'page')} removed, but {name} was not")
        self._registrations.forget(space_id)
        if space is not None and self._has_pages(space_id):
            self._run_one(self._register(space), self._deadline())
        return removed

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        """Return when the objects were written. The protocol does not record when they were used."""
        names = self._page_names(space, hashes)
        outcomes = self._run([self._pages.written_at_s(name) for name in names], self._deadline())
        return [
            PageTimes(written_at_s=None if isinstance(one, CallFailed) else one) for one in outcomes
        ]

    def clear(self, space: KeySpace) -> int:
        self.ensure_open()
        return self._clear(space.id, space.stored_nbytes)

    def diagnose(self) -> list[Diagnosis]:
        """Return the name that the server gives itself."""
        self.ensure_open()
        name = self._bucket.server_name(self._deadline())
        return [Diagnosis("server", name)] if name else []

    def stats(self) -> StorageStats:
        self.ensure_open()
        return StorageStats(counters=self._counters.snapshot())

    def close(self) -> None:
        super().close()
        self._client.close()

    # --- parts ---------------------------------------------------------------------------------------

    def _register(self, space: KeySpace) -> Call[bool]:
        """Write the manifest, unless it is already there."""
        name = self._layout.manifest(space.id)
        stored = yield from self._pages.read(name)
        if decode_manifest(stored, space_id=space.id) is None:
            yield from self._pages.write(name, encode_manifest(space))
        self._registrations.note(space)
        return True

    def _clear(self, space_id: str, nbytes: int | None) -> int:
        """Remove every page. Return how many had `nbytes` bytes. If `nbytes` is None, count any size."""
        removed = 0
        kept: dict[str, str] = {}
        position: str | None = ""
        while position is not None:
            deadline = self._deadline()  # one deadline per step, as in `scan`
            try:
                found, position = self._bucket.list_page(
                    self._layout.root(space_id), position, deadline
                )
                pages = [one for one in found if self._layout.is_page(space_id, one.name)]
                kept |= self._bucket.delete([one.name for one in pages], deadline)
            except (StorageTimeout, StorageUnavailable) as error:
                raise type(error)(
                    f"{error}; {counted(removed, 'page')} cleared so far: clear it again"
                ) from None
            removed += sum(nbytes in (None, one.nbytes) and one.name not in kept for one in pages)
        if kept:
            reasons = ", ".join(sorted(set(kept.values())))
            raise StorageUnavailable(
                f"s3: {counted(len(kept), 'page')} not deleted ({reasons}), {removed:,} deleted"
            )
        return removed

    def _page_names(self, space: KeySpace, hashes: Sequence[str]) -> list[str]:
        return self._layout.pages(space.id, hashes)

    def _deadline(self) -> Deadline:
        return Deadline(self._settings.timeout_s)

    def _run(self, calls: Sequence[Call[T]], deadline: Deadline) -> list[T | CallFailed]:
        self.ensure_open()
        return self._client.run(calls, deadline)

    def _run_one(self, call: Call[T], deadline: Deadline) -> T:
        (outcome,) = self._run([call], deadline)
        return _known(outcome)

    def _results(
        self, outcomes: Sequence[bool | CallFailed], *, are_writes: bool = False
    ) -> list[bool]:
        """Return the results. Raise if no page has a result, or if a write is in doubt."""
        failures = [one for one in outcomes if isinstance(one, CallFailed)]
        self._counters.add("failed", len(failures))
        in_doubt = [one for one in failures if one.in_doubt and are_writes]
        if in_doubt or (failures and len(failures) == len(outcomes)):
            raise (in_doubt or failures)[0].error
        return answers_of([None if isinstance(one, CallFailed) else one for one in outcomes])

    def _list_all(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every object whose name begins with `prefix`.

        Each page of the listing has its own deadline.
        """
        position: str | None = ""
        while position is not None:
            self.ensure_open()
            found, position = self._bucket.list_page(prefix, position, self._deadline())
            yield from found

    def _has_pages(self, space_id: str) -> bool:
        listed = self._list_all(self._layout.root(space_id))
        return any(self._layout.is_page(space_id, object_.name) for object_ in listed)

    def _faults_among(self, space: KeySpace, hashes: Sequence[str]) -> Iterator[PageFault]:
        nbytes = space.stored_nbytes
        most = min(_MAX_BATCH, max(1, _LOOKED_AT_ONCE_NBYTES // nbytes))
        for batch in _batches(iter(hashes), most):
            calls = [self._pages.fault(name, nbytes) for name in self._page_names(space, batch)]
            found = map(_known, self._run(calls, self._deadline()))
            for page_hash, fault in zip(batch, found, strict=True):
                if fault is not None:
                    yield PageFault(page_hash, *fault)

    def _sizes_of(self, space: KeySpace) -> Iterator[PageFault]:
        """Yield the objects that are named like a page but have a wrong size."""
        nbytes = space.stored_nbytes
        for object_ in self._list_all(self._layout.root(space.id)):
            if object_.nbytes != nbytes and self._layout.is_page(space.id, object_.name):
                detail = f"it is {object_.nbytes:,} bytes long instead of {nbytes:,}"
                yield PageFault(object_.name.rpartition("/")[2], "wrong_size", detail)

    def _key_spaces(self) -> Iterator[KeySpace]:
        for space_id, text in self._manifests(self._registered_ids()):
            space = decode_manifest(text, space_id=space_id)
            if space is not None:
                yield space

    def _unreadable_spaces(self) -> Iterator[UnreadableSpace]:
        """Yield key spaces whose manifest is lost or damaged.

        Manifests are read last, because a writer stores the manifest before it sets a page.
        """
        ids: set[str] = set()
        position: str | None = ""
        while position is not None:
            folders, position = self._bucket.list_folders(
                self._layout.prefix, position, self._deadline()
            )
            ids.update(filter(SPACE_ID.fullmatch, folders))
        for space_id, text in self._manifests(sorted({*ids, *self._registered_ids()})):
            unreadable = unreadable_space(space_id, text)
            if unreadable is not None and (text is not None or self._has_pages(space_id)):
                yield unreadable

    def _registered_ids(self) -> Iterator[str]:
        for object_ in self._list_all(self._layout.manifest_root):
            if (space_id := self._layout.space_id(object_.name)) is not None:
                yield space_id

    def _manifests(self, space_ids: Iterable[str]) -> Iterator[tuple[str, bytes | None]]:
        for batch in _batches(iter(space_ids), _MANIFEST_BATCH):
            calls = [self._pages.read(self._layout.manifest(space_id)) for space_id in batch]
            yield from zip(batch, map(_known, self._run(calls, self._deadline())), strict=True)


def _known(outcome: T | CallFailed) -> T:
    """Return the result of a call, or raise its failure, because a listing must be complete."""
    if isinstance(outcome, CallFailed):
        raise outcome.error
    return outcome


def _batches(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while batch := list(itertools.islice(items, size)):
        yield batch
