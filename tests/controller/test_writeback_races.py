"""Unsaved pages are claimed while L2 is cleared and refilled. No page may get another's hash."""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager

import pytest
from engines import cache_pools, compute, content, engine_on, is_right, leaked, page_store
from hicache_backends.memory import MemoryStorage
from pages import blank, hash_of
from stores import HookedStorage

from hicache_storage.controller import CacheController, ControllerSettings, WritePolicy
from hicache_storage.controller.cache import HostCache
from hicache_storage.controller.eviction import Entry
from hicache_storage.page_store.frame import FRAME_NBYTES

_RUNS = 300
_SLOTS = 64
_HASHES = [hash_of(number) for number in range(2 * _SLOTS)]


@contextmanager
def fast_thread_switches() -> Generator[None]:
    """Make the interpreter switch threads as often as possible."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(10e-6)
    yield
    sys.setswitchinterval(before_s)


def wrong_pages() -> int:
    """Return the number of wrong pages in L3 after a detach concurrent with clears and new pages."""
    storage, pools = MemoryStorage(), cache_pools(_SLOTS)
    with page_store(storage) as store:
        settings = ControllerSettings(write_policy=WritePolicy.WRITE_BACK)
        with CacheController(store, pools, settings) as controller:
            compute(controller, _HASHES[:_SLOTS])
            together = threading.Barrier(3)

            def flush() -> None:
                together.wait()
                for _ in range(3):
                    controller.cache.clear()

            def detach() -> None:
                together.wait()
                controller.detach()

            threads = [threading.Thread(target=task) for task in (flush, detach)]
            for thread in threads:
                thread.start()
            together.wait()
            for start in range(_SLOTS, 2 * _SLOTS, 16):
                compute(controller, _HASHES[start : start + 16])
            for thread in threads:
                thread.join()
        wrong = 0
        for pool in pools:
            framed = store.framed(pool.space)
            read = [blank(framed.stored_nbytes) for _ in _HASHES]
            hits = storage.batch_get(framed, _HASHES, read)
            for page_hash, page, hit in zip(_HASHES, read, hits, strict=True):
                wrong += hit and page.tobytes()[FRAME_NBYTES:] != content(pool, page_hash)
    return wrong


def test_no_page_is_stored_under_the_hash_of_a_page_that_was_flushed() -> None:
    with fast_thread_switches():
        assert not any(wrong_pages() for _ in range(_RUNS))


def test_a_clear_waits_until_the_listed_pages_are_claimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test starts a clear between the listing and the claim, which must wait."""
    storage = MemoryStorage()
    with engine_on(storage, cache_pools(4), write_policy=WritePolicy.WRITE_BACK) as engine:
        compute(engine, _HASHES[:4])
        claim = engine.cache.claim_for_writing
        flushed = threading.Event()

        def flush() -> None:
            engine.cache.clear()
            flushed.set()
            compute(engine, _HASHES[4:8])

        flushing = threading.Thread(target=flush)

        def claim_late(entries: Iterable[Entry], uses: int) -> list[Entry]:
            if flushing.ident is None:
                flushing.start()
                flushed.wait(0.2)
            return claim(entries, uses)

        monkeypatch.setattr(engine.cache, "claim_for_writing", claim_late)
        engine.detach()
        flushing.join()
        assert compute(engine, _HASHES[8:12]) == 4
    with (
        engine_on(storage, cache_pools()) as reader,
        reader.prefetch("r", _HASHES[:4]).result() as lease,
    ):
        assert is_right(lease)


def test_an_entry_that_has_left_l2_is_not_claimed() -> None:
    cache = HostCache(cache_pools(2))
    (slots,) = cache.allocate([0b11])
    entry, _ = cache.insert(_HASHES[0], slots, filled=0b11)
    cache.unpin([entry])
    assert cache.clear() == 0

    assert not cache.claim_for_writing([entry], uses=0)
    assert not entry.pins


def test_an_evicted_page_is_queued_before_unsaved_pages_are_claimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If a page is being evicted when a detach starts, a detach that returns True has written it."""
    storage = HookedStorage()
    with engine_on(storage, cache_pools(4), write_policy=WritePolicy.WRITE_BACK) as engine:
        compute(engine, _HASHES[:4])
        enqueue = engine._enqueue
        evicting, detached = threading.Event(), threading.Event()

        def enqueue_late(entries: list[Entry]) -> None:
            evicting.set()
            detached.wait(0.2)
            enqueue(entries)

        monkeypatch.setattr(engine.cache, "_write_back", enqueue_late)
        allocating = threading.Thread(target=lambda: engine.reserve(_HASHES[4:5]).abandon())
        allocating.start()
        assert evicting.wait(20)
        whole = engine.detach()
        detached.set()
        allocating.join()

        assert whole
        assert not leaked(engine)
    assert sum(len(list(storage.inner.scan(space))) for space in storage.inner.spaces()) == 8
