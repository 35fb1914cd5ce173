from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from framed import DRAFT, HASHES, TARGET, empty, filled, framed, transfer
from stores import HookedStorage, failing

from hicache_storage.errors import StorageTimeout, StorageUnavailable
from hicache_storage.events import observer
from hicache_storage.events.messages import AllBlocksCleared, BlockRemoved, BlockStored, block_hash
from hicache_storage.events.observer import AnnouncedPages, EventObserver
from hicache_storage.events.settings import EventSettings
from hicache_storage.keys import KeySpace
from hicache_storage.page_store import PageStore, PoolSpec
from hicache_storage.page_store.results import Transfer

SETTINGS = {"endpoint": "tcp://127.0.0.1:1"}


class Publisher:
    """A publisher that keeps the events that it receives."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, events: list[Any]) -> bool:
        self.events += events
        return True

    def stats(self) -> dict[str, int]:
        return {"event_batches_sent": len(self.events)}

    def take(self) -> list[Any]:
        taken, self.events = self.events, []
        return taken


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Publisher:
    kept = Publisher()

    def acquire(settings: EventSettings, rank: int | None) -> Publisher:
        return kept

    monkeypatch.setattr(observer, "acquire_publisher", acquire)
    return kept


@pytest.fixture
def storage() -> HookedStorage:
    return HookedStorage()


def everything(space: KeySpace) -> bool:
    return True


def targets(space: KeySpace) -> bool:
    return space.pool == TARGET.pool


@pytest.fixture
def open_store(storage: HookedStorage, publisher: Publisher) -> Iterator[Callable[..., PageStore]]:
    opened: list[PageStore] = []

    def open_it(announces: Callable[[KeySpace], bool] = everything, **fields: Any) -> PageStore:
        settings = EventSettings.parse("test", {**SETTINGS, **fields})
        events = EventObserver(settings, announces=announces, hash_format="int64")
        store = PageStore(storage, observers=[events])
        opened.append(store)
        for space in (TARGET, DRAFT):
            store.open_space(space)
        return store

    yield open_it
    for store in opened:
        store.close()


def blocks(*pages: int) -> list[Any]:
    return [block_hash(HASHES[page], "int64") for page in pages]


def stored(*pages: int) -> BlockStored:
    return BlockStored(blocks(*pages), TARGET.page_tokens, "STORAGE")


def removed(*pages: int) -> BlockRemoved:
    return BlockRemoved(blocks(*pages), "STORAGE")


class TestGains:
    def test_only_pages_whose_save_is_ok_are_stored(
        self, open_store: Callable[..., PageStore], storage: HookedStorage, publisher: Publisher
    ) -> None:
        storage.hooks["batch_set"] = lambda answer: [True, False, True]

        open_store().save([transfer(filled(3))])

        assert [stored(0, 2)] == publisher.events

    def test_a_save_without_an_answer_says_nothing(
        self, open_store: Callable[..., PageStore], storage: HookedStorage, publisher: Publisher
    ) -> None:
        storage.hooks["batch_set"] = failing(StorageTimeout("no answer"))

        open_store().save([transfer(filled(3))])

        assert [] == publisher.events

    def test_a_page_is_stored_when_all_its_pools_are(
        self, open_store: Callable[..., PageStore], storage: HookedStorage, publisher: Publisher
    ) -> None:
        store = open_store()
        answers = iter([[True, True], [True, False]])
        storage.hooks["batch_set"] = lambda answer: next(answers)

        store.save([transfer(filled(2)), Transfer(DRAFT, HASHES[:2], [framed(3), framed(4)])])

        assert [stored(0)] == publisher.events or [stored(1)] == publisher.events

    def test_pools_that_are_not_announced_have_no_events(
        self, open_store: Callable[..., PageStore], publisher: Publisher
    ) -> None:
        store = open_store(targets)

        store.save([Transfer(DRAFT, HASHES[:1], [framed(1)])])
        store.present(DRAFT, HASHES[:1])
        store.delete(DRAFT, HASHES[:1])
        store.clear(DRAFT)

        assert [] == publisher.events

    def test_medium_and_form_of_hashes_are_settings(
        self, open_store: Callable[..., PageStore], publisher: Publisher
    ) -> None:
        open_store(medium="DISK", block_hashes="bytes").save([transfer(filled(1))])

        assert [
            BlockStored([bytes.fromhex(HASHES[0])], TARGET.page_tokens, "DISK")
        ] == publisher.events


_READERS: list[tuple[str, Callable[[PageStore], object]]] = [
    ("batch_exists", lambda store: store.match(HASHES[:1], [PoolSpec(space=TARGET)])),
    ("batch_exists", lambda store: store.present(TARGET, HASHES[:1])),
    ("batch_get", lambda store: store.load([transfer(empty(1))])),
    ("batch_delete", lambda store: store.delete(TARGET, HASHES[:1])),
]


class TestLosses:
    def test_an_announced_page_that_a_load_misses_is_removed_once(
        self, open_store: Callable[..., PageStore], storage: HookedStorage, publisher: Publisher
    ) -> None:
        store = open_store()
        store.save([transfer(filled(2))])
        storage.inner.batch_delete(store.framed(TARGET), HASHES[:1])
        publisher.take()

        for _ in range(2):
            store.load([transfer(empty(3))])

        assert [removed(0)] == publisher.events

    def test_a_corrupt_page_is_removed(
        self, open_store: Callable[..., PageStore], storage: HookedStorage, publisher: Publisher
    ) -> None:
        store = open_store()
        store.save([transfer(filled(1))])
        publisher.take()
        storage.hooks["batch_get"] = lambda answer: [True]

        store.load([transfer(empty(1))])

        assert [removed(0)] == publisher.events

    def test_a_load_without_an_answer_says_nothing(
        self, open_store: Callable[..., PageStore], storage: HookedStorage, publisher: Publisher
    ) -> None:
        store = open_store()
        store.save([transfer(filled(1))])
        publisher.take()
        storage.hooks["batch_get"] = failing(StorageUnavailable("no one is there"))
        storage.hooks["batch_exists"] = failing(StorageUnavailable("no one is there"))

        store.load([transfer(empty(1))])
        store.present(TARGET, HASHES[:1])

        assert [] == publisher.events

    @pytest.mark.parametrize("lookup", ["match", "present"])
    def test_an_announced_page_that_a_lookup_misses_is_removed(
        self,
        open_store: Callable[..., PageStore],
        storage: HookedStorage,
        publisher: Publisher,
        lookup: str,
    ) -> None:
        store = open_store()
        store.save([transfer(filled(3))])
        storage.inner.batch_delete(store.framed(TARGET), HASHES[1:2])
        publisher.take()

        if lookup == "match":
            store.match(HASHES, [PoolSpec(space=TARGET)])
        else:
            store.present(TARGET, HASHES)

        assert [removed(1)] == publisher.events

    def test_pages_that_were_never_announced_are_not_removed(
        self, open_store: Callable[..., PageStore], publisher: Publisher
    ) -> None:
        store = open_store()

        store.match(HASHES, [PoolSpec(space=TARGET)])
        store.delete(TARGET, HASHES)

        assert [] == publisher.events

    def test_a_delete_removes_the_pages_that_are_gone(
        self, open_store: Callable[..., PageStore], storage: HookedStorage, publisher: Publisher
    ) -> None:
        store = open_store()
        store.save([transfer(filled(2))])
        publisher.take()
        storage.hooks["batch_delete"] = lambda answer: [False, True]

        store.delete(TARGET, HASHES[:2])

        assert [removed(1)] == publisher.events

    def test_a_page_that_another_space_still_has_is_not_removed(
        self, open_store: Callable[..., PageStore], publisher: Publisher
    ) -> None:
        store = open_store()
        store.save([transfer(filled(1))])
        publisher.take()

        store.present(DRAFT, HASHES[:1])

        assert [] == publisher.events

    def test_a_page_that_two_spaces_saved_alone_is_removed_with_the_last(
        self, open_store: Callable[..., PageStore], publisher: Publisher
    ) -> None:
        store = open_store()
        store.save([transfer(filled(1))])
        store.save([Transfer(DRAFT, HASHES[:1], [framed(1)])])
        publisher.take()

        store.delete(TARGET, HASHES[:1])
        assert [] == publisher.take()
        store.delete(DRAFT, HASHES[:1])

        assert [removed(0)] == publisher.events

    @pytest.mark.parametrize(
        ("method", "call"),
        _READERS,
        ids=["match", "present", "load", "delete"],
    )
    def test_a_call_does_not_remove_a_page_that_is_saved_before_its_end(
        self,
        open_store: Callable[..., PageStore],
        storage: HookedStorage,
        publisher: Publisher,
        method: str,
        call: Callable[[PageStore], object],
    ) -> None:
        store = open_store()

        def save_after(answer: Callable[[], Any]) -> Any:
            answered = answer()
            store.save([transfer(filled(1))])
            return answered

        storage.hooks[method] = save_after
        call(store)

        assert [stored(0)] == publisher.events

    def test_a_page_is_removed_although_the_clock_was_set_back(
        self,
        open_store: Callable[..., PageStore],
        publisher: Publisher,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        store = open_store()
        store.save([transfer(filled(1))])
        monkeypatch.setattr(time, "time_ns", lambda: 0)

        store.delete(TARGET, HASHES[:1])

        assert [stored(0), removed(0)] == publisher.events

    def test_a_page_that_is_stored_again_is_announced_again(
        self, open_store: Callable[..., PageStore], publisher: Publisher
    ) -> None:
        store = open_store()

        for _ in range(2):
            store.save([transfer(filled(1))])
            store.delete(TARGET, HASHES[:1])

        assert [stored(0), removed(0)] * 2 == publisher.events


class TestClears:
    def test_all_blocks_are_cleared_when_every_key_space_of_an_announced_page_is(
        self, open_store: Callable[..., PageStore], publisher: Publisher
    ) -> None:
        store = open_store()
        store.save([transfer(filled(1)), Transfer(DRAFT, HASHES[:1], [framed(1)])])
        publisher.take()

        store.clear(TARGET)
        assert [] == publisher.take()
        store.clear(DRAFT)

        assert [AllBlocksCleared()] == publisher.events

    def test_a_page_that_is_saved_between_two_clears_is_not_cleared(
        self, open_store: Callable[..., PageStore], publisher: Publisher
    ) -> None:
        store = open_store()
        store.save([transfer(filled(1)), Transfer(DRAFT, HASHES[:1], [framed(1)])])

        store.clear(TARGET)
        store.save([transfer(filled(1))])
        store.clear(DRAFT)

        assert AllBlocksCleared() not in publisher.events

    def test_the_pages_of_a_cleared_space_are_removed_while_another_space_has_pages(
        self, open_store: Callable[..., PageStore], publisher: Publisher
    ) -> None:
        store = open_store()
        store.save([transfer(filled(2))])
        store.save([Transfer(DRAFT, HASHES[1:3], [framed(1), framed(2)])])
        publisher.take()

        store.clear(TARGET)

        assert [removed(0)] == publisher.events

    def test_a_page_that_is_saved_before_the_end_of_a_clear_is_not_cleared(
        self,
        open_store: Callable[..., PageStore],
        storage: HookedStorage,
        publisher: Publisher,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        store = open_store()
        store.save([transfer(filled(1))])
        publisher.take()

        def save_after(space: KeySpace) -> int:
            cleared = storage.inner.clear(space)
            store.save([Transfer(TARGET, HASHES[1:2], [framed(1)])])
            return cleared

        monkeypatch.setattr(storage, "clear", save_after)
        store.clear(TARGET)

        assert [stored(1), removed(0)] == publisher.events

    def test_a_clear_of_a_space_without_announced_pages_says_nothing(
        self, open_store: Callable[..., PageStore], publisher: Publisher
    ) -> None:
        open_store().clear(TARGET)

        assert [] == publisher.events


def test_the_publishers_counters_are_the_page_stores(
    open_store: Callable[..., PageStore], publisher: Publisher
) -> None:
    store = open_store()

    store.save([transfer(filled(1))])

    assert 1 == store.stats()["event_batches_sent"]


def test_the_pages_announced_first_are_forgotten_first() -> None:
    pages = AnnouncedPages(2)

    pages.add([1, 2], [TARGET])
    pages.add([1, 3], [TARGET])

    assert [1, 3] == pages.remove(((TARGET, block) for block in (1, 2, 3)), time.monotonic_ns())


def test_of_the_many_tenants_of_one_page_those_that_saved_it_first_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(observer, "_MOST_GROUPS", 2)
    pages = AnnouncedPages(10)
    tenants = [replace(TARGET, tenant=str(number)) for number in range(3)]
    for tenant in tenants:
        pages.add([1], [tenant])

    assert [1] == pages.remove(((tenant, 1) for tenant in tenants[1:]), time.monotonic_ns())


def test_a_loss_beside_a_gain_is_published_after_it(
    open_store: Callable[..., PageStore],
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store()
    publish = publisher.publish
    loss = threading.Thread(target=lambda: store.delete(TARGET, HASHES[:1]))

    def lose_meanwhile(events: list[Any]) -> bool:
        if not publisher.events and not loss.ident:
            loss.start()
            loss.join(0.2)  # without an order, the loss is published within this time
        return publish(events)

    monkeypatch.setattr(publisher, "publish", lose_meanwhile)
    store.save([transfer(filled(1))])
    loss.join()

    assert [stored(0), removed(0)] == publisher.events


def test_a_forked_child_announces_nothing_and_does_not_wait(publisher: Publisher) -> None:
    settings = EventSettings.parse("test", SETTINGS)
    events = EventObserver(settings, announces=everything, hash_format="int64")
    store = PageStore(HookedStorage(), observers=[events])
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with events._order:
            is_held.set()
            is_over.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        store.present(TARGET, HASHES[:1])
        events.close()
        os._exit(len(publisher.events))
    ended = os.waitpid(child, 0)[1]
    is_over.set()
    holder.join()
    store.close()

    assert 0 == ended
