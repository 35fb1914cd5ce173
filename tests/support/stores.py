"""A storage whose calls a test can change, and hooks for it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

from hicache_backends.memory import MemoryStorage

from hicache_storage.keys import KeySpace
from hicache_storage.page import Page
from hicache_storage.storage import Capabilities
from hicache_storage.testing import WrapperStorage


class HookedStorage(WrapperStorage):
    """A memory storage whose calls pass through hooks, and are counted.

    `hooks["batch_get"]` is called with a function that returns the true answer. The hook may return
    another answer, raise, or wait.
    """

    inner: MemoryStorage

    def __init__(self, capabilities: Capabilities | None = None) -> None:
        super().__init__(MemoryStorage())
        vars(self)["capabilities"] = capabilities or Capabilities(parallelism=2)
        self.hooks: dict[str, Callable[[Callable[[], Any]], Any]] = {}
        self.calls: Counter[str] = Counter()
        self.batches: list[tuple[str, int]] = []
        self.segments: list[int] = []
        self._lock = threading.Lock()

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
    """A hook that holds every call until `open`. The event `entered` is set while it holds a call."""

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
    """Return a hook that raises `error`."""

    def hook(answer: Callable[[], Any]) -> Any:
        raise error

    return hook
