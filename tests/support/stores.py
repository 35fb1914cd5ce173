"""A storage that tests can make misbehave, and one that blocks until it is told to go on."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Self, cast

from hicache_backends.memory import MemoryStorage

from hicache_storage.storage import Capabilities, HiCacheStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page


class HookedStorage(HiCacheStorage):
    """A memory storage whose calls pass through hooks, and are counted.

    `hooks["batch_get"]` is called with a function that gives the true answer; it may answer something
    else, raise, or wait.
    """

    def __init__(self, capabilities: Capabilities | None = None) -> None:
        self.inner = MemoryStorage()
        vars(self)["capabilities"] = capabilities or Capabilities(parallelism=2)
        self.hooks: dict[str, Callable[[Callable[[], Any]], Any]] = {}
        self.calls: Counter[str] = Counter()
        self.batches: list[tuple[str, int]] = []
        self.segments: list[int] = []
        self._lock = threading.Lock()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        raise NotImplementedError

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self._call("batch_exists", lambda: self.inner.batch_exists(space, hashes), hashes)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.segments += [len(page.segments) for page in pages]
        return self._call("batch_get", lambda: self.inner.batch_get(space, hashes, pages), hashes)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.segments += [len(page.segments) for page in pages]
        return self._call("batch_set", lambda: self.inner.batch_set(space, hashes, pages), hashes)

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self._call("batch_delete", lambda: self.inner.batch_delete(space, hashes), hashes)

    def _call(
        self, name: str, answer: Callable[[], list[bool]], hashes: Sequence[str]
    ) -> list[bool]:
        with self._lock:
            self.calls[name] += 1
            self.batches.append((name, len(hashes)))
        hook = self.hooks.get(name)
        return cast("list[bool]", hook(answer)) if hook else answer()


class Gate:
    """A hook that holds every call until `open`; `entered` tells that one is being held."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._opened = threading.Event()

    def __call__(self, answer: Callable[[], Any]) -> Any:
        self.entered.set()
        assert self._opened.wait(60)
        return answer()

    def open(self) -> None:
        self._opened.set()


def failing(error: BaseException) -> Callable[[Callable[[], Any]], Any]:
    """A hook that raises."""

    def hook(answer: Callable[[], Any]) -> Any:
        raise error

    return hook
