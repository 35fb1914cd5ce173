"""`s3`: one object a page, in AWS's S3 or any store that speaks its protocol.

boto3 knows where the bucket is and who may use it (`_access`), and lists and deletes (`_bucket`). Pages
travel on connections of this backend's own (`_exchange`), straight from and into their segments; what an
answer means for a page is in `_page_calls`.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any, Self, TypeVar

from hicache_backends.s3.access import Access
from hicache_backends.s3.addresses import Addresses, is_loopback
from hicache_backends.s3.bucket import Bucket
from hicache_backends.s3.client import Client
from hicache_backends.s3.connections import Connections
from hicache_backends.s3.exchange import Failed
from hicache_backends.s3.layout import Names
from hicache_backends.s3.page_calls import PageCalls
from hicache_backends.s3.settings import S3Settings
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.keys import KeySpace
from hicache_storage.storage import (
    Capabilities,
    Durability,
    HiCacheStorage,
    PageInfo,
    Retention,
    StorageStats,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hicache_backends.s3.bucket import Listed
    from hicache_backends.s3.exchange import Call
    from hicache_storage.page import Page

__all__ = ["S3Settings", "S3Storage"]

T = TypeVar("T")

_LARGEST_PUT_NBYTES = 5 << 30
# Without batches in the protocol, a large one is quickest when the page store cuts it for its threads.
_MAX_BATCH = 64
_MANIFESTS_AT_ONCE = 256


class S3Storage(HiCacheStorage):
    """Pages as objects. Shared by everything that reaches the bucket; survives all of it."""

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
        self._names = Names(settings.prefix)
        access = Access(settings)  # botocore reads megabytes of its own data, and asks nobody
        deadline = self._deadline()
        self._client = _opened_client(settings, access, self._counters)
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
        name = self._names.manifest(space.id)
        text = json.dumps(space.manifest()).encode()
        if self._one(self._pages.read(name), deadline) != text:
            self._one(self._pages.write(name, text), deadline)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        nbytes = space.stored_nbytes
        calls = [self._pages.exists(name, nbytes) for name in self._of(space, hashes)]
        return self._judged(self._run(calls, self._deadline()))

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        names = self._of(space, hashes)
        calls = [self._pages.get(name, page) for name, page in zip(names, pages, strict=True)]
        return self._judged(self._run(calls, self._deadline()))

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        once = dict(zip(self._of(space, hashes), pages, strict=True))
        calls = [self._pages.set(name, page) for name, page in once.items()]
        verdicts = dict(zip(once, self._judged(self._run(calls, self._deadline())), strict=True))
        return [verdicts[name] for name in self._of(space, hashes)]

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        names = self._of(space, hashes)
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
            for object_ in self._listed(self._names.pages(space.id))
            if object_.nbytes == space.stored_nbytes and self._names.is_page(space.id, object_.name)
        )

    def clear(self, space: KeySpace) -> int:
        self.ensure_open()
        removed = 0
        kept: dict[str, str] = {}
        position: str | None = ""
        while position is not None:
            deadline = self._deadline()  # as for `scan`, which takes as many steps
            try:
                found, position = self._bucket.listed(
                    self._names.pages(space.id), position, deadline
                )
                pages = [one for one in found if self._names.is_page(space.id, one.name)]
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

    def stats(self) -> StorageStats:
        self.ensure_open()
        return StorageStats(counters=self._counters.snapshot())

    def close(self) -> None:
        super().close()
        self._client.close()

    # --- parts ---------------------------------------------------------------------------------------

    def _of(self, space: KeySpace, hashes: Sequence[str]) -> list[str]:
        """The names of pages."""
        return [self._names.page(space.id, page_hash) for page_hash in hashes]

    def _deadline(self) -> Deadline:
        """The deadline of a call that begins now."""
        return Deadline(self._settings.timeout_s)

    def _run(self, calls: Sequence[Call[T]], deadline: Deadline) -> list[T | Failed]:
        self.ensure_open()
        return self._client.run(calls, deadline)

    def _one(self, call: Call[T], deadline: Deadline) -> T:
        (outcome,) = self._run([call], deadline)
        if isinstance(outcome, Failed):
            raise outcome.error
        return outcome

    def _judged(self, outcomes: Sequence[bool | Failed]) -> list[bool]:
        """Verdicts, if they can be given: the store answered, and no write is in doubt."""
        failures = [one for one in outcomes if isinstance(one, Failed)]
        self._counters.add("failed", len(failures))
        doubtful = [one for one in failures if one.in_doubt]
        if doubtful or (failures and len(failures) == len(outcomes)):
            raise (doubtful or failures)[0].error
        return [one is True for one in outcomes]

    def _listed(self, prefix: str) -> Iterator[Listed]:
        """Every object whose name begins with `prefix`; each page of the listing is a call."""
        position: str | None = ""
        while position is not None:
            self.ensure_open()
            found, position = self._bucket.listed(prefix, position, self._deadline())
            yield from found

    def _key_spaces(self) -> Iterator[KeySpace]:
        listed = (object_.name for object_ in self._listed(self._names.manifests))
        names = (name for name in listed if self._names.is_manifest(name))
        for batch in _batches(names, _MANIFESTS_AT_ONCE):
            texts = self._run([self._pages.read(name) for name in batch], self._deadline())
            for name, text in zip(batch, texts, strict=True):
                if isinstance(text, Failed):
                    raise text.error
                space = _space_of(text)
                if space is not None and self._names.manifest(space.id) == name:
                    yield space


def _opened_client(settings: S3Settings, access: Access, counters: Counters) -> Client:
    target = access.target
    tls = access.tls_context() if target.is_tls else None

    def connections() -> Connections:
        most_idle = 2 * settings.parallelism * settings.fan_out
        addresses = Addresses(target.host, target.port)
        return Connections(target.host, addresses, tls, most_idle=most_idle)

    is_safe = target.is_tls or is_loopback(target.host)
    signs = settings.sign_payload
    return Client(
        settings,
        target,
        ForkLocal(access.keyring, close=lambda _: None),
        ForkLocal(connections, close=Connections.close, abandon=Connections.abandon),
        counters,
        signs_payload=not is_safe if signs is None else signs,
    )


def _space_of(text: bytes | None) -> KeySpace | None:
    """The key space that a manifest describes; None where it describes none."""
    try:
        return KeySpace.from_manifest(json.loads(text or b""))
    except (ValueError, RecursionError):
        return None


def _batches(items: Iterator[T], size: int) -> Iterator[list[T]]:
    while batch := list(itertools.islice(items, size)):
        yield batch
