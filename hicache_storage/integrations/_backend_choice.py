"""Choose and open the backend of an adapter, and register the engine's memory with it."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from hicache_storage.config import load_extra_config
from hicache_storage.durations import parse_seconds
from hicache_storage.errors import ConfigError
from hicache_storage.registry import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from hicache_storage.page_store import PageStore
    from hicache_storage.storage import HiCacheStorage

logger = logging.getLogger(__name__)


def backend_fields(config: Mapping[str, Any] | str, where: str) -> dict[str, Any]:
    """Return the fields of a backend's config.

    Args:
        config: The fields, or "@" followed by the path of a file that has them (.json, .toml, .yaml).
        where: The name of the config in messages.

    Raises:
        ConfigError: The file cannot be read, or does not hold an object.
    """
    if not isinstance(config, str):
        return dict(config)
    if not config.startswith("@"):
        raise ConfigError(f"{where}: must be an object, or '@' and the path of a file")
    return load_extra_config(config, where=where)


class BackendChoice(NamedTuple):
    """A backend's class and the fields of its config."""

    storage_class: type[HiCacheStorage]
    fields: dict[str, Any]
    timeout_s: float | None
    """The time limit for each call of a bounded backend. None: calls may take any time."""

    @classmethod
    def of(cls, backend: str, fields: Mapping[str, Any], load_timeout_s: float) -> Self:
        """Choose a backend for loads that may take `load_timeout_s`.

        A bounded backend gets half of `load_timeout_s` as its `timeout_s`, unless the user set that, so
        that it gives up a call before its caller does.

        Raises:
            UnknownBackend, BackendNotInstalled, ConfigError: The backend or its config is wrong.
        """
        storage_class, own = resolve(backend, fields)
        # The class can be that of any backend, which checks its own fields when it opens.
        if not getattr(getattr(storage_class, "capabilities", None), "bounded", False):
            return cls(storage_class, own, None)
        try:
            timeout_s = parse_seconds(own.setdefault("timeout_s", load_timeout_s / 2))
        except ValueError:
            timeout_s = None
        return cls(storage_class, own, timeout_s)

    def open(self) -> HiCacheStorage:
        """Open the storage.

        Raises:
            ConfigError: A field is wrong, missing or unknown.
            StorageUnavailable, StorageTimeout: The store cannot be reached.
        """
        return self.storage_class.from_config(self.fields)


@contextmanager
def closed_on_failure(store: PageStore) -> Generator[None, None, None]:
    """Close a page store and its storage if the `with` block fails. The next try opens new ones."""
    try:
        yield
    except BaseException:
        close_store(store)
        raise


def close_store(store: PageStore) -> None:
    """Close a page store and its storage. Log errors, because no caller can handle them any more."""
    close_all([store.close, store.storage.close])


def close_all(closes: Iterable[Callable[[], object]]) -> None:
    """Close the parts of an adapter in order. If one fails, log the error and close the rest."""
    for close in closes:
        try:
            close()
        except Exception:
            logger.warning("a part of the adapter could not be closed", exc_info=True)


def register_memory(store: PageStore, memory: memoryview) -> bool:
    """Register the engine's memory with the storage. If that fails, return False: pages are copied."""
    try:
        store.register_buffer(memory)
    except Exception:
        logger.warning(
            "the store cannot register the engine's memory, and will copy each page once more",
            exc_info=True,
        )
        return False
    return True


def unregister_memory(store: PageStore, memory: memoryview) -> None:
    """Undo `register_memory`. Log an error and go on, because the store is closed next anyway."""
    try:
        store.unregister_buffer(memory)
    except Exception:
        logger.warning("the engine's memory is still registered", exc_info=True)
