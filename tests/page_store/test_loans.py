"""Loans: once a call of the page store has returned or raised, nothing touches the caller's memory."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from clocks import ends_in
from framed import HASHES, NBYTES, TARGET, bytes_of, empty, filled, framed, transfer
from pages import hash_of, space
from servers import wait_until
from stores import Gate, HookedStorage

from hicache_storage import native
from hicache_storage.page import Page
from hicache_storage.page_store import PageStore, PageStoreSettings, Transfer, Verdict
from hicache_storage.page_store.page_memory import PageMemory
from hicache_storage.storage import Capabilities

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType

    from hicache_storage.keys import KeySpace
    from hicache_storage.page_store.page_memory import Buffer

OK, MISS = Verdict.OK, Verdict.MISS
PLAIN = Capabilities(parallelism=2)


class Late(HookedStorage):
    """A storage that touches every page of a call once more after its gate opens. It is revocable."""

    def __init__(self, capabilities: Capabilities) -> None:
        super().__init__(capabilities)
        self.gate: Gate | None = None
        self.ended = threading.Semaphore(0)
        self.seen: list[bytes] = []

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        return self._late(pages, lambda page: page.copy_from(b"!" * page.nbytes)) or [
            True for _ in pages
        ]

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        if self.gate is None:
            return super().batch_set(space, hashes, pages)
        return self._late(pages, lambda page: self.seen.append(page.tobytes())) or [
            True for _ in pages
        ]

    def _late(self, pages: Sequence[Page], touch: Callable[[Page], object]) -> list[bool] | None:
        assert self.gate is not None
        self.gate(lambda: None)
        for page in pages:
            if not self.capabilities.revocable or page.revocable is None:
                touch(page)
            elif page.revocable.enter():
                touch(page)
                page.revocable.leave()
        self.ended.release()
        return None


@pytest.fixture(params=[PLAIN, Capabilities(revocable=True), Capabilities(keeps_given=True)])
def late(request: pytest.FixtureRequest) -> Late:
    return Late(request.param)


def test_a_late_read_changes_no_page_of_its_caller(late: Late) -> None:
    with PageStore(late, PageStoreSettings(timeout_s=30)) as store:
        late.gate, pages = Gate(), filled(3)

        outcome = store.load([transfer(pages)], timeout_s=0.2)
        late.gate.open()

        assert late.ended.acquire(timeout=20)
        assert [[Verdict.TIMEOUT] * 3] == outcome.verdicts
        assert [bytes_of(n + 1) for n in range(3)] == [page.tobytes() for page in pages]


def test_a_late_write_sees_no_byte_that_its_caller_wrote_afterwards(late: Late) -> None:
    with PageStore(late, PageStoreSettings(timeout_s=30)) as store:
        store.open_space(TARGET)
        late.gate, pages = Gate(), filled(3)

        store.save([transfer(pages)], timeout_s=0.2)
        for page in pages:
            page.copy_from(b"?" * NBYTES)
        late.gate.open()

        assert late.ended.acquire(timeout=20)
        assert not any(b"?" * 16 in seen for seen in late.seen)


def test_a_late_call_keeps_private_memory_until_it_ends(late: Late) -> None:
    with PageStore(late, PageStoreSettings(timeout_s=30)) as store:
        late.gate = Gate()
        store.load([transfer(empty(1))], timeout_s=0.2)
        assert store.private_nbytes()[1] > 0

        late.gate.open()

        wait_until(lambda: store.private_nbytes()[1] == 0)


def test_calls_beyond_the_private_memory_are_not_tried() -> None:
    storage = Late(Capabilities(parallelism=4))
    large = space(page_nbytes=1 << 16)
    with PageStore(storage, PageStoreSettings(private_nbytes=1 << 16)) as store:
        storage.gate = Gate()
        outcomes = [
            store.load([Transfer(large, [hash_of(n)], [Page(bytearray(1 << 16))])], timeout_s=0.3)
            for n in range(2)
        ]
        storage.gate.open()

        assert [[[Verdict.TIMEOUT]]] * 2 == [outcome.verdicts for outcome in outcomes]
        assert storage.ended.acquire(timeout=20)
        assert not storage.ended.acquire(timeout=0.1)


def test_memory_that_comes_after_the_deadline_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, take = HookedStorage(), PageMemory.take

    def late(memory: PageMemory, nbytes: int, timeout_s: float) -> Buffer | None:
        time.sleep(2 * timeout_s)
        return take(memory, nbytes, 20)

    monkeypatch.setattr(PageMemory, "take", late)
    with PageStore(storage) as store:
        outcome = store.load([transfer(empty(1))], timeout_s=0.1)

    assert [[Verdict.TIMEOUT]] == outcome.verdicts
    assert not storage.calls["batch_get"]


def test_a_trusted_store_gets_the_pages_and_the_call_waits_for_its_end() -> None:
    storage = Late(PLAIN)
    with PageStore(storage, PageStoreSettings(lend_memory="always")) as store, ends_in(30):
        storage.gate, pages = Gate(), filled(1)
        loading = threading.Thread(
            target=store.load, args=([transfer(pages)],), kwargs={"timeout_s": 0.1}
        )
        loading.start()
        assert storage.gate.entered.wait(20)
        loading.join(0.5)
        assert loading.is_alive()

        storage.gate.open()
        loading.join(20)

        assert not loading.is_alive()
        assert b"!" * NBYTES == pages[0].tobytes()


def test_a_wrong_page_never_reaches_the_memory_of_its_caller_through_a_copy() -> None:
    storage = HookedStorage()
    with PageStore(storage) as store:
        store.open_space(TARGET)
        store.save([transfer(filled(2))])
        (held,) = (held for key, held in storage.inner._spaces.items() if key.pool == "kv")
        held[HASHES[0]] = memoryview(bytearray(len(held[HASHES[0]])))
        pages = [framed(7), framed(7)]

        assert [[Verdict.CORRUPT, OK]] == store.load([transfer(pages)]).verdicts
        assert [bytes_of(7), bytes_of(2)] == [page.tobytes() for page in pages]


def test_a_copied_page_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "digests", None)  # a second hash would fail
    with PageStore(HookedStorage()) as store:
        store.open_space(TARGET)

        assert [[OK] * 3] == store.save([transfer(filled(3))]).verdicts


def test_large_private_moves_are_split_to_fit_the_memory() -> None:
    storage, large = HookedStorage(Capabilities(parallelism=2)), space(page_nbytes=1 << 20)
    with PageStore(storage, PageStoreSettings(private_nbytes=32 << 20)) as store:
        store.open_space(large)
        hashes = [hash_of(n) for n in range(24)]
        pages = [Page(bytearray(1 << 20)) for _ in hashes]

        assert [[OK] * 24] == store.save([Transfer(large, hashes, pages)]).verdicts
        assert max(count for _, count in storage.batches) <= 3
        assert store.private_nbytes()[0] <= 32 << 20


@pytest.mark.parametrize("claims", [PLAIN, Capabilities(revocable=True)])
def test_an_interrupt_at_any_line_of_a_call_ends_its_loan(claims: Capabilities) -> None:
    """Ctrl-C arrives before each line in turn. The storage goes on, and the pages stay as they are."""
    for line in range(1, 400):
        storage = Late(claims)
        storage.gate, pages = Gate(), filled(1)
        store = PageStore(storage, PageStoreSettings(timeout_s=30))
        store.stats()  # the threads exist
        if not _interrupted(lambda: store.load([transfer(pages)], timeout_s=0.01), line):  # noqa: B023
            break
        storage.gate.open()
        store.close(20)
        assert bytes_of(1) == pages[0].tobytes(), line
    else:
        pytest.fail("the call has more lines than expected")
    storage.gate.open()
    store.close(20)
    assert line > 50


def _interrupted(call: Callable[[], object], line: int) -> bool:
    """Raise KeyboardInterrupt before line number `line` of `call`. Return False if it has fewer."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line" and "/page_store/" in frame.f_code.co_filename:
            left -= 1
            if not left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False
