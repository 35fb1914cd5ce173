"""Stand for a store of a composition that could not be opened, so that the others can be used."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.backend_support.single_flight import SingleFlight
from hicache_storage.backend_support.wrapper import WrapperStorage
from hicache_storage.composition.claims import STRONGEST, weakest
from hicache_storage.errors import (
    HiCacheError,
    StorageTimeout,
    StorageUnavailable,
    UnsupportedOperation,
)
from hicache_storage.storage import Durability, HiCacheStorage, Retention

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer, Page
    from hicache_storage.storage import Capabilities

logger: logging.Logger = logging.getLogger("hicache_storage.composition")

_FIXED = ("alignment", "scatter_gather", "bounded", "revocable")
"""The claims by which callers frame and lend their pages, so they cannot change in an open storage."""


class UnopenedStorage(HiCacheStorage):
    """A storage whose every call raises the reason why it could not be opened."""

    capabilities: ClassVar[Capabilities] = STRONGEST
    """The widest claims. An instance claims what the storage would claim that it stands for."""
    usable_after_fork: ClassVar[bool] = True

    def __init__(
        self,
        error: StorageUnavailable | StorageTimeout,
        claims: Capabilities = STRONGEST,
        on_call: Callable[[], object] = lambda: None,
    ) -> None:
        self._error = error
        self._on_call = on_call
        vars(self)["capabilities"] = claims

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:  # noqa: ARG003
        """Refuse, because it stands for another storage.

        Raises:
            UnsupportedOperation: Always.
        """
        raise UnsupportedOperation(f"{cls.__name__} has no config")

    def ensure_open(self) -> NoReturn:
        super().ensure_open()
        self._on_call()
        error = self._error
        raise type(error)(str(error), advice=error.advice) from error.__cause__

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        del space, hashes
        self.ensure_open()

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        del space, hashes, pages
        self.ensure_open()

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        del space, hashes, pages
        self.ensure_open()

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        del space, hashes
        self.ensure_open()

    def parts(self) -> Mapping[str, HiCacheStorage]:
        """Return none: what it consists of is not known."""
        return {}


class AbsentStorage(WrapperStorage):
    """A storage that did not open together with the others. It is opened later, in the background.

    Until then each call raises the reason. The first call after the cool-down begins another attempt, on
    a thread of its own, and does not wait for it.
    """

    inner: HiCacheStorage
    """An `UnopenedStorage`, which raises the reason, or the storage that answers."""

    def __init__(
        self,
        label: str,
        error: StorageUnavailable | StorageTimeout,
        claims: Capabilities,
        open_again: Callable[[], HiCacheStorage],
        cooldown_s: float,
        *,
        usable_after_fork: bool,
    ) -> None:
        """Stand for a storage.

        Args:
            label: Names it in the log, such as "tier 'bucket'".
            error: Why it did not open.
            claims: What it would claim. What a server decides counts as not promised.
            open_again: Opens it.
            cooldown_s: The least time between two attempts.
            usable_after_fork: Whether it works in a forked child once it is open.
        """
        self._label = label
        self._claims = replace(
            claims, retention=Retention.BEST_EFFORT, durability=Durability.PROCESS
        )
        self._open_again = open_again
        self._cooldown_s = cooldown_s
        self._due_s = 0.0
        self._buffers: list[HostBuffer] = []
        self._lock = threading.Lock()
        self._attempts = ForkLocal(
            lambda: SingleFlight(f"open {label}", self._attempt), close=lambda _: None
        )
        super().__init__(self._unopened(error))
        vars(self)["usable_after_fork"] = usable_after_fork
        logger.warning("%s is absent, and is tried again later: %s", label, error)

    @property
    def is_absent(self) -> bool:
        """True until it is open."""
        return isinstance(self.inner, UnopenedStorage)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        return self.inner.batch_get(space, hashes, pages)

    def register_buffer(self, buffer: HostBuffer) -> None:
        with self._lock:
            if not self.is_absent:
                self.inner.register_buffer(buffer)
            self._buffers.append(buffer)

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        with self._lock:
            self._buffers = [one for one in self._buffers if one is not buffer]
            if not self.is_absent:
                self.inner.unregister_buffer(buffer)

    def close(self) -> None:
        self._closed = True  # before `inner` is closed: an attempt under way then closes its own
        super().close()

    def _unopened(self, error: StorageUnavailable | StorageTimeout) -> UnopenedStorage:
        self._due_s = time.monotonic() + self._cooldown_s
        return UnopenedStorage(error, self._claims, self._begin_attempt)

    def _begin_attempt(self) -> None:
        if time.monotonic() >= self._due_s:
            self._attempts.get().begin()

    def _attempt(self) -> None:
        try:
            self._take_in(self._open_again())
        except Exception as error:  # whatever it is, the storage stays absent
            logger.debug("%s is still absent", self._label, exc_info=True)
            self.inner = self._unopened(as_unavailable(error))
        else:
            logger.warning("%s answers now, and is used", self._label)

    def _take_in(self, opened: HiCacheStorage) -> None:
        with ExitStack() as stack:
            stack.callback(opened.close)
            self._check_claims(opened.capabilities)
            with self._lock:
                for buffer in self._buffers:
                    opened.register_buffer(buffer)
                self.inner = opened
            if not self._closed:
                stack.pop_all()

    def _check_claims(self, claims: Capabilities) -> None:
        both = weakest([self._claims, claims])
        for name in _FIXED:
            began = getattr(self._claims, name)
            if getattr(both, name) != began:
                raise StorageUnavailable(
                    f"it answers, but claims {name} {getattr(claims, name)}, and this process began"
                    f" with {began}",
                    advice="restart the engine",
                )


def as_unavailable(error: Exception) -> StorageUnavailable | StorageTimeout:
    """Return an error of opening a storage as the reason why it is absent."""
    if isinstance(error, (StorageUnavailable, StorageTimeout)):
        return error
    return StorageUnavailable(
        str(error), advice=error.advice if isinstance(error, HiCacheError) else None
    )


def is_absent(storage: HiCacheStorage) -> bool:
    """Return True for a storage that did not open with the others, until it is open."""
    return isinstance(storage, AbsentStorage) and storage.is_absent
