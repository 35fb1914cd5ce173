"""The open store of an adapter, which can be attached, detached, or opened late."""

from __future__ import annotations

import ctypes
import logging
import threading
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.integrations._backend_choice import (
    BackendChoice,
    close_all,
    close_store,
    closed_on_failure,
    register_memory,
    unregister_memory,
)
from hicache_storage.integrations._jobs import JobRunner
from hicache_storage.integrations.lmcache._identity import Identity, is_of_first_rank
from hicache_storage.integrations.lmcache._object_layouts import Layouts
from hicache_storage.observers import EventSource, open_observers
from hicache_storage.page_store import PageStore, PageStoreSettings
from hicache_storage.request_log import open_explain_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.integrations._jobs import JobKind
    from hicache_storage.integrations.lmcache._engine import EngineTypes, MemoryDesc, Serde
    from hicache_storage.integrations.lmcache._settings import AdapterSettings
    from hicache_storage.page_store import Observer

logger = logging.getLogger(__name__)

_CLOSE_STEP_S = 30.0
_REOPEN_S = 5.0


class Session:
    """An open store, with the threads that move pages and the identity of these pages."""

    def __init__(
        self,
        settings: AdapterSettings,
        engine: EngineTypes,
        memory: MemoryDesc | None,
        on_finished: Callable[[Session, JobKind], None],
    ) -> None:
        """Open the store. The session's threads call `on_finished`.

        Raises:
            ConfigError: A field is wrong, or a deadline is too long for LMCache's locks.
            StorageUnavailable, StorageTimeout: The store cannot be reached.
        """
        choice = _choice(settings)
        settings.check_ttls()
        sizes: Serde | None = engine.serde(settings.serde) if settings.serde else None
        self.settings = settings
        self.layouts = Layouts(settings.kv_dtype, settings.serde, sizes)
        revision = settings.labelled_revision(engine.version)
        self.identity = Identity(revision, settings.tenant, settings.server)
        self._sizes = sizes
        self._buffer: Any = None
        self.explain_log = open_explain_log(settings, engine="lmcache")
        self._observers: list[Observer] = []
        try:
            self._observers = _observers(settings)
            self.store = PageStore(
                choice.open(),
                PageStoreSettings(
                    checksum=settings.checksum,
                    timeout_s=settings.load_timeout_s,
                    write_timeout_s=settings.store_timeout_s,
                    parallelism=settings.parallelism,
                    private_nbytes=settings.queued_nbytes,
                ),
                observers=self._observers,
            )
            with closed_on_failure(self.store):
                if self.store.lends_memory and memory is not None:
                    self._register(memory)
                self.runner = JobRunner(
                    self.store,
                    settings,
                    on_finished=lambda kind: on_finished(self, kind),
                    owner=self.identity.owner(),
                )
        except BaseException:
            self._close_parts()
            raise

    def close(self) -> None:
        """Close everything, once nothing touches LMCache's memory any more."""
        while not self.runner.close(_CLOSE_STEP_S):
            logger.error("the store %r still uses LMCache's memory", self.settings.backend)
        if self._buffer is not None:
            unregister_memory(self.store, self._buffer)
        close_store(self.store)
        self._close_parts()

    def _register(self, memory: MemoryDesc) -> None:
        """Register LMCache's arena, or only the part that is sure to stay at its address."""
        size = getattr(memory, "stable_registration_size", None) or memory.size
        arena = (ctypes.c_ubyte * size).from_address(memory.ptr)
        buffer = memoryview(arena).cast("B")
        if register_memory(self.store, buffer):
            self._buffer = buffer

    def _close_parts(self) -> None:
        parts = (*self._observers, self.explain_log, self._sizes)
        close_all(part.close for part in parts if part is not None)


class Attachment:
    """The current session of an adapter, if it has one. Thread-safe.

    If a store cannot be reached at first, a thread tries to open it every few seconds. Until that
    succeeds the adapter is detached: every page is missing, and no page is stored.
    """

    def __init__(
        self,
        engine: EngineTypes,
        memory: MemoryDesc | None,
        on_finished: Callable[[Session, JobKind], None],
    ) -> None:
        self.session: Session | None = None
        self.failure = ""
        """Why the store is not open yet, or "" if it is open or was detached."""
        self._engine = engine
        self._memory = memory
        self._on_finished = on_finished
        self._changes = threading.Lock()
        self._wanted: AdapterSettings | None = None
        self._stop = threading.Event()

    def attach(self, settings: AdapterSettings) -> None:
        """Open a store in place of the present one. If the new store cannot be reached, open it later.

        Raises:
            ConfigError: A field is wrong. The present store stays attached.
        """
        with self._changes:
            _choice(settings)
            self._replace(settings)

    def detach(self) -> None:
        """Close the store. Return when nothing touches LMCache's memory any more. Idempotent."""
        with self._changes:
            self._stop.set()
            self._wanted, self.failure = None, ""
            session, self.session = self.session, None
            if session is not None:
                session.close()

    def _replace(self, settings: AdapterSettings) -> None:
        try:
            new = self._open(settings)
        except (StorageUnavailable, StorageTimeout) as error:
            new = None
            self._retry(settings, error)
        old, self.session = self.session, new
        self._wanted = settings
        if new is not None:
            self.failure = ""
            self._stop.set()
        if old is not None:
            old.close()

    def _open(self, settings: AdapterSettings) -> Session:
        return Session(settings, self._engine, self._memory, self._on_finished)

    def _retry(self, settings: AdapterSettings, error: Exception) -> None:
        self.failure = str(error)
        logger.warning("the store cannot be reached, and will be tried again: %s", error)
        self._stop.set()
        self._stop = threading.Event()
        threading.Thread(
            target=self._reopen, args=(settings, self._stop), name="hicache-reopen", daemon=True
        ).start()

    def _reopen(self, settings: AdapterSettings, stop: threading.Event) -> None:
        while not stop.wait(_REOPEN_S):
            try:
                session = self._open(settings)
            except Exception as error:  # noqa: BLE001 - a thread without a caller
                with self._changes:
                    if not stop.is_set():
                        self.failure = str(error)
                continue
            with self._changes:
                if not stop.is_set():
                    self.session, self.failure = session, ""
                    logger.info("the store is open")
                    return
            session.close()


def _choice(settings: AdapterSettings) -> BackendChoice:
    return BackendChoice.of(settings.backend, settings.backend_fields(), settings.load_timeout_s)


def _observers(settings: AdapterSettings) -> list[Observer]:
    """Return the observers of a session. Only objects of the first rank and group have events.

    Raises:
        ConfigError: An extra is missing, or an address of the events cannot be used.
    """
    events = None
    if settings.events is not None:
        events = EventSource(
            settings=settings.events, announces=is_of_first_rank, hash_format="uint64"
        )
    attributes = {"engine": "lmcache", "backend": settings.backend}
    return open_observers(tracing=settings.tracing, attributes=attributes, events=events)
