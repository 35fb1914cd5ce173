"""Open the storage of a tier in the background, at once or as soon as it can be reached."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from hicache_storage.errors import BackendNotInstalled, ConfigError, UnknownBackend
from hicache_storage.integrations._backend_choice import (
    BackendChoice,
    close_store,
    closed_on_failure,
    register_memory,
    unregister_memory,
)
from hicache_storage.integrations._jobs import JobRunner
from hicache_storage.observers import open_observers
from hicache_storage.page_store import PageStore, PageStoreSettings

if TYPE_CHECKING:
    from hicache_storage.integrations.vllm._settings import TierSettings
    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage

logger = logging.getLogger("vllm.hicache_storage")

_FIRST_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 30.0
_MISTAKES = (ConfigError, BackendNotInstalled, UnknownBackend)
"""Errors in the config, after which later tries cannot succeed either."""


class StoreConnection:
    """A connection to the storage. A thread opens it, and tries again until the store answers.

    Until the store is open, `runner` is None. Thread-safe.
    """

    def __init__(self, settings: TierSettings, memory: memoryview, owner: KeySpace) -> None:
        """Begin to open the storage, and wait at most `start_timeout_s` for it.

        The sketch of `admission` is kept under the key space `owner`.

        Raises:
            ConfigError, UnknownBackend, BackendNotInstalled: The config is wrong.
        """
        self.runner: JobRunner | None = None
        self.store: PageStore | None = None
        self._settings = settings
        self._memory = memory
        self._owner = owner
        self._choice = BackendChoice.of(
            settings.backend, settings.backend_fields(), settings.load_timeout_s
        )
        self._observers = open_observers(
            tracing=settings.tracing, attributes={"engine": "vllm", "backend": settings.backend}
        )
        self._registered = False
        self._mistake: Exception | None = None
        self._tried = threading.Event()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._open, name="hicache-connect", daemon=True)
        self._thread.start()
        self._tried.wait(settings.start_timeout_s)
        if self._mistake is not None:
            raise self._mistake
        if self.runner is None:
            logger.warning(
                "the store of backend %r does not answer: the engine runs without it, and tries"
                " again",
                settings.backend,
            )

    def close(self, timeout_s: float) -> bool:
        """Close the connection. Return True if nothing touches the engine's memory from now on.

        Idempotent.
        """
        self._stopped.set()
        with self._lock:
            runner, store = self.runner, self.store
            self.runner = None
        if runner is None or store is None:
            return True
        unused = runner.close(timeout_s)
        if self._registered and unused:
            unregister_memory(store, self._memory)
        # Closing waits for running calls. The engine waits for that only up to `timeout_s`.
        closing = threading.Thread(
            target=close_store, args=(store,), name="hicache-close", daemon=True
        )
        closing.start()
        closing.join(timeout_s)
        return unused

    # --- the thread ----------------------------------------------------------------------------------

    def _open(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._stopped.is_set():
            try:
                self._connect(self._choice.open())
            except _MISTAKES as error:
                self._mistake = error
                if self._tried.is_set():
                    logger.error("the store cannot be opened: %s", error)  # noqa: TRY400
                self._tried.set()
                return
            except Exception as error:  # noqa: BLE001 - a storage may raise anything
                level = logging.DEBUG if self._tried.is_set() else logging.WARNING
                logger.log(level, "the store cannot be opened: %s: %s", type(error).__name__, error)
                self._tried.set()
                self._stopped.wait(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            else:
                if self._tried.is_set():
                    logger.warning("the store answers now")
                self._tried.set()
                return

    def _connect(self, storage: HiCacheStorage) -> None:
        settings = self._settings
        store = PageStore(
            storage,
            PageStoreSettings(
                checksum=settings.checksum,
                timeout_s=settings.load_timeout_s,
                write_timeout_s=settings.store_timeout_s,
                parallelism=settings.parallelism,
                private_nbytes=settings.queued_nbytes,
            ),
            observers=self._observers,
        )
        with closed_on_failure(store):
            self._registered = store.lends_memory and register_memory(store, self._memory)
            with self._lock:
                if not self._stopped.is_set():
                    self.runner = JobRunner(store, settings, owner=self._owner)
                    self.store = store
                    return
        close_store(store)  # the engine ended in the meantime
