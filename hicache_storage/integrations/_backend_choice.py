"""The backend that an adapter opens, and whether it may get the engine's own memory."""

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
        config: The fields, or "@" and the path of a file with them (.json, .toml, .yaml).
        where: The name of the config in messages.

    Raises:
        ConfigError: The file cannot be read, or holds no object.
    """
    if not isinstance(config, str):
        return dict(config)
    if not config.startswith("@"):
        raise ConfigError(f"{where}: must be an object, or '@' and the path of a file")
    return load_extra_config(config, where=where)


class BackendChoice(NamedTuple):
    """A backend's class with its own fields."""

    storage_class: type[HiCacheStorage]
    fields: dict[str, Any]
    timeout_s: float | None
    """The time limit of a bounded backend's calls. None: calls may take any time."""

    @classmethod
    def of(cls, backend: str, fields: Mapping[str, Any], load_timeout_s: float) -> Self:
        """Choose a backend for loads that may take `load_timeout_s`.

        A bounded backend gets half of that as its `timeout_s`, unless the user set one. A load begins
        in the first half only, so it ends a second after `load_timeout_s` at the latest.

        Raises:
            UnknownBackend, BackendNotInstalled, ConfigError: The backend or its config is wrong.
        """
        storage_class, own = resolve(backend, fields)
        # The class may be any, and it refuses its own fields when it opens.
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

    def ends_within(self, storage: HiCacheStorage, timeout_s: float) -> bool:
        """Return True if the calls of `storage` are sure to end, and in this time."""
        return (
            storage.capabilities.bounded
            and self.timeout_s is not None
            and self.timeout_s <= timeout_s
        )

    def lends_memory(self, storage: HiCacheStorage, load_timeout_s: float) -> bool:
        """Return True if `storage` may access the engine's memory: its calls end in time, or lose it."""
        return storage.capabilities.revocable or self.ends_within(storage, load_timeout_s)


@contextmanager
def closed_on_failure(store: PageStore) -> Generator[None, None, None]:
    """Close a page store and its storage if the block fails, so that the next try opens another one."""
    try:
        yield
    except BaseException:
        close_store(store)
        raise


def close_store(store: PageStore) -> None:
    """Close a page store and its storage. Errors are logged, because nobody can mend them any more."""
    close_all([store.close, store.storage.close])


def close_all(closes: Iterable[Callable[[], object]]) -> None:
    """Close the parts of an adapter, in this order. An error is logged, and keeps no other part open."""
    for close in closes:
        try:
            close()
        except Exception:
            logger.warning("a part of the adapter could not be closed", exc_info=True)


def register_memory(store: PageStore, memory: memoryview) -> bool:
    """Let the storage prepare the engine's memory. Return False if it cannot, and will copy pages."""
    try:
        store.register_buffer(memory)
    except Exception:
        logger.warning("the store will copy pages once more", exc_info=True)
        return False
    return True


def unregister_memory(store: PageStore, memory: memoryview) -> None:
    """Undo `register_memory`. An error is logged: the store is closed next, whatever it says."""
    try:
        store.unregister_buffer(memory)
    except Exception:
        logger.warning("the engine's memory is still registered", exc_info=True)
