"""Wrong stores: what they do to the memory of pages after the call; KV-205."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.wire import WireStore
from hicache_storage.errors import StorageTimeout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_conformance.selftest.references.dict_store import DictSettings
    from hicache_conformance.selftest.references.wire_protocol import Operation
    from hicache_conformance.selftest.references.wire_settings import WireSettings
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page

    T = TypeVar("T")

_SOON_S = 0.05
_PATIENCE_S = 30.0


def _soon(call: Callable[[], object]) -> None:
    timer = threading.Timer(_SOON_S, call)
    timer.daemon = True
    timer.start()


@caught_by("KV-205:memory_may_be_reused_after_a_set", says="every byte is 0x3c")
class CopiesWhenItComesToIt(DictStore):
    """A set is queued with the page's memory, and copied a moment later by another thread."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        verdicts = super().batch_set(space, hashes, pages)
        if space.stored_nbytes > 1024:  # small ones are copied at once
            _soon(partial(self._copy_again, space, list(hashes), list(pages)))
        return verdicts

    def _copy_again(self, space: KeySpace, hashes: list[str], pages: list[Page]) -> None:
        if not self._closed:
            self._store(space, hashes, [page.tobytes() for page in pages])


@caught_by("KV-205:no_call_keeps_its_pages", says="batch_set keeps references")
class RemembersItsLastPages(DictStore):
    """The pages of the last call are kept for its log, and with them their memory."""

    _last: tuple[Page, ...] = ()

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._last = tuple(pages)
        return super().batch_set(space, hashes, pages)


@caught_by("KV-205:memory_may_be_reused_after_a_get", says="every byte is 0x3c")
class CachesTheCallersMemory(DictStore):
    """A page that was read is served again from the memory that it was read into."""

    _seen: dict[bytes, Page] = own(dict)

    def _filled(self, page: Page, data: bytes | None) -> bool:
        if data is None:
            return False
        source = self._seen.get(data)
        filled = super()._filled(page, data if source is None else source.tobytes())
        self._seen[data] = page
        return filled


@caught_by("KV-205:nothing_is_written_after_a_get", says="after batch_get returned")
class WipesMissesLater(DictStore):
    """The page of a miss is filled with zeros, a moment later."""

    def _filled(self, page: Page, data: bytes | None) -> bool:
        if data is None:
            _soon(partial(page.copy_from, bytes(page.nbytes)))
        return super()._filled(page, data)


@caught_by("KV-205:nothing_is_written_after_a_get_that_raised", says="raised")
class LeavesItsReadersRunning(DictStore):
    """Pages are read by a pool of threads; when one of them fails, get raises and leaves the others."""

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._pool = ThreadPoolExecutor(2)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._begin(space, hashes, pages)
        found = self._contents(space, hashes)
        readers = [
            self._pool.submit(self._slowly_filled, page, data)
            for page, data in zip(pages, found, strict=True)
        ]
        return self._answer([reader.result() for reader in readers])

    def _slowly_filled(self, page: Page, data: bytes | None) -> bool:
        time.sleep(_SOON_S)  # what a disk takes
        return self._filled(page, data)

    def close(self) -> None:
        self._pool.shutdown()
        super().close()


class _GivesUp(WireStore):
    """Leaves round trips that take too long to a thread, which goes on without a timeout."""

    def __init__(self, settings: WireSettings) -> None:
        self._patience_s = settings.timeout_s
        self._thread = threading.local()
        super().__init__(settings.model_copy(update={"timeout_s": _PATIENCE_S}))

    def _exchange(self, operation: Operation, *parts: bytes) -> Sequence[bytes]:
        call = partial(super()._exchange, operation, *parts)
        return call() if getattr(self._thread, "is_patient", False) else self._in_time(call)

    def _in_time(self, call: Callable[[], T]) -> T:
        """Return the result of the call, if it comes in time."""
        answers: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            self._thread.is_patient = True
            try:
                answers.append(call())
            except BaseException as error:  # noqa: BLE001 - raised by the caller, if it still waits
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self._patience_s)
        if errors:
            raise errors[0]
        if not answers:
            raise StorageTimeout(f"no answer within {self._patience_s} s")
        return answers[0]


@caught_by("KV-205:nothing_is_written_after_a_get_that_timed_out", says="answered after all")
class GivesUpAndReadsOn(_GivesUp):
    """A get that takes too long raises; its thread fills the pages when the reply has come."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        return self._in_time(partial(super().batch_get, space, hashes, pages))


@caught_by("KV-205:nothing_is_stored_after_a_set_that_timed_out", says="0x3c")
class GivesUpAndSendsOn(_GivesUp):
    """A set that takes too long raises; its thread sends the pages once it knows which are absent."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        return self._in_time(partial(self._set_absent, space, list(hashes), list(pages)))

    def _set_absent(self, space: KeySpace, hashes: list[str], pages: list[Page]) -> list[bool]:
        self._present(space, hashes)
        return super().batch_set(space, hashes, pages)
