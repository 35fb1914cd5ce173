"""`encrypted` as a HiCacheStorage: it seals pages and names, which another backend stores."""

from __future__ import annotations

import logging
import os
import stat
import threading
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

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
    is_sealed,
    write_header,
    write_tag,
)
from hicache_backends.encrypted.other_keys import OtherKeys
from hicache_backends.encrypted.settings import EncryptedSettings
from hicache_storage.backend_support.answers import answers_of, unanswered_in
from hicache_storage.backend_support.copies import copy_revocable
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.page_buffers import PageBuffers
from hicache_storage.backend_support.revocable import RevokedError, is_revoked
from hicache_storage.backend_support.wrapper import WrapperStorage
from hicache_storage.errors import ConfigError, HiCacheError, StorageTimeout
from hicache_storage.page import Page
from hicache_storage.registry import resolve
from hicache_storage.settings import counted
from hicache_storage.storage import (
    Capabilities,
    Diagnosis,
    Durability,
    HiCacheStorage,
    PageFault,
    PageInfo,
    Retention,
    StorageStats,
    UnreadableKind,
    UnreadableSpace,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from hicache_backends.encrypted.layout import SealedSpace
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer
    from hicache_storage.storage import PageTimes

logger: logging.Logger = logging.getLogger(__name__)

_Verdict: TypeAlias = "bool | PageFault | None"
"""The result of opening a page.

True: it was opened. False: it is absent. A fault: it does not open. None: no answer of the backend, no
time, or a wrong size.
"""

_NOT_AUTHENTIC = "not_authentic"
_UNKNOWN_KEY = "unknown_key"

_MOST_SPACES = 1024
_BUFFERS_PER_CALL = 2
_MOST_REMEMBERED = 1 << 16
_LOOKED_AT_ONCE = 1024
_LOOKED_AT_ONCE_NBYTES = 32 << 20


class EncryptedStorage(WrapperStorage):
    """A storage around another backend, which receives nothing that it can read. Thread-safe.

    A page that does not open is a miss. If it was damaged, forged, or moved from another name or
    key space, a get deletes it, so that the next set stores it again. If only its key is not
    listed, the page stays, because a storage with that key can open it; this storage counts it as
    absent from then on, until a set replaces it.
    """

    # These are the widest claims. An instance has the capabilities of the backend that it wraps.
    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.POWER,
        shared=True,
        enumerable=True,
        bounded=True,
        revocable=True,
    )

    def __init__(
        self,
        inner: HiCacheStorage,
        settings: EncryptedSettings,
        keys: Mapping[str, bytes],
        *,
        read_only: bool = False,
    ) -> None:
        """Wrap `inner`, which this storage owns from now on. `keys` are those that `settings` names."""
        self._settings = settings
        self._header_nbytes = header_nbytes(inner.capabilities.alignment)
        self._wrap(inner)
        self._keys = {key_id: PageKey(derive(key, b"pages", 32)) for key_id, key in keys.items()}
        names = {key_id: Names(key, self._header_nbytes) for key_id, key in keys.items()}
        name_key = settings.name_key or settings.current_key
        self._names = names[name_key]
        self._other_keys = OtherKeys(names, name_key)
        self._sealed_space = lru_cache(_MOST_SPACES)(self._names.sealed_space)
        self._counters = Counters()
        self._read_only = read_only
        self._unknown: set[str] = set()
        """Names of pages whose keys are not listed. Gets add the names that they come across."""
        self._healing: tuple[int, Future[list[bool]]] | None = None
        """The process and the end of the last heal. While it runs, others are left out."""
        self._buffers = PageBuffers(
            inner, most_kept=_BUFFERS_PER_CALL * inner.capabilities.parallelism
        )

    def _wrap(self, inner: HiCacheStorage) -> None:
        """Pass calls on to `inner`, and claim what it claims."""
        super().__init__(inner)
        self.narrow(**_own_claims(inner.capabilities, self._header_nbytes))

    @property
    def _widest_capabilities(self) -> Capabilities:
        inner = self.inner.capabilities
        return replace(inner, revocable=inner.scatter_gather)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls._open(config, read_only=False)

    @classmethod
    def open_read_only(cls, config: Mapping[str, Any]) -> Self:
        return cls._open(config, read_only=True)

    @classmethod
    def _open(cls, config: Mapping[str, Any], *, read_only: bool) -> Self:
        settings = EncryptedSettings.parse("encrypted", config)
        try:
            keys = settings.read_keys()
        except ValueError as error:
            raise ConfigError(f"encrypted: {error}") from None
        inner_class, fields = _inner(settings)
        open_inner = inner_class.open_read_only if read_only else inner_class.from_config
        return cls(open_inner(fields), settings, keys, read_only=read_only)

    @classmethod
    def would_create(cls, config: Mapping[str, Any]) -> str | None:
        inner_class, fields = _inner(EncryptedSettings.parse("encrypted", config))
        return inner_class.would_create(fields)

    @classmethod
    def would_claim(cls, config: Mapping[str, Any]) -> Capabilities:
        inner_class, fields = _inner(EncryptedSettings.parse("encrypted", config))
        inner = inner_class.would_claim(fields)
        return replace(inner, **_own_claims(inner, header_nbytes(inner.alignment)))

    # --- pages -----------------------------------------------------------------------------------

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        sealed = self._sealed_space(space)
        names = sealed.names(hashes)
        found = self.inner.batch_exists(sealed.inner, names)
        for n, name in enumerate(names):
            if name in self._unknown:
                found[n] = False
        return found

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        """Read sealed pages and open them. Read damaged ones again from each part of the backend."""
        self.ensure_open()
        if not hashes:
            return []
        deadline = Deadline(self._settings.timeout_s)
        sealed = self._sealed_space(space)
        names = sealed.names(hashes)
        verdicts = self._read_pages(sealed, hashes, names, pages, deadline)
        for verdict in verdicts:
            if isinstance(verdict, PageFault):
                self._counters.add(verdict.reason)
                logger.warning("page %s does not open: %s", verdict.page_hash, verdict.detail)
        self._learn(names, verdicts)
        wrong = [n for n, verdict in enumerate(verdicts) if _is_damaged(verdict)]
        if wrong:
            found = self._heal(
                sealed, [hashes[n] for n in wrong], [pages[n] for n in wrong], deadline
            )
            for n, is_whole in zip(wrong, found, strict=True):
                verdicts[n] = is_whole
        return answers_of([None if verdict is None else verdict is True for verdict in verdicts])

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        """Seal pages, each with its own nonce, and store them."""
        self.ensure_open()
        if not hashes:
            return []
        deadline = Deadline(self._settings.timeout_s / 2)
        sealed = self._sealed_space(space)
        names = sealed.names(hashes)
        refused = self._remove_unknown(sealed, names)
        fitting = [
            n
            for n, (name, page) in enumerate(zip(names, pages, strict=True))
            if page.nbytes == space.stored_nbytes and name not in refused
        ]
        with self._buffers.lend(len(hashes), sealed.inner.stored_nbytes) as targets:
            places = self._seal_pages(
                sealed, [hashes[n] for n in fitting], [pages[n] for n in fitting], targets, deadline
            )
            done = [fitting[place] for place in places]
            answers = self.inner.batch_set(
                sealed.inner, [names[n] for n in done], [targets[place] for place in places]
            )
        verdicts = dict(zip(done, answers, strict=True))
        left = set(range(len(hashes))).difference(done)
        self._counters.add("refused_unsealed", sum(not is_revoked(pages[n]) for n in left))
        self._unknown.difference_update(names[n] for n, stored in verdicts.items() if stored)
        return [verdicts.get(n, False) for n in range(len(hashes))]

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        sealed = self._sealed_space(space)
        return self.inner.batch_delete(sealed.inner, sealed.names(hashes))

    # --- key spaces and listings -----------------------------------------------------------------

    def open_space(self, space: KeySpace) -> None:
        HiCacheStorage.open_space(self, space)  # checks the size
        self.inner.open_space(self._sealed_space(space).inner)

    def spaces(self) -> Iterator[KeySpace]:
        """Yield the key spaces whose names were sealed with this storage's name key."""
        self.ensure_open()
        return self._opened_spaces(self.inner.spaces())

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        sealed = self._sealed_space(space)
        return self._opened_names(sealed, self.inner.scan(sealed.inner))

    def faults(self, space: KeySpace, hashes: Sequence[str] | None = None) -> Iterator[PageFault]:
        """Yield pages that do not open, and pages that the backend reports as damaged.

        With `hashes`, read these pages. The backend counts each read as a use, unless it was opened
        read-only.

        Raises:
            StorageTimeout: A page could not be opened within `timeout_s`.
        """
        self.ensure_open()
        sealed = self._sealed_space(space)
        if hashes is None:
            return self._opened_faults(sealed, self.inner.faults(sealed.inner))
        return self._faults_among(sealed, hashes)

    def unreadable_spaces(self) -> Iterator[UnreadableSpace]:
        """Yield sealed key spaces whose names do not open, and those that the backend cannot name."""
        self.ensure_open()
        return self._unreadable(self._inner_spaces(), self.inner.unreadable_spaces())

    def remove_space(self, space_id: str) -> int:
        """Remove a key space. If its name does not open, pass the id of its sealed form."""
        self.ensure_open()
        for inner in self.inner.spaces():
            opened = self._names.opened_space(inner)
            if space_id == (opened or inner).id and is_sealed(inner):
                return self.inner.remove_space(inner.id)
        if any(space_id == one.space_id for one in self.inner.unreadable_spaces()):
            return self.inner.remove_space(space_id)
        return 0

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        self.ensure_open()
        sealed = self._sealed_space(space)
        return self.inner.page_times(sealed.inner, sealed.names(hashes))

    def clear(self, space: KeySpace) -> int:
        self.ensure_open()
        return self.inner.clear(self._sealed_space(space).inner)

    # --- the rest --------------------------------------------------------------------------------

    def register_buffer(self, buffer: HostBuffer) -> None:  # noqa: ARG002
        """Do nothing: the backend receives sealed copies, never the memory of pages."""
        self.ensure_open()

    def unregister_buffer(self, buffer: HostBuffer) -> None:  # noqa: ARG002
        """Do nothing, like `register_buffer`."""
        self.ensure_open()

    def diagnose(self) -> list[Diagnosis]:
        """Return the backend's diagnoses, the keys in use, and key spaces that no key in use opens."""
        settings = self._settings
        name_key = settings.name_key or settings.current_key
        fact = f"{counted(len(self._keys), 'key')}; {settings.current_key!r} seals new pages"
        keys = Diagnosis("keys", f"{fact}, and {name_key!r} seals names")
        return [
            *self.inner.diagnose(),
            keys,
            *self._other_keys.diagnoses(self._inner_spaces()),
            *self._readable_key_files(),
        ]

    def parts(self) -> Mapping[str, HiCacheStorage]:
        """Return the backend's parts, sealed with the same keys and with headers of one size."""
        return {name: self._part(inner) for name, inner in self.inner.parts().items()}

    def page_parts(self, space: KeySpace, hashes: Sequence[str]) -> list[Collection[str]]:
        self.ensure_open()
        sealed = self._sealed_space(space)
        return self.inner.page_parts(sealed.inner, sealed.names(hashes))

    def _part(self, inner: HiCacheStorage) -> EncryptedStorage:
        part = copy(self)  # it shares the keys, and the memory that this storage frees
        part._wrap(inner)  # noqa: SLF001 - of this class
        return part

    def stats(self) -> StorageStats:
        """Return the backend's figures plus counters. The bytes are bytes of sealed pages."""
        stats = self.inner.stats()
        return replace(stats, counters={**stats.counters, **self._counters.snapshot()})

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
        """Seal pages into their targets until the deadline. Return the positions of those sealed."""
        key_id = self._settings.current_key
        nonces = random_nonces(len(hashes))
        messages = self._keys[key_id].message_keys(nonces)
        done: list[int] = []
        for n, (page_hash, nonce, message) in enumerate(zip(hashes, nonces, messages, strict=True)):
            if deadline.passed():
                break
            header, body = self._split(targets[n].segments[0])
            write_header(header, key_id, nonce)
            about = authenticated(header, sealed.identity(page_hash))
            with suppress(RevokedError):
                write_tag(header, seal(message, about, pages[n], body))
                done.append(n)
        return done

    def _read_pages(
        self,
        sealed: SealedSpace,
        hashes: Sequence[str],
        names: Sequence[str],
        pages: Sequence[Page],
        deadline: Deadline,
        *,
        part: HiCacheStorage | None = None,
    ) -> list[_Verdict]:
        """Read sealed pages, all or those of one part, and open them, until the deadline."""
        verdicts: list[_Verdict] = [False] * len(hashes)
        with self._buffers.lend(len(hashes), sealed.inner.stored_nbytes) as sources:
            found = (self.inner if part is None else part).batch_get(sealed.inner, names, sources)
            wanted = [n for n, hit in enumerate(found) if hit]
            opened = self._open_pages(
                sealed,
                [hashes[n] for n in wanted],
                [sources[n].segments[0] for n in wanted],
                [pages[n] for n in wanted],
                deadline,
            )
        self._counters.add("unopened", opened.count(None))
        for n, verdict in zip(wanted, opened, strict=True):
            verdicts[n] = verdict
        for n in unanswered_in(found):
            verdicts[n] = None
        return verdicts

    def _open_pages(
        self,
        sealed: SealedSpace,
        hashes: Sequence[str],
        sources: Sequence[memoryview],
        pages: Sequence[Page],
        deadline: Deadline,
    ) -> list[_Verdict]:
        headers = [Header.read(source[: self._header_nbytes]) for source in sources]
        messages = self._message_keys(headers)
        verdicts: list[_Verdict] = []
        for page_hash, source, page, header, message in zip(
            hashes, sources, pages, headers, messages, strict=True
        ):
            page.digest = None
            head, body = self._split(source)
            if page.nbytes != body.nbytes or deadline.passed():
                verdicts.append(None)
                continue
            why = "it is not a page that was sealed under this name"
            verdict: _Verdict = PageFault(page_hash, _NOT_AUTHENTIC, why)
            if header is not None and message is None:
                why = f"its key {header.key_id!r} is not listed"
                verdict = PageFault(page_hash, _UNKNOWN_KEY, why)
            elif header is not None and message is not None:
                about = authenticated(head, sealed.identity(page_hash))
                try:
                    if unseal(message, about, header.tag, body, page):
                        verdict = True
                except RevokedError:
                    verdict = False
            verdicts.append(verdict)
        return verdicts

    def _message_keys(self, headers: Sequence[Header | None]) -> list[MessageKey | None]:
        """Return the key of each page, or None if its key is not listed. Use each listed key once."""
        messages: list[MessageKey | None] = [None] * len(headers)
        for key_id, key in self._keys.items():
            own = [n for n, header in enumerate(headers) if header and header.key_id == key_id]
            nonces = [header.nonce for n in own if (header := headers[n])]
            for n, message in zip(own, key.message_keys(nonces), strict=True):
                messages[n] = message
        return messages

    def _split(self, memory: memoryview) -> tuple[memoryview, memoryview]:
        """Split a sealed page into header and body."""
        return memory[: self._header_nbytes], memory[self._header_nbytes :]

    def _learn(self, names: Sequence[str], verdicts: Sequence[_Verdict]) -> None:
        """Remember pages whose keys are not listed."""
        if self._read_only:
            return
        for name, verdict in zip(names, verdicts, strict=True):
            if verdict is True:
                self._unknown.discard(name)
            elif isinstance(verdict, PageFault) and verdict.reason == _UNKNOWN_KEY:
                if len(self._unknown) >= _MOST_REMEMBERED:
                    self._unknown.clear()
                self._unknown.add(name)

    def _heal(
        self,
        sealed: SealedSpace,
        hashes: Sequence[str],
        pages: Sequence[Page],
        deadline: Deadline,
    ) -> list[bool]:
        """Read damaged pages again, on a thread, because a part may hang. Return which are whole now.

        A thread that hangs keeps its own copies. Until it ends, damaged pages are misses and stay.
        """
        if self._healing and self._healing[0] == os.getpid() and not self._healing[1].done():
            return [False] * len(hashes)
        copies = [Page(bytearray(page.nbytes)) for page in pages]
        healed: Future[list[bool]] = Future()

        def reread() -> None:
            try:
                healed.set_result(self._reread(sealed, hashes, copies, deadline))
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller
                healed.set_exception(error)

        try:
            threading.Thread(target=reread, name="hicache-heal", daemon=True).start()
        except RuntimeError:  # no more threads can be started
            return [False] * len(hashes)
        self._healing = os.getpid(), healed
        try:
            whole = healed.result(deadline.remaining_s())
        except TimeoutError:
            return [False] * len(hashes)
        given = [n for n, is_whole in enumerate(whole) if is_whole]
        taken = copy_revocable([pages[n] for n in given], [copies[n] for n in given])
        for n, is_taken in zip(given, taken, strict=True):
            whole[n] = is_taken
        return whole

    def _reread(
        self,
        sealed: SealedSpace,
        hashes: Sequence[str],
        pages: Sequence[Page],
        deadline: Deadline,
    ) -> list[bool]:
        """Read damaged pages again from each part of the backend. Return which of them a part has whole.

        Delete only the copies that do not open: one host's damaged copy says nothing about a shared one.
        A call to the backend takes half of the time limit, so none begins later than that.
        """
        whole = [False] * len(hashes)
        names, half_s = sealed.names(hashes), self._settings.timeout_s / 2
        for part in _undivided(self.inner):
            left = [n for n, is_whole in enumerate(whole) if not is_whole]
            if not left or deadline.remaining_s() < half_s:
                break
            own, some = [names[n] for n in left], [hashes[n] for n in left]
            try:
                targets = [pages[n] for n in left]
                verdicts = self._read_pages(sealed, some, own, targets, deadline, part=part)
                wrong = [own[n] for n, verdict in enumerate(verdicts) if _is_damaged(verdict)]
                if wrong and not self._read_only and deadline.remaining_s() >= half_s:
                    part.batch_delete(sealed.inner, wrong)
            except HiCacheError as error:  # what this part has is not known, so it stays
                logger.warning(
                    "pages that do not open (%d) could not be healed: %s", len(own), error
                )
                continue
            for n, verdict in zip(left, verdicts, strict=True):
                whole[n] = verdict is True
        return whole

    def _remove_unknown(self, sealed: SealedSpace, names: Sequence[str]) -> frozenset[str]:
        """Delete pages that were sealed with unlisted keys, if a set would not overwrite them.

        Return the names of the pages that could not be deleted.
        """
        unknown = [name for name in names if name in self._unknown]
        if not unknown or self.capabilities.overwrites:
            return frozenset()
        gone = self.inner.batch_delete(sealed.inner, unknown)
        left = frozenset(name for name, done in zip(unknown, gone, strict=True) if not done)
        self._unknown.difference_update(set(unknown) - left)
        return left

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

    def _faults_among(self, sealed: SealedSpace, hashes: Sequence[str]) -> Iterator[PageFault]:
        most = min(
            self.capabilities.max_batch or _LOOKED_AT_ONCE,
            max(1, _LOOKED_AT_ONCE_NBYTES // sealed.inner.stored_nbytes),
        )
        room = Page(bytearray(sealed.space.stored_nbytes))
        for start in range(0, len(hashes), most):
            part = hashes[start : start + most]
            below = self.inner.faults(sealed.inner, sealed.names(part))
            damaged = {fault.page_hash: fault for fault in self._opened_faults(sealed, below)}
            yield from damaged.values()
            rest = [page_hash for page_hash in part if page_hash not in damaged]
            deadline = Deadline(self._settings.timeout_s)
            rooms = [room] * len(rest)
            names = sealed.names(rest)
            for verdict in self._read_pages(sealed, rest, names, rooms, deadline):
                if verdict is None:
                    raise StorageTimeout(
                        "encrypted: pages could not be read and opened within"
                        f" {self._settings.timeout_s:g} s"
                    )
                if isinstance(verdict, PageFault):
                    yield verdict

    def _opened_faults(
        self, sealed: SealedSpace, found: Iterator[PageFault]
    ) -> Iterator[PageFault]:
        """Yield the backend's faults under the pages' own hashes. Skip objects that are not ours."""
        for fault in found:
            page_hash = sealed.page_hash(fault.page_hash)
            if page_hash is not None:
                yield PageFault(page_hash, fault.reason, fault.detail)

    def _inner_spaces(self) -> Iterator[KeySpace]:
        return self.inner.spaces() if self.capabilities.enumerable else iter(())

    def _unreadable(
        self, spaces: Iterator[KeySpace], below: Iterator[UnreadableSpace]
    ) -> Iterator[UnreadableSpace]:
        for inner in self._other_keys.sealed(spaces):
            reason = self._other_keys.reason(inner, self._key_of_a_page(inner))
            yield UnreadableSpace(inner.id, UnreadableKind.OTHER_KEY, reason)
        yield from below

    def _key_of_a_page(self, inner: KeySpace) -> str | None:
        """Return the id of the key that sealed one of the pages, or None if it cannot be read.

        Read a page only if this storage is read-only.
        """
        if not self._read_only:
            return None
        for info in islice(self.inner.scan(inner), 1):
            with self._buffers.lend(1, inner.stored_nbytes) as sources:
                if self.inner.batch_get(inner, [info.page_hash], sources) == [True]:
                    header = Header.read(sources[0].segments[0][: self._header_nbytes])
                    return None if header is None else header.key_id
        return None

    def _readable_key_files(self) -> Iterator[Diagnosis]:
        for key_id, source in self._settings.keys.items():
            if source.file is None:
                continue
            try:
                mode = Path(source.file).stat().st_mode
            except OSError:
                continue
            if mode & (stat.S_IROTH | stat.S_IWOTH):
                fact = f"every user of this machine may read the file of key {key_id!r}"
                yield Diagnosis("key file", fact, "let only its owner read it: chmod 400")


def _is_damaged(verdict: _Verdict) -> bool:
    return isinstance(verdict, PageFault) and verdict.reason == _NOT_AUTHENTIC


def _undivided(storage: HiCacheStorage) -> list[HiCacheStorage]:
    """Return the stores that hold the pages, in the order in which they are asked."""
    parts = storage.parts().values()
    return [store for part in parts for store in _undivided(part)] or [storage]


def _own_claims(inner: Capabilities, header_nbytes: int) -> dict[str, Any]:
    """Return the claims that differ from those of the wrapped backend."""
    # only this storage accesses the pages themselves, and what is stored is not the page that was given
    claims: dict[str, Any] = {"revocable": inner.scatter_gather, "keeps_given": False}
    most = inner.max_page_nbytes
    if most is not None:
        claims["max_page_nbytes"] = max(1, most - header_nbytes)
    most = inner.max_batch_nbytes
    if most is not None:  # half of it for the pages, and half for their headers
        headers = max(1, most // 2 // header_nbytes)
        claims["max_batch"] = min(headers, inner.max_batch or headers)
        claims["max_batch_nbytes"] = max(1, most // 2)
    return claims


def _inner(settings: EncryptedSettings) -> tuple[type[HiCacheStorage], dict[str, Any]]:
    """Return the class and the fields of the wrapped backend. Its calls get half of the time limit.

    Raises:
        UnknownBackend, BackendNotInstalled, ConfigError: As in `registry.resolve`.
    """
    inner_class, fields = resolve(settings.backend, settings.config)
    if "timeout_s" in fields:
        raise ConfigError(
            "encrypted: config: timeout_s: set it next to config, not in it: the backend below"
            " gets half of it"
        )
    return inner_class, {**fields, "timeout_s": settings.timeout_s / 2}
