"""Storages for tests of code that uses a storage.

`WrapperStorage` wraps another storage. Subclass it to change some calls and pass on the others.

    class SlowStorage(WrapperStorage):
        def batch_get(self, space, hashes, pages):
            time.sleep(0.1)
            return super().batch_get(space, hashes, pages)

`FaultyStorage` is a wrapper that misbehaves on chosen calls. Its plan and its seed determine
everything, so a test can replay a failure, and run a scenario once for each call that could fail.
"""

from __future__ import annotations

import enum
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.backend_support.wrapper import WrapperStorage
from hicache_storage.errors import StorageUnavailable
from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage

__all__ = ["Fault", "FaultyStorage", "Odds", "Strike", "WrapperStorage"]


class Fault(enum.Enum):
    """A kind of misbehavior."""

    RAISE = "raise"
    """The call raises `StorageUnavailable` and does nothing."""
    MISS = "miss"
    """The call returns False for every page and does nothing."""
    LIE = "lie"
    """The call returns True for every page and does nothing."""
    TEAR = "tear"
    """The second half of one page is zeros, as read or as stored."""
    FLIP = "flip"
    """One bit of one page is inverted, as read or as stored."""
    DELAY = "delay"
    """The call takes `delay_s` longer."""
    HANG = "hang"
    """The call waits until `release` is called, or until `hang_s` has passed."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault on the call number `call` (from 0) of one operation, such as "batch_get"."""

    operation: str
    call: int
    fault: Fault


@dataclass(frozen=True, slots=True)
class Odds:
    """A fault on a share of the calls of one operation. The seed decides which calls get it."""

    operation: str
    fault: Fault
    share: float
    """The share of the calls, from 0 to 1."""


class FaultyStorage(WrapperStorage):
    """A wrapper that misbehaves on the calls that `plan` names. Thread-safe. `close` closes `inner`.

    A call has one fault at most: the fault of its `Strike`, or of the first `Odds` that hit it.
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
            inner: The storage that gets the calls.
            plan: The faults, and the calls that have them.
            seed: Decides which calls the `Odds` hit, and which bytes are damaged.
            delay_s: The length of a delay.
            hang_s: The time after which a hanging call stops waiting for `release`. None: never.
        """
        super().__init__(inner)
        self.narrow(revocable=False)  # this class damages pages after a call
        self.calls: Counter[str] = Counter()
        """The calls so far, by operation."""
        self.struck: Counter[tuple[str, Fault]] = Counter()
        """The faults so far, by operation and kind."""
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

    def release(self) -> None:
        """Let every hanging call continue. Later calls do not hang."""
        self._released.set()

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self._call(
            "batch_exists", hashes, [], lambda _: self.inner.batch_exists(space, hashes)
        )

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        return self._call(
            "batch_get", hashes, pages, lambda _: self.inner.batch_get(space, hashes, pages)
        )

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        return self._call(
            "batch_set", hashes, pages, lambda sent: self.inner.batch_set(space, hashes, sent)
        )

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self._call(
            "batch_delete", hashes, [], lambda _: self.inner.batch_delete(space, hashes)
        )

    def close(self) -> None:
        self.release()
        super().close()

    def _call(
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
        self._damage(self._choose(pages), fault)
        return answers

    def _next_fault(self, operation: str) -> Fault | None:
        with self._lock:
            number = self.calls[operation]
            self.calls[operation] += 1
            fault = self._strikes.get((operation, number)) or self._draw(operation, number)
            if fault is not None:
                self.struck[operation, fault] += 1
            return fault

    def _draw(self, operation: str, number: int) -> Fault | None:
        """Return the fault of the first `Odds` that hit call `number`, the same in every thread."""
        for place, odds in enumerate(self._odds):
            if odds.operation == operation:
                draw = random.Random(f"{self._seed}/{place}/{operation}/{number}")
                if draw.random() < odds.share:
                    return odds.fault
        return None

    def _damaged_copies(self, pages: Sequence[Page], fault: Fault) -> list[Page]:
        """Return copies of the caller's pages, one of them damaged."""
        copies = [Page(bytearray(page.tobytes())) for page in pages]
        self._damage(self._choose(copies), fault)
        return copies

    def _choose(self, pages: Sequence[Page]) -> Page:
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
