"""The storage: one object a page.

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
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.manifest import decode_manifest, encode_manifest
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.storage import (
    Capabilities,
    Diagnosis,
    Durability,
    HiCacheStorage,
    PageInfo,
    PageTimes,
    Retention,
    StorageStats,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hicache_backends.s3.bucket import ListedObject
    from hicache_backends.s3.exchange import Call
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

T = TypeVar("T")

_LARGEST_PUT_NBYTES = 5 << 30
# The protocol has no batches, so a large one is fastest when the page store splits it among its threads.
_MAX_BATCH = 64
_MANIFEST_BATCH = 256


class S3Storage(HiCacheStorage):
    """Pages as objects.

    Every process that reaches the bucket shares them, and no process's end affects them.
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
    )
    usable_after_fork = True

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._counters = Counters()
        self._layout = Layout(settings.prefix)
        access = Access(settings)  # no request: botocore reads megabytes of its own data
        deadline = self._deadline()
        self._client = open_client(settings, access, self._counters)
        self._pages = PageCalls(self._client, settings)
        self._bucket = Bucket(access.client, self._client, settings)
        self.narrow(parallelism=settings.parallelism)
        try:
            self._bucket.check(deadline)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(S3Settings.parse("s3", config))

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        deadline = self._deadline()
        name = self._layout.manifest(space.id)
        stored = self._run_one(self._pages.read(name), deadline)
        if decode_manifest(stored, space_id=space.id) is None:
            self._run_one(self._pages.write(name, encode_manifest(space)), deadline)

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
        results = dict(zip(unique, self._results(self._run(calls, self._deadline())), strict=True))
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

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        """Return the times at which the objects were written. The protocol has none of their use."""
        names = self._page_names(space, hashes)
        outcomes = self._run([self._pages.written_at_s(name) for name in names], self._deadline())
        return [
            PageTimes(written_at_s=None if isinstance(one, CallFailed) else one) for one in outcomes
        ]

    def clear(self, space: KeySpace) -> int:
        self.ensure_open()
        removed = 0
        kept: dict[str, str] = {}
        position: str | None = ""
        while position is not None:
            deadline = self._deadline()  # one deadline a step, as in `scan`
            try:
                found, position = self._bucket.list_page(
                    self._layout.root(space.id), position, deadline
                )
                pages = [one for one in found if self._layout.is_page(space.id, one.name)]
                kept |= self._bucket.delete([one.name for one in pages], deadline)
            except (StorageTimeout, StorageUnavailable) as error:
                raise type(error)(f"{error}; {removed} pages were cleared: call it again") from None
            removed += sum(
                one.nbytes == space.stored_nbytes and one.name not in kept for one in pages
            )
        if kept:
            reasons = ", ".join(sorted(set(kept.values())))
            raise StorageUnavailable(
                f"s3: {len(kept)} pages were not deleted ({reasons}); {removed} were"
            )
        return removed

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

    def _page_names(self, space: KeySpace, hashes: Sequence[str]) -> list[str]:
        return self._layout.pages(space.id, hashes)

    def _deadline(self) -> Deadline:
        """Return the deadline of a call that begins now."""
        return Deadline(self._settings.timeout_s)

    def _run(self, calls: Sequence[Call[T]], deadline: Deadline) -> list[T | CallFailed]:
        self.ensure_open()
        return self._client.run(calls, deadline)

    def _run_one(self, call: Call[T], deadline: Deadline) -> T:
        (outcome,) = self._run([call], deadline)
        if isinstance(outcome, CallFailed):
            raise outcome.error
        return outcome

    def _results(self, outcomes: Sequence[bool | CallFailed]) -> list[bool]:
        """Return the results, unless no page has one or a write is in doubt."""
        failures = [one for one in outcomes if isinstance(one, CallFailed)]
        self._counters.add("failed", len(failures))
        in_doubt = [one for one in failures if one.in_doubt]
        if in_doubt or (failures and len(failures) == len(outcomes)):
            raise (in_doubt or failures)[0].error
        return [one is True for one in outcomes]

    def _list_all(self, prefix: str) -> Iterator[ListedObject]:
        """Yield every object whose name begins with `prefix`.

        Each page of the listing has its own deadline.
        """
        position: str | None = ""
        while position is not None:
            self.ensure_open()
            found, position = self._bucket.list_page(prefix, position, self._deadline())
            yield from found

    def _key_spaces(self) -> Iterator[KeySpace]:
        listed = (object_.name for object_ in self._list_all(self._layout.manifest_root))
        names = (name for name in listed if self._layout.space_id(name) is not None)
        for batch in _batches(names, _MANIFEST_BATCH):
            texts = self._run([self._pages.read(name) for name in batch], self._deadline())
            for name, text in zip(batch, texts, strict=True):
                if isinstance(text, CallFailed):
                    raise text.error
                space = decode_manifest(text, space_id=self._layout.space_id(name))
                if space is not None:
                    yield space


def _batches(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while batch := list(itertools.islice(items, size)):
        yield batch
