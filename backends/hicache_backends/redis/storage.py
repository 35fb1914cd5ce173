"""`redis` as a HiCacheStorage: one string per page in Redis or Valkey.

The server is a single one, a cluster, or a master behind sentinels.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from redis import exceptions

from hicache_backends.redis.diagnosis import diagnoses
from hicache_backends.redis.replies import FAILURES, TIMEOUTS
from hicache_backends.redis.session import Session
from hicache_backends.redis.settings import RedisSettings
from hicache_storage.backend_support.counters import Counters
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.backend_support.manifest import SPACE_ID
from hicache_storage.errors import ConfigError, StorageTimeout, StorageUnavailable
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
    UnreadableSpace,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from hicache_backends.redis.server_pool import ServerFacts
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

_SHORT = 4
"""A secret of fewer letters is hidden where it is a word, and not inside of other words."""
_MAX_PAGE_NBYTES = 512 << 20
"""The limit of a string with the default proto-max-bulk-len."""


class RedisStorage(HiCacheStorage):
    """A storage of pages as strings on a server, shared by all processes that reach the server."""

    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,
        durability=Durability.CRASH,
        shared=True,
        enumerable=True,
        overwrites=False,
        revocable=True,
        parallelism=4,
        max_page_nbytes=_MAX_PAGE_NBYTES,
        bounded=True,
    )
    usable_after_fork = True

    def __init__(self, settings: RedisSettings, *, is_read_only: bool = False) -> None:
        self._settings = settings
        self._is_read_only = is_read_only
        self._is_cluster = settings.cluster
        try:  # a forked child does not read the files again
            self._servers = replace(settings.access(), is_read_only=is_read_only)
            self._sentinels = settings.sentinel_access(self._servers.context)
        except ValueError as error:
            raise ConfigError(f"redis: {error}") from None
        self._secrets = settings.secrets(self._servers.options.get("password"))
        self._sessions = ForkLocal(self._new_session, close=Session.close)
        try:
            self._declare(self._facts(Deadline(settings.timeout_s)))
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(RedisSettings.parse("redis", config))

    @classmethod
    def open_read_only(cls, config: Mapping[str, Any]) -> Self:
        """Open a storage for a program that only looks: prune no index, count no read as a use."""
        return cls(RedisSettings.parse("redis", config), is_read_only=True)

    def open_space(self, space: KeySpace) -> None:
        super().open_space(space)
        with self._calling() as (session, deadline):
            session.index.register(space, deadline)

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        with self._calling() as (session, deadline):
            return session.exists(space, hashes, deadline)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        with self._calling() as (session, deadline):
            return session.get(space, hashes, pages, deadline)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        with self._calling() as (session, deadline):
            return session.set(space, hashes, pages, deadline) if hashes else []

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        with self._calling() as (session, deadline):
            return session.delete(space, hashes, deadline)

    def spaces(self) -> Iterator[KeySpace]:
        with self._calling() as (session, _):
            return iter(session.index.spaces())

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        return (
            PageInfo(page_hash, space.stored_nbytes)
            for part in self._listed(space)
            for page_hash, nbytes in part
            if nbytes == space.stored_nbytes
        )

    def faults(self, space: KeySpace, hashes: Sequence[str] | None = None) -> Iterator[PageFault]:
        self.ensure_open()
        parts = self._listed(space) if hashes is None else self._looked_up(space, hashes)
        return (
            PageFault(page_hash, "wrong_size", _length_text(nbytes, space))
            for part in parts
            for page_hash, nbytes in part
            if nbytes not in (0, space.stored_nbytes)
        )

    def unreadable_spaces(self) -> Iterator[UnreadableSpace]:
        """Yield the key spaces whose manifest is lost or damaged, after a walk through the database."""
        self.ensure_open()
        return self._unreadable_spaces()

    def remove_space(self, space_id: str) -> int:
        """Remove a key space. Each step has its own deadline.

        Raises:
            StorageUnavailable, StorageTimeout: Some of the key space may still be there.
        """
        with self._calling() as (session, _):
            return session.index.remove_space(space_id) if SPACE_ID.fullmatch(space_id) else 0

    def clear(self, space: KeySpace) -> int:
        """Remove everything under the keys of pages of `space`. Damaged pages are not counted.

        Each step has its own deadline.

        Raises:
            StorageUnavailable, StorageTimeout: Some pages may still be there.
        """
        self.ensure_open()
        removed = 0
        for part in self._listed(space):
            gone = self.batch_delete(space, [page_hash for page_hash, _ in part])
            if not all(gone):
                raise StorageUnavailable(
                    f"redis: {self._settings.place}: {counted(removed, 'page')} removed,"
                    f" but {gone.count(False)} of the next {len(gone)} are left: clear again when"
                    " all servers answer"
                )
            whole = (nbytes == space.stored_nbytes for _, nbytes in part)
            removed += sum(map(min, gone, whole))
        return removed

    def diagnose(self) -> list[Diagnosis]:
        """Return the version, role, eviction policy, persistence and clock of each server."""
        with self._calling() as (session, deadline):
            servers = session.deployment.all_servers(deadline)
            return [
                replace(one, fact=f"{server.address}: {one.fact}") if servers[1:] else one
                for server in servers
                for one in diagnoses(server.info(deadline), ttl_s=self._settings.ttl_s)
            ]

    def stats(self) -> StorageStats:
        self.ensure_open()
        return StorageStats(counters=self._counters.snapshot())

    def close(self) -> None:
        super().close()
        self._sessions.close()

    # --- parts -----------------------------------------------------------------------------------

    @contextmanager
    def _calling(
        self, deadline: Deadline | None = None
    ) -> Generator[tuple[Session, Deadline], None, None]:
        """Provide the session and deadline of one call.

        Translate failures into the contract's errors.
        """
        deadline = deadline or Deadline(self._settings.timeout_s)
        self.ensure_open()
        try:
            yield self._sessions.get(), deadline
        except FAILURES as error:
            self.ensure_open()  # `close` ends running calls
            self._counters.add("timeouts" if isinstance(error, TIMEOUTS) else "unavailable")
            kind = StorageTimeout if isinstance(error, TIMEOUTS) else StorageUnavailable
            message = self._without_secrets(str(error))
            place = self._settings.place
            advice = getattr(error, "advice", None)
            text = f"redis: {'' if place in message else f'{place}: '}{message}"
            raised = kind(text, advice=advice)
            if isinstance(error, exceptions.AuthenticationError):
                self._read_password_again()
            raise raised from (error if message == str(error) else None)

    def _read_password_again(self) -> None:
        """Give new connections the password that `password_file` has now."""
        if self._settings.password_file is None:
            return
        try:
            password = self._settings.secret()
        except ValueError:  # somebody is replacing the file
            return
        if password and password != self._servers.options.get("password"):
            self._secrets = [*self._settings.secrets(password), *self._secrets]
            self._servers.options["password"] = password

    def _without_secrets(self, text: str) -> str:
        """Return `text` without secrets, because an error reply may repeat the command."""
        for secret in self._secrets:
            if len(secret) < _SHORT and secret.isalnum():  # such letters are in every text
                text = re.sub(rf"\b{secret}\b", "***", text)
            else:
                text = text.replace(secret, "***")
        return text

    def _listed(self, space: KeySpace) -> Iterator[list[tuple[str, int | None]]]:
        with self._calling() as (session, _):
            yield from session.index.pages(session.keys(space))

    def _looked_up(
        self, space: KeySpace, hashes: Sequence[str]
    ) -> Iterator[list[tuple[str, int | None]]]:
        for start in range(0, len(hashes), self._settings.max_batch):
            with self._calling() as (session, _):
                part = hashes[start : start + self._settings.max_batch]
                yield session.index.lengths(session.keys(space), part)

    def _unreadable_spaces(self) -> Iterator[UnreadableSpace]:
        with self._calling() as (session, _):
            yield from session.index.unreadable_spaces()

    def _new_session(self) -> Session:
        self._counters = Counters()
        return Session(
            self._settings,
            self._servers,
            self._sentinels,
            self._counters,
            is_cluster=bool(self._is_cluster),
            is_read_only=self._is_read_only,
        )

    def _facts(self, deadline: Deadline) -> list[ServerFacts]:
        """Ask the servers for their facts. If they turn out to be a cluster, open the session again."""
        try:
            with self._calling(deadline) as (session, _):
                facts = session.facts(deadline)
        except StorageUnavailable as error:
            if isinstance(error.__context__, exceptions.AuthenticationError):
                raise ConfigError(f"redis: {self._password_advice()}") from None
            raise
        if any(one.is_sentinel for one in facts):
            raise ConfigError(
                f"redis: url: {self._settings.place} is a sentinel, which holds no pages: name it in"
                " sentinels, with sentinel_master, or name the server itself here"
            )
        if self._is_cluster is None and facts[0].is_cluster:
            self._is_cluster = True
            self._sessions.renew()
            return self._facts(deadline)
        return facts

    def _password_advice(self) -> str:
        if "password" not in self._servers.options:
            return (
                "password: the server asks for one, but none is given: set password,"
                " password_file or password_env"
            )
        return "password: the server refuses it for this username: correct one of the two"

    def _declare(self, facts: Sequence[ServerFacts]) -> None:
        self.narrow(parallelism=self._settings.parallelism, max_batch=self._settings.max_batch)
        if self._settings.ttl_s is not None or any(one.policy is None for one in facts):
            self.narrow(retention=Retention.BEST_EFFORT)
        elif any(one.may_evict_anything for one in facts):
            self.narrow(retention=Retention.UNTIL_PRESSURE)


def _length_text(nbytes: int | None, space: KeySpace) -> str:
    if nbytes is None:
        return "its value is not a string"
    return f"it is {nbytes:,} bytes long instead of {space.stored_nbytes:,}"
