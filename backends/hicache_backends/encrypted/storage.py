"""`encrypted` as a HiCacheStorage: a wrapper that seals pages and names, and opens them again."""

from __future__ import annotations

import logging
import stat
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hicache_backends.encrypted.buffers import SealedBuffers
from hicache_backends.encrypted.cipher import (
    MessageKey,
    PageKey,
    derive,
    random_nonces,
    seal,
    unseal,
)
from hicache_backends.encrypted.layout import (
    Header,
    Names,
    authenticated,
    header_nbytes,
    write_header,
    write_tag,
)
from hicache_backends.encrypted.settings import EncryptedSettings
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.wrapper import WrapperStorage
from hicache_storage.errors import ConfigError, HiCacheError
from hicache_storage.registry import resolve
from hicache_storage.storage import (
    Capabilities,
    Diagnosis,
    Durability,
    HiCacheStorage,
    PageInfo,
    Retention,
    StorageStats,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hicache_backends.encrypted.layout import SealedSpace
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer, Page
    from hicache_storage.storage import PageTimes

logger: logging.Logger = logging.getLogger(__name__)

_MOST_SPACES = 1024
_BUFFERS_PER_CALL = 2


class EncryptedStorage(WrapperStorage):
    """A storage around the storage of another backend, which gets nothing that it can read. Thread-safe.

    A page that does not open is a miss: it was damaged, moved from another name or key space, forged,
    or sealed with a key that is not listed. A get deletes it, so that the next set stores it again.
    """

    # The widest claims. An instance has those of the backend that it wraps.
    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.POWER,
        shared=True,
        enumerable=True,
        bounded=True,
    )

    def __init__(
        self, inner: HiCacheStorage, settings: EncryptedSettings, keys: Mapping[str, bytes]
    ) -> None:
        """Wrap `inner`, which this storage owns from now on. `keys` are those that `settings` names."""
        super().__init__(inner)
        self.narrow(revocable=False)  # pages are encrypted and decrypted in place
        self._settings = settings
        self._header_nbytes = header_nbytes(inner.capabilities.alignment)
        most = inner.capabilities.max_page_nbytes
        if most is not None:
            self.narrow(max_page_nbytes=max(1, most - self._header_nbytes))
        self._keys = {key_id: PageKey(derive(key, b"pages", 32)) for key_id, key in keys.items()}
        self._names = Names(keys[settings.name_key or settings.current_key], self._header_nbytes)
        self._sealed_space = lru_cache(_MOST_SPACES)(self._names.sealed_space)
        self._counters = Counters()
        self._buffers = SealedBuffers(
            inner, most_kept=_BUFFERS_PER_CALL * inner.capabilities.parallelism
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        settings = EncryptedSettings.parse("encrypted", config)
        try:
            keys = settings.read_keys()
        except ValueError as error:
            raise ConfigError(f"encrypted: {error}") from None
        inner_class, fields = _inner(settings)
        return cls(inner_class.from_config(fields), settings, keys)

    @classmethod
    def would_create(cls, config: Mapping[str, Any]) -> str | None:
        inner_class, fields = _inner(EncryptedSettings.parse("encrypted", config))
        return inner_class.would_create(fields)

    # --- pages -----------------------------------------------------------------------------------

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        sealed = self._sealed_space(space)
        return self.inner.batch_exists(sealed.inner, sealed.names(hashes))

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        """Read sealed pages and open them. A page that does not open is deleted if there is time."""
        self.ensure_open()
        if not hashes:
            return []
        deadline = Deadline(self._settings.timeout_s)
        sealed = self._sealed_space(space)
        names = sealed.names(hashes)
        with self._buffers.lend(len(hashes), sealed.inner.stored_nbytes) as sources:
            found = self.inner.batch_get(sealed.inner, names, sources)
            wanted = [n for n, hit in enumerate(found) if hit]
            opened = self._open_pages(
                sealed,
                [hashes[n] for n in wanted],
                [sources[n].segments[0] for n in wanted],
                [pages[n] for n in wanted],
                deadline,
            )
        verdicts = dict(zip(wanted, opened, strict=True))
        wrong = [names[n] for n, verdict in verdicts.items() if verdict is False]
        if wrong and deadline.remaining_s() >= self._settings.timeout_s / 2:
            self._delete_wrong(sealed.inner, wrong)
        return [verdicts.get(n) is True for n in range(len(hashes))]

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        """Seal pages, each with a nonce of its own, and store them."""
        self.ensure_open()
        if not hashes:
            return []
        deadline = Deadline(self._settings.timeout_s / 2)
        sealed = self._sealed_space(space)
        with self._buffers.lend(len(hashes), sealed.inner.stored_nbytes) as targets:
            done = self._seal_pages(sealed, hashes, pages, targets, deadline)
            answers = self.inner.batch_set(
                sealed.inner, sealed.names([hashes[n] for n in done]), [targets[n] for n in done]
            )
        verdicts = dict(zip(done, answers, strict=True))
        self._counters.add("refused_unsealed", len(hashes) - len(done))
        return [verdicts.get(n, False) for n in range(len(hashes))]

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        sealed = self._sealed_space(space)
        return self.inner.batch_delete(sealed.inner, sealed.names(hashes))

    # --- key spaces and listings -----------------------------------------------------------------

    def open_space(self, space: KeySpace) -> None:
        HiCacheStorage.open_space(self, space)  # it checks the size
        self.inner.open_space(self._sealed_space(space).inner)

    def spaces(self) -> Iterator[KeySpace]:
        """Yield the key spaces whose names this storage's key has sealed."""
        self.ensure_open()
        return self._opened_spaces(self.inner.spaces())

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        sealed = self._sealed_space(space)
        return self._opened_names(sealed, self.inner.scan(sealed.inner))

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        self.ensure_open()
        sealed = self._sealed_space(space)
        return self.inner.page_times(sealed.inner, sealed.names(hashes))

    def clear(self, space: KeySpace) -> int:
        self.ensure_open()
        return self.inner.clear(self._sealed_space(space).inner)

    # --- the rest --------------------------------------------------------------------------------

    def register_buffer(self, buffer: HostBuffer) -> None:  # noqa: ARG002
        """Do nothing: the backend gets sealed copies only, and never the memory of pages."""
        self.ensure_open()

    def unregister_buffer(self, buffer: HostBuffer) -> None:  # noqa: ARG002
        """Do nothing, as `register_buffer`."""
        self.ensure_open()

    def diagnose(self) -> list[Diagnosis]:
        """Return what the backend says, and which keys are in use."""
        settings = self._settings
        fact = f"{len(self._keys)} listed; {settings.current_key!r} seals new pages"
        keys = Diagnosis("keys", f"{fact}, {settings.name_key or settings.current_key!r} names")
        return [*self.inner.diagnose(), keys, *self._readable_key_files()]

    def stats(self) -> StorageStats:
        """Return the backend's figures: its bytes are those of sealed pages. Counters are added."""
        stats = self.inner.stats()
        return StorageStats(
            pages=stats.pages,
            nbytes=stats.nbytes,
            capacity_nbytes=stats.capacity_nbytes,
            counters={**stats.counters, **self._counters.snapshot()},
        )

    def close(self) -> None:
        if not self._closed and not self.is_forked_copy:
            self._buffers.close()
        super().close()

    # --- parts -----------------------------------------------------------------------------------

    def _seal_pages(
        self,
        sealed: SealedSpace,
        hashes: Sequence[str],
        pages: Sequence[Page],
        targets: Sequence[Page],
        deadline: Deadline,
    ) -> list[int]:
        """Seal pages until the deadline. Return the places of the sealed ones: others have no room."""
        key_id = self._settings.current_key
        fitting = [n for n, page in enumerate(pages) if page.nbytes == sealed.space.stored_nbytes]
        nonces = random_nonces(len(fitting))
        messages = self._keys[key_id].message_keys(nonces)
        for count, (n, nonce, message) in enumerate(zip(fitting, nonces, messages, strict=True)):
            if deadline.passed():
                return fitting[:count]
            header, body = self._split(targets[n].segments[0])
            write_header(header, key_id, nonce)
            about = authenticated(header, sealed.identity(hashes[n]))
            write_tag(header, seal(message, about, pages[n].segments, body))
        return fitting

    def _open_pages(
        self,
        sealed: SealedSpace,
        hashes: Sequence[str],
        sources: Sequence[memoryview],
        pages: Sequence[Page],
        deadline: Deadline,
    ) -> list[bool | None]:
        """Open sealed pages until the deadline. None: there was no time, or no room, for a page."""
        headers = [Header.read(source[: self._header_nbytes]) for source in sources]
        messages = self._message_keys(headers)
        verdicts: list[bool | None] = []
        for page_hash, source, page, header, message in zip(
            hashes, sources, pages, headers, messages, strict=True
        ):
            page.digest = None
            head, body = self._split(source)
            if page.nbytes != body.nbytes or deadline.passed():
                verdicts.append(None)
                continue
            verdict = False
            if header is not None and message is not None:
                about = authenticated(head, sealed.identity(page_hash))
                verdict = unseal(message, about, header.tag, body, page.segments)
            if not verdict:
                self._count_wrong(page_hash, header, is_known=message is not None)
            verdicts.append(verdict)
        self._counters.add("unopened", verdicts.count(None))
        return verdicts

    def _message_keys(self, headers: Sequence[Header | None]) -> list[MessageKey | None]:
        """Return the key of each page, or None where there is none. Each listed key works once."""
        messages: list[MessageKey | None] = [None] * len(headers)
        for key_id, key in self._keys.items():
            own = [n for n, header in enumerate(headers) if header and header.key_id == key_id]
            nonces = [header.nonce for n in own if (header := headers[n])]
            for n, message in zip(own, key.message_keys(nonces), strict=True):
                messages[n] = message
        return messages

    def _split(self, memory: memoryview) -> tuple[memoryview, memoryview]:
        """Return header and body of a sealed page."""
        return memory[: self._header_nbytes], memory[self._header_nbytes :]

    def _count_wrong(self, page_hash: str, header: Header | None, *, is_known: bool) -> None:
        if header is None or is_known:
            self._counters.add("not_authentic")
            why = "it is no page that was sealed under this name"
        else:
            self._counters.add("unknown_key")
            why = f"its key {header.key_id!r} is not listed"
        logger.warning("page %s does not open: %s", page_hash, why)

    def _delete_wrong(self, inner_space: KeySpace, names: Sequence[str]) -> None:
        """Delete pages that do not open. A store that refuses keeps them, as misses."""
        try:
            self.inner.batch_delete(inner_space, names)
        except HiCacheError as error:
            logger.warning("%d pages that do not open could not be deleted: %s", len(names), error)

    def _opened_spaces(self, inner_spaces: Iterator[KeySpace]) -> Iterator[KeySpace]:
        for inner in inner_spaces:
            space = self._names.opened_space(inner)
            if space is not None:
                yield space

    def _opened_names(self, sealed: SealedSpace, listed: Iterator[PageInfo]) -> Iterator[PageInfo]:
        for info in listed:
            page_hash = sealed.page_hash(info.page_hash)
            if page_hash is not None:
                yield PageInfo(page_hash, max(0, info.nbytes - self._header_nbytes))

    def _readable_key_files(self) -> Iterator[Diagnosis]:
        for key_id, source in self._settings.keys.items():
            if source.file is None:
                continue
            try:
                mode = Path(source.file).stat().st_mode
            except OSError:
                continue
            if mode & (stat.S_IROTH | stat.S_IWOTH):
                fact = f"every user of this machine may open that of key {key_id!r}"
                yield Diagnosis("key file", fact, "let its owner read it only: chmod 400")


def _inner(settings: EncryptedSettings) -> tuple[type[HiCacheStorage], dict[str, Any]]:
    """Return the class and the fields of the wrapped backend, whose calls end in half of the time.

    Raises:
        UnknownBackend, BackendNotInstalled, ConfigError: As `registry.resolve`.
    """
    inner_class, fields = resolve(settings.backend, settings.config)
    if "timeout_s" in fields:
        raise ConfigError(
            "encrypted: config: timeout_s: give it beside config: the backend gets half of it"
        )
    return inner_class, {**fields, "timeout_s": settings.timeout_s / 2}
