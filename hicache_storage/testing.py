"""A storage that misbehaves on a chosen call: for tests of what stands above a storage.

Everything is determined by the plan and the seed: a failure can be replayed, and a scenario can be run
once for each call that could have failed.
"""

from __future__ import annotations

import enum
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from hicache_storage.errors import StorageUnavailable, UnsupportedOperation
from hicache_storage.page import Page
from hicache_storage.storage import HiCacheStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import HostBuffer
    from hicache_storage.storage import PageInfo, StorageStats


class Fault(enum.Enum):
    """One way to misbehave."""

    RAISE = "raise"
    """The call raises `StorageUnavailable` and does nothing."""
    MISS = "miss"
    """The call answers False for every page and does nothing."""
    LIE = "lie"
    """The call answers True for every page and does nothing."""
    TEAR = "tear"
    """Of one page, the second half is zeros: as read, or as stored."""
    FLIP = "flip"
    """Of one page, one bit is another: as read, or as stored."""
    DELAY = "delay"
    """The call takes `delay_s` longer."""
    HANG = "hang"
    """The call waits for `release`, or for `hang_s`."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault on the call number `call` (from 0) of one operation, such as "batch_get"."""

    operation: str
    call: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class Odds:
    """A fault on some calls of one operation: which ones, the seed decides for each number."""

    operation: str
    fault: Fault
    share: float
    """Of the calls, from 0 to 1."""


class FaultyStorage(HiCacheStorage):
    """`inner`, but for the calls that `plan` names. Thread-safe; closes `inner` with itself.

    A call is struck once: a strike goes before odds, and of these the first that hits.
    """

    def __init__(
        self,
        inner: HiCacheStorage,
        plan: Iterable[Strike | Odds] = (),
        *,
        seed: int = 0,
        delay_s: float = 0.05,
        hang_s: float | None = None,
    ) -> None:
        """Wrap `inner`, which this storage owns from now on.

        Args:
            inner: What the calls go to.
            plan: What happens to which of them.
            seed: Decides odds, and which bytes are damaged.
            delay_s: How long a delay is.
            hang_s: A call that hangs gives up waiting for `release` after that long.
        """
        vars(self)["capabilities"] = inner.capabilities
        self.inner = inner
        self.calls: Counter[str] = Counter()
        """Calls so far, by operation."""
        self.struck: Counter[tuple[str, Fault]] = Counter()
        """Faults so far, by operation and kind."""
        plan = list(plan)
        self._strikes = {
            (each.operation, each.call): each.fault for each in plan if isinstance(each, Strike)
        }
        self._odds = [each for each in plan if isinstance(each, Odds)]
        self._seed = seed
        self._random = random.Random(seed)
        self._delay_s = delay_s
        self._hang_s = hang_s
        self._released = threading.Event()
        self._lock = threading.Lock()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:  # noqa: ARG003
        """Not built from a config: a fault is somebody's plan."""
        raise UnsupportedOperation(f"{cls.__name__} wraps another storage: construct it")

    def release(self) -> None:
        """Let every call that hangs go on, and hang none from now on."""
        self._released.set()

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self._struck(
            "batch_exists", hashes, [], lambda _: self.inner.batch_exists(space, hashes)
        )

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        return self._struck(
            "batch_get", hashes, pages, lambda _: self.inner.batch_get(space, hashes, pages)
        )

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        return self._struck(
            "batch_set", hashes, pages, lambda sent: self.inner.batch_set(space, hashes, sent)
        )

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self._struck(
            "batch_delete", hashes, [], lambda _: self.inner.batch_delete(space, hashes)
        )

    def open_space(self, space: KeySpace) -> None:
        self.inner.open_space(space)

    def spaces(self) -> Iterator[KeySpace]:
        return self.inner.spaces()

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        return self.inner.scan(space)

    def clear(self, space: KeySpace) -> int:
        return self.inner.clear(space)

    def register_buffer(self, buffer: HostBuffer) -> None:
        self.inner.register_buffer(buffer)

    def unregister_buffer(self, buffer: HostBuffer) -> None:
        self.inner.unregister_buffer(buffer)

    def stats(self) -> StorageStats:
        return self.inner.stats()

    def close(self) -> None:
        self.release()
        self.inner.close()
        super().close()

    def _struck(
        self,
        operation: str,
        hashes: Sequence[str],
        pages: Sequence[Page],
        call: Callable[[Sequence[Page]], list[bool]],
    ) -> list[bool]:
        fault = self._next_fault(operation)
        if fault is Fault.RAISE:
            raise StorageUnavailable(f"{operation} was told to fail")
        if fault in (Fault.MISS, Fault.LIE):
            return [fault is Fault.LIE] * len(hashes)
        if fault is Fault.DELAY:
            time.sleep(self._delay_s)
        if fault is Fault.HANG:
            self._released.wait(self._hang_s)
        if fault not in (Fault.TEAR, Fault.FLIP) or not pages:
            return call(pages)
        if operation == "batch_set":
            return call(self._damaged_copies(pages, fault))
        answers = call(pages)
        self._damage(self._chosen(pages), fault)
        return answers

    def _next_fault(self, operation: str) -> Fault | None:
        with self._lock:
            number = self.calls[operation]
            self.calls[operation] += 1
            fault = self._strikes.get((operation, number)) or self._drawn(operation, number)
            if fault is not None:
                self.struck[operation, fault] += 1
            return fault

    def _drawn(self, operation: str, number: int) -> Fault | None:
        """The same for one seed, whichever thread makes the call."""
        for place, odds in enumerate(self._odds):
            if odds.operation == operation:
                draw = random.Random(f"{self._seed}/{place}/{operation}/{number}")
                if draw.random() < odds.share:
                    return odds.fault
        return None

    def _damaged_copies(self, pages: Sequence[Page], fault: Fault) -> list[Page]:
        """The caller's pages are not ours to change."""
        copies = [Page(bytearray(page.tobytes())) for page in pages]
        self._damage(self._chosen(copies), fault)
        return copies

    def _chosen(self, pages: Sequence[Page]) -> Page:
        with self._lock:
            return pages[self._random.randrange(len(pages))]

    def _damage(self, page: Page, fault: Fault) -> None:
        data = bytearray(page.tobytes())
        if fault is Fault.TEAR:
            half = len(data) // 2
            data[half:] = bytes(len(data) - half)
        else:
            with self._lock:
                bit = self._random.randrange(len(data) * 8)
            data[bit // 8] ^= 1 << bit % 8
        page.copy_from(data)
